"""Promise: nobody gets in without a key, no tenant finds what another one computed, and what is shared is shared."""

import signal
import stat
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from kestrel.errors import ConfigError
from kestrel.server.keys import ENVIRONMENT, Caller, check_address, is_loopback, load_keys

ALICE, BOB, ROOT = "alice-key-0123456789", "bob-key-0123456789abc", "root-key-0123456789ab"
OLD_ALICE = "alice-key-of-last-year"
KEYS = f"# the team\nalice:{ALICE}\nalice:{OLD_ALICE}\nbob:{BOB}\n\nroot:{ROOT}:admin\n"
SHARED = " ".join(f"Rule {n}: never say the word number {n * 13}." for n in range(9))


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text(KEYS)
    file.chmod(0o600)
    return file


def test_keys_come_from_a_file_and_the_environment(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "carol:carol-key-0123456789,dave:dave-key-0123456789:admin")
    ring = load_keys(str(key_file))
    assert ring.names == ["alice", "bob", "carol", "dave", "root"]
    assert ring.find_caller(f"Bearer {ALICE}") == Caller("alice", "alice", False)
    assert ring.find_caller(f"bearer {OLD_ALICE}") == Caller("alice", "alice", False)
    assert ring.find_caller("Bearer dave-key-0123456789") == Caller("dave", "dave", True)
    for wrong in (
        None,
        "",
        ALICE,
        f"Basic {ALICE}",
        f"Bearer {ALICE}x",
        f"Bearer {ALICE[:-1]}",
        "Bearer ",
        "Bearer é",
    ):
        assert ring.find_caller(wrong) is None
    assert ALICE not in repr(vars(ring))


def test_without_keys_everybody_is_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    assert load_keys(None).find_caller(None) == Caller("", None, True)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "holds no key"),
        ("alice", "line 1: expected NAME:KEY"),
        ("\nalice:short", "line 2: expected a key of at least 16"),
        ("alice:0123456789abcdef:boss", "line 1: expected NAME:KEY or NAME:KEY:admin"),
        ("../x:0123456789abcdef", "line 1: expected a name"),
        ("a:0123456789abcdef\nb:0123456789abcdef", "twice"),
    ],
)
def test_unusable_keys_are_refused_and_never_quoted(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_keys(str(file))
    assert named in str(caught.value) and "0123456789abcdef" not in str(caught.value)


def test_a_public_address_needs_keys(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    for host in ("0.0.0.0", "::", "192.168.1.7", "board.local", "127.0.0.1.evil.example"):
        assert not is_loopback(host)
        with pytest.raises(ConfigError, match="API keys"):
            check_address(host, load_keys(None))
        check_address(host, load_keys(str(key_file)))
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        check_address(host, load_keys(None))


def ask(client: openai.OpenAI, prompt: list[int] | None = None, **fields: Any) -> Any:
    if prompt is not None:
        return client.completions.create(model="tiny", prompt=prompt, max_tokens=3, **fields)
    messages: list[Any] = [{"role": "system", "content": SHARED}, {"role": "user", "content": "Hi"}]
    return client.chat.completions.create(model="tiny", messages=messages, max_tokens=3, **fields)


def test_tenants(start_server: Any, tiny_words: tuple[str, ...], key_file: Path) -> None:
    words = [*tiny_words, f"server.api_keys_file={key_file}", "cache.page_tokens=128"]
    words += [f"prefixes.rules.text={SHARED}", "prefixes.rules.role=system", "server.warm=true"]
    server = start_server(*words)
    server.wait_for("prefix rules: ready")
    server.wait_for("[KV-DISK] saved")

    # Nobody gets in without a key, and the answers tell nothing.
    assert server.http.get("/ready").json() == {"ready": True}
    for method, path in (
        ("GET", "/health"),
        ("GET", "/v1/models"),
        ("GET", "/v1/nothing"),
        ("POST", "/v1/kv/pin"),
    ):
        response = server.http.request(method, path)
        assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key"
    with pytest.raises(openai.AuthenticationError):
        ask(server.openai)
    alice, bob, root = (server.client(key) for key in (ALICE, BOB, ROOT))

    # The same prompt of another tenant is no hit, neither in memory nor, after a restart, on disk.
    prompt = np.random.default_rng(5).integers(5, 300, 200).tolist()
    first = ask(alice, prompt)
    assert first.kestrel["computed_tokens"] == 200
    assert ask(alice, prompt).kestrel["computed_tokens"] == 1
    assert ask(server.client(OLD_ALICE), prompt).kestrel["computed_tokens"] == 1
    other = ask(bob, prompt)
    assert other.kestrel["computed_tokens"] == 200 and other.kestrel["diverged_at"] is None
    assert other.kestrel["miss_reason"] == "no page of this model identity is stored"
    assert other.choices[0].text == first.choices[0].text
    assert other.kestrel["key"] != first.kestrel["key"]

    # The configured prefix is common to all, to the token.
    known = server.http.get("/v1/kv/prefixes", headers={"Authorization": f"Bearer {BOB}"}).json()["data"][0]
    answers = [ask(client) for client in (alice, bob, root)]
    assert known["state"] == "ready" and known["num_tokens"] % 128 > 16
    for answer in answers:
        assert answer.kestrel["ram_tokens"] == known["num_tokens"]
        assert answer.choices[0].message.content == answers[0].choices[0].message.content

    # Admin routes.
    server.wait_for(f"{other.kestrel['key']}.safetensors")  # pages are saved behind the answer
    for key, status in ((ALICE, 403), (ROOT, 200)):
        headers = {"Authorization": f"Bearer {key}"}
        assert server.http.get("/metrics", headers=headers).status_code == status
        body = {"key": other.kestrel["key"]}
        assert server.http.post("/v1/kv/pin", json=body, headers=headers).status_code == status
        assert server.http.post("/v1/kv/unpin", json=body, headers=headers).status_code == status
    with pytest.raises(openai.PermissionDeniedError, match="admin"):
        ask(alice, prompt, extra_body={"kestrel": {"pin": True}})

    # Nobody purges what is not theirs; a list shows one's own pages.
    def post(key: str, path: str, body: dict[str, Any]) -> Any:
        return server.http.post(path, json=body, headers={"Authorization": f"Bearer {key}"}).json()

    assert post(BOB, "/v1/kv/purge", {"key": first.kestrel["key"]}) == {"changed": 0, "kept": 0}
    assert post(ALICE, "/v1/kv/find", {"prompt": prompt})["ram_tokens"] == 199
    assert post(ROOT, "/v1/kv/find", {"prompt": prompt})["stored_tokens"] == 0
    listed = server.http.get("/v1/kv", headers={"Authorization": f"Bearer {BOB}"}).json()
    every = server.http.get("/v1/kv?everyone=true", headers={"Authorization": f"Bearer {ROOT}"}).json()
    refused = server.http.get("/v1/kv?everyone=true", headers={"Authorization": f"Bearer {BOB}"}).json()
    assert listed["total"] == refused["total"] < every["total"]
    assert len({page["namespace"] for page in every["data"]}) == 4

    server.send(signal.SIGTERM)
    assert server.exit_code() == 0
    root_folder = Path(server.folder, "artifacts/kv")
    modes = {stat.S_IMODE(path.stat().st_mode) for path in root_folder.rglob("*.safetensors")}
    assert modes == {0o600} and stat.S_IMODE(root_folder.stat().st_mode) == 0o700
    log = server.log
    assert ALICE not in log and BOB not in log and "key=alice" in log

    again = start_server(*words)
    alice, bob, root = (again.client(key) for key in (ALICE, BOB, ROOT))
    assert ask(root, prompt).kestrel["computed_tokens"] == 200
    assert ask(alice, prompt).kestrel["restored_tokens"] == 199
    assert ask(bob, prompt).kestrel["restored_tokens"] == 199
    for client in (alice, bob):  # the shared pages and, behind them, each tenant's own
        answer = ask(client)
        assert answer.kestrel["computed_tokens"] == 1 and answer.kestrel["restored_tokens"] > 0
        assert answer.choices == answers[0].choices
    carol_sees = ask(again.client(OLD_ALICE))
    assert carol_sees.kestrel["computed_tokens"] == 1


def test_keys_come_and_go_without_a_restart(
    start_server: Any, tiny_words: tuple[str, ...], key_file: Path
) -> None:
    server = start_server(*tiny_words, f"server.api_keys_file={key_file}", "cache.page_tokens=128")
    carol = "carol-key-0123456789"

    def status(key: str) -> int:
        answer = server.http.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
        code: int = answer.status_code
        return code

    def wait_until(key: str, expected: int) -> None:
        until = time.monotonic() + 20
        while status(key) != expected:
            assert time.monotonic() < until, f"still not {expected}"
            time.sleep(0.05)

    def write(text: str, place: Path = key_file) -> None:
        place.write_text(text)
        place.chmod(0o600)

    prompt = np.random.default_rng(5).integers(5, 300, 200).tolist()
    ask(server.client(OLD_ALICE), prompt)
    assert status(carol) == 401 and status(BOB) == 200
    write(KEYS.replace(f"bob:{BOB}", f"carol:{carol}"))
    wait_until(carol, 200)
    assert status(BOB) == 401
    assert ask(server.client(carol), prompt).kestrel["computed_tokens"] == 200  # a tenant like any other
    assert ask(server.client(ALICE), prompt).kestrel["computed_tokens"] == 1  # her pages are where they were

    # Whatever is wrong with the file is said once, without its secrets, and nobody is locked out.
    def see(problem: str) -> None:
        """The server, asked now and then, says so once."""
        until = time.monotonic() + 20
        while problem not in server.log:
            assert status(carol) == 200 and status(BOB) == 401 and time.monotonic() < until
            time.sleep(0.05)
        time.sleep(1.2)
        assert status(carol) == 200 and status(BOB) == 401 and server.log.count(problem) == 1

    write(KEYS + "mallory\n")
    see("the API keys stay as they are: " + f"{key_file}, line 7: expected NAME:KEY")
    key_file.unlink()
    see("the API keys stay as they are: server.api_keys_file: cannot read")
    other = key_file.with_name("new")
    write(KEYS, other)
    other.rename(key_file)  # as an editor saves
    wait_until(BOB, 200)
    assert status(carol) == 401
    assert server.log.count("kestrel: API keys of ") == 3 and carol not in server.log


def test_a_key_may_have_so_many_requests_in_the_server(
    start_server: Any, tiny_words: tuple[str, ...], key_file: Path
) -> None:
    words = (f"server.api_keys_file={key_file}", "server.max_running_per_key=2", "server.max_running=1")
    server = start_server(*tiny_words, *words, "cache=off")
    long = {"max_tokens": 450, "n": 8, "stream": True, "extra_body": {"ignore_eos": True}}
    with server.client(ALICE).completions.create(model="tiny", prompt=[50], **long) as stream:
        next(iter(stream))
        with pytest.raises(openai.RateLimitError, match="server.max_running_per_key=2"):
            ask(server.client(ALICE), [50])
        bobs = server.client(BOB).with_options(max_retries=0).completions
        with bobs.create(model="tiny", prompt=[50], max_tokens=1, stream=True):
            pass  # taken, though it has to wait
    assert ask(server.client(ALICE), [50]).choices


def test_names_that_point_here_from_elsewhere_are_refused(server: Any) -> None:
    for host, status in (
        ("evil.example", 403),
        ("localhost:1234", 200),
        ("127.0.0.1", 200),
        ("[::1]:80", 200),
    ):
        assert httpx.get(f"{server.url}/health", headers={"Host": host}).status_code == status
