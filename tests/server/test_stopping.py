"""Promise: SIGTERM finishes the running request, refuses the others, saves what was computed and exits with 0."""

import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from kestrel.config import load_config
from kestrel.errors import KestrelError
from kestrel.runtime import Runtime
from kestrel.server.address import bind
from kestrel.server.app import create_app
from kestrel.server.journal import Journal
from kestrel.server.listener import Listener

TINY = Path(__file__).parent.parent / "oracle" / "llama"

BODY = {
    "prompt": "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16,",
    "max_tokens": 100,
    "ignore_eos": True,
}


def test_sigterm_during_a_request(start_server: Any, smollm2_words: tuple[str, ...]) -> None:
    server = start_server(
        *smollm2_words, "server.max_running=1", "server.max_queue=4", "cache.page_tokens=128"
    )
    client = httpx.Client(base_url=server.url, timeout=60)
    texts: list[str] = []
    waiting: list[httpx.Response] = []
    with client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as running:
        pieces = running.iter_text()
        texts.append(next(pieces))
        second = threading.Thread(
            target=lambda: waiting.append(server.http.post("/v1/completions", json=BODY))
        )
        second.start()
        while httpx.get(f"{server.url}/health").json()["queue"]["waiting"] == 0:
            pass
        server.send(signal.SIGTERM)
        second.join()
        late = httpx.post(f"{server.url}/v1/completions", json=BODY)
        texts += pieces
    assert waiting[0].status_code == 503 and waiting[0].json()["error"]["code"] == "shutting_down"
    assert late.status_code == 503
    assert texts[-1].rstrip().endswith("data: [DONE]")
    assert "".join(texts).count('"finish_reason":null') >= 90
    assert server.exit_code() == 0
    pages = list(Path(server.folder, "artifacts/kv").rglob("*.safetensors"))
    assert len(pages) == 2  # a full one and the rest
    assert "Traceback" not in server.log and server.log.endswith("kestrel: stopped\n")


def test_a_second_signal_cuts_the_answer_short(start_server: Any, smollm2_words: tuple[str, ...]) -> None:
    server = start_server(*smollm2_words)
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=BODY | {"max_tokens": 1800, "stream": True}
    ) as answer:
        pieces = answer.iter_text()
        next(pieces)
        server.send(signal.SIGINT)
        server.wait_for("kestrel: stopping")
        server.send(signal.SIGINT)
        assert "shutting_down" in "".join(pieces)
    assert server.exit_code() == 0
    assert list(Path(server.folder, "artifacts/kv").rglob("*.safetensors"))


def test_a_port_taken_while_the_model_was_loading(tmp_path: Path) -> None:
    words = [f"model.path={TINY}", f"model.root={tmp_path}", "cache=off"]
    with bind("127.0.0.1", 0) as ours, socket.socket() as other, Runtime.open(load_config(words)) as runtime:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(ours.getsockname())
        other.listen()
        app = create_app(runtime, runtime.config, Journal(print))
        with pytest.raises(KestrelError, match="is in use"):
            Listener(app, app.state.worker, print, "ready").run_on(ours)
    assert app.state.worker.stopped


def test_a_taken_port_is_noticed_before_the_model_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = subprocess.run(
            [
                sys.executable,
                "-m",
                "kestrel",
                "serve",
                f"server.port={port}",
                "model.path=there/is/none.gguf",
            ],
            cwd=Path(__file__).parent.parent.parent,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert run.returncode == 1
    assert f"port {port} on 127.0.0.1 is in use" in run.stderr
    assert "Traceback" not in run.stderr
