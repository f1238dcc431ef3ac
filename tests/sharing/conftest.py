"""Boards: git clones with a DVC repository and a store each, kestrel processes in them, and real remotes."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kestrel.config import load_config
from kestrel.runtime import Runtime
from kestrel.sharing.listing import Listing
from kestrel.sharing.mark import PublishedPage
from kestrel.store.store import Limits, Store

ROOT = Path(__file__).parent.parent.parent
TINY = ROOT / "tests" / "oracle" / "llama"
S3_PYTHON = ROOT / ".venv" / "moto" / "bin" / "python"
PAGE = 128

# Of different lengths and with no word in common at their beginning, so that they share no page.
TEXTS = {
    "manual": " ".join(f"Person {n} lives in house {n * 7}." for n in range(18)),
    "tools": " ".join(f"tool_{n}(x): adds {n} to x;" for n in range(12)),
    "notes": "; ".join(f"{n} is {n * n}" for n in range(25)),
    "rules": "\n".join(f"{n}. Do not do {n * 3}." for n in range(16)),
}

# What a DVC command does for as long as it runs.
HOLD_LOCK = """
import dvc.repo, time
with dvc.repo.Repo(".").lock:
    print("held", flush=True)
    time.sleep(600)
"""


@dataclass
class Board:
    """One clone: a folder, its store, and the commands run in it."""

    root: Path
    models: Path
    lines: list[str] = field(default_factory=list)

    @property
    def kv(self) -> Path:
        return self.root / "artifacts" / "kv"

    @property
    def words(self) -> list[str]:
        prefixes = [f"prefixes.{name}.file={name}.txt" for name in TEXTS]
        return [
            f"model.path={TINY}",
            f"model.root={self.models}",
            f"cache.page_tokens={PAGE}",
            "cache.min_free_bytes=0",
            "engine.kv_ram_bytes=32MiB",
            *prefixes,
        ]

    def start(self, *command: str) -> "subprocess.Popen[str]":
        """Start a command; `kestrel`, `python` and `dvc` are those under test."""
        if command[0] == "kestrel":
            command = (sys.executable, "-m", "kestrel", *command[1:], *self.words)
        environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_AUTHOR_NAME": "board",
            "GIT_AUTHOR_EMAIL": "board@example.invalid",
            "GIT_COMMITTER_NAME": "board",
            "GIT_COMMITTER_EMAIL": "board@example.invalid",
            "AWS_ACCESS_KEY_ID": "board",
            "AWS_SECRET_ACCESS_KEY": "board",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        return subprocess.Popen(
            command,
            cwd=self.root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )

    def attempt(self, *command: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of a command."""
        process = self.start(*command)
        stdout, stderr = process.communicate(timeout=120)
        return process.returncode, stdout, stderr

    def run(self, *command: str) -> str:
        """stdout of a command that succeeds."""
        code, stdout, stderr = self.attempt(*command)
        assert code == 0, f"{' '.join(command)}\n{stdout}\n{stderr}"
        return stdout

    def commit(self, message: str) -> None:
        self.run("git", "add", "--all")
        self.run("git", "commit", "--quiet", "--message", message)

    def clone(self, name: str) -> "Board":
        """Another board, with what git has of this one."""
        other = Board(self.root.parent / name, self.models)
        self.run("git", "clone", "--quiet", str(self.root), str(other.root))
        return other

    def runtime(self, *overrides: str) -> Runtime:
        """The model and the store of this board in this process; close it. Its log is `lines`."""
        self.lines.clear()
        words = [word for word in self.words if not word.startswith("prefixes.")]
        config = load_config([*words, f"cache.root={self.kv}", *overrides])
        return Runtime.open(config, self.lines.append)

    def published(self) -> list[PublishedPage]:
        return Listing(self.kv).refresh().pages

    def artifacts(self) -> set[Path]:
        return {path.relative_to(self.kv) for path in self.kv.glob("*/*/*.safetensors")}

    def check_store(self) -> int:
        """Read every byte of the store; returns how many artifacts there are, all of them sound."""
        with Store(self.kv, Limits()) as store:
            report = store.verify()
            assert not report.damaged and not report.orphans
            return report.files

    def check_marks(self) -> None:
        """Whatever is listed is complete: readable, whole chains, and the object in DVC's cache."""
        listing = Listing(self.kv).refresh()
        assert not listing.unreadable
        for page in listing.pages:
            chain = listing.chain(page)
            assert chain[0].first == 0
            cached = self.root / ".dvc" / "cache" / "files" / "md5" / page.md5[:2] / page.md5[2:]
            assert cached.stat().st_size == page.nbytes


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Converted weights, shared by all boards."""
    return tmp_path_factory.mktemp("models")


def make_board(root: Path, models: Path) -> Board:
    """A new repository with nothing published."""
    root.mkdir(parents=True)
    board = Board(root, models)
    for name, text in TEXTS.items():
        (root / f"{name}.txt").write_text(text)
    (root / "artifacts").mkdir()
    shutil.copy(ROOT / "artifacts" / ".gitignore", root / "artifacts" / ".gitignore")
    shutil.copy(ROOT / ".gitattributes", root / ".gitattributes")
    board.run("git", "init", "--quiet")
    board.run("dvc", "init", "--quiet")
    shutil.copy(ROOT / ".dvc" / "config", root / ".dvc" / "config")
    board.commit("an empty board")
    return board


@pytest.fixture
def board(tmp_path: Path, models: Path) -> Board:
    """A board of the test's own."""
    return make_board(tmp_path / "a", models)


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Board:
    """A board that has published two prefixes and pushed them to a local remote; tests clone it and leave it alone."""
    folder = tmp_path_factory.mktemp("source")
    board = make_board(folder / "a", models)
    board.run("dvc", "remote", "add", "--default", "storage", str(folder / "remote"))
    board.run("kestrel", "kv", "publish", "manual", "tools")
    board.run("kestrel", "kv", "push")
    board.commit("publish manual and tools")
    return board


@pytest.fixture
def clone(source: Board, tmp_path: Path) -> Board:
    """A clone of the source without any data, with a copy of its remote."""
    board = Board(tmp_path / "b", source.models)
    source.run("git", "clone", "--quiet", str(source.root), str(board.root))
    shutil.copytree(source.root.parent / "remote", tmp_path / "remote")
    board.run("dvc", "remote", "modify", "storage", "url", str(tmp_path / "remote"))
    return board


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def s3_url() -> Iterator[str]:
    """An S3 server on loopback, in an environment of its own, with one bucket."""
    if not (S3_PYTHON.parent.parent / ".made").is_file():
        subprocess.run(["make", "--no-print-directory", ".venv/moto/.made"], cwd=ROOT, check=True)
    port = free_port()
    with open(os.devnull, "wb") as nothing:
        server = subprocess.Popen(
            [str(S3_PYTHON), "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdout=nothing,
            stderr=nothing,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for_http(f"{url}/moto-api/data.json")
        import botocore.session

        client = botocore.session.get_session().create_client(
            "s3",
            endpoint_url=url,
            region_name="us-east-1",
            aws_access_key_id="board",
            aws_secret_access_key="board",
        )
        client.create_bucket(Bucket="kestrel")
        yield url
    finally:
        server.kill()
        server.wait()


def wait_for_http(url: str, seconds: float = 30) -> None:
    until = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            assert time.monotonic() < until, f"nothing answers at {url}"
            time.sleep(0.1)


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.fixture
def http_url() -> Iterator[Callable[[Path], str]]:
    """http_url(folder) -> URL of a plain HTTP server over a folder."""
    servers: list[subprocess.Popen[bytes]] = []

    def serve(folder: Path) -> str:
        port = free_port()
        with open(os.devnull, "wb") as nothing:
            servers.append(
                subprocess.Popen(
                    [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"],
                    cwd=folder,
                    stdout=nothing,
                    stderr=nothing,
                )
            )
        wait_for_http(f"http://127.0.0.1:{port}/")
        return f"http://127.0.0.1:{port}"

    yield serve
    for server in servers:
        server.kill()
        server.wait()


@pytest.fixture(params=("local", "s3", "http"))
def other(
    request: pytest.FixtureRequest,
    source: Board,
    clone: Board,
    tmp_path: Path,
    http_url: Callable[[Path], str],
) -> Board:
    """A clone of the source whose default remote, of each kind, has the source's data."""
    if request.param == "s3":
        url = request.getfixturevalue("s3_url")
        for board in (source, clone):
            board.run("dvc", "remote", "add", "--local", "--force", "s3", f"s3://kestrel/{tmp_path.name}")
            board.run("dvc", "remote", "modify", "--local", "s3", "endpointurl", url)
        assert "6 pages pushed to s3" in source.run("kestrel", "kv", "push", "--remote", "s3")
        clone.run("dvc", "remote", "default", "s3")
    elif request.param == "http":
        clone.run("dvc", "remote", "modify", "storage", "url", http_url(source.root / ".dvc" / "cache"))
    return clone


def answer(board: Board, prompt: str, *words: str) -> tuple[str, str]:
    """The text a kestrel process answers to a prompt, and what it says on stderr."""
    code, stdout, stderr = board.attempt("kestrel", "generate", "--max-tokens", "4", prompt, *words)
    assert code == 0, stderr
    return stdout, stderr


def pulled_pages(stderr: str) -> int:
    """How many pages a process says it pulled."""
    return sum(int(number) for number in re.findall(r"pulled (\d+) published page", stderr))


def kill(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()
