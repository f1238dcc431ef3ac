"""Promise: whatever the description of the API allows a client to send, or forbids, the server answers as described
and never with a fault of its own."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.torture.servers import Nursery

schemathesis = pytest.importorskip("schemathesis")

from schemathesis import GenerationMode  # noqa: E402
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

EXAMPLES = 400 if os.environ.get("KESTREL_TORTURE") == "long" else 25
MOST_TOKENS = 4  # of an answer: it is the request that matters here


def check(case: Any, met: Counter[str]) -> None:
    """Send one generated request and hold the answer against the description."""
    body = case.body
    if isinstance(body, dict):
        for name in ("max_tokens", "max_completion_tokens"):
            if isinstance(body.get(name), int) and body[name] > MOST_TOKENS:
                body[name] = MOST_TOKENS
    response = case.call(timeout=60)
    met[f"{case.method} {case.path} {response.status_code}"] += 1
    checks = [not_a_server_error, status_code_conformance]
    if "text/event-stream" not in response.headers.get("content-type", [""])[0]:
        checks += [content_type_conformance, response_schema_conformance]
    case.validate_response(response, checks=checks)


def test_the_server_answers_as_it_describes_itself(nursery: Nursery, folder: Path) -> None:
    server = nursery.start(folder, f"server.default_max_tokens={MOST_TOKENS}")
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    met: Counter[str] = Counter()
    failures: list[str] = []
    for found in schema.get_all_operations():
        operation = found.ok()

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in GenerationMode)))
        def try_it(case: Any) -> None:
            check(case, met)

        try:
            try_it()
        except BaseException as error:  # hypothesis may raise a group of them
            failures.append(f"{operation.label}: {error}")
    print(f"\n{met.total()} requests: {dict(sorted(met.items()))}")
    assert not failures, "\n\n".join(failures)
    assert "Traceback" not in server.log and "the engine failed" not in server.log, server.log[-6000:]
    body = {"prompt": [7, 8, 9], "max_tokens": 2}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=30).status_code == 200
    server.kill()
