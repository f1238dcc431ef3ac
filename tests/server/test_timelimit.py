"""Promise: a chat template that runs for too long is ended, and nothing else is."""

import threading
import time

import pytest

from kestrel.errors import TemplateError
from kestrel.models.chat import ChatTemplate
from kestrel.server.timelimit import run_limited

LOOP = "{% for a in range(9999) %}"
ENDLESS = LOOP * 3 + "{% endfor %}" * 3


def test_an_endless_template_is_ended() -> None:
    template = ChatTemplate(ENDLESS, {})
    started = time.monotonic()
    with pytest.raises(TemplateError, match="longer than 0.2 s"):
        run_limited(lambda: template.render([]), 0.2)
    assert time.monotonic() - started < 5
    assert run_limited(lambda: ChatTemplate("ok", {}).render([]), 5) == "ok"


def test_the_limit_never_strikes_afterwards() -> None:
    """Work that ends just when its time is over either fails or succeeds, and its thread goes on unharmed."""
    outcomes = set()

    def work() -> None:
        for n in range(300):
            until = time.perf_counter() + 0.002 + (n % 10 - 5) * 2e-5

            def spin(until: float = until) -> bool:
                while time.perf_counter() < until:
                    pass
                return True

            try:
                outcomes.add(run_limited(spin, 0.002))
            except TemplateError:
                outcomes.add(False)
            time.sleep(0)
        outcomes.add("survived")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "survived" in outcomes
