"""Promise: every command explains itself, fails in one line without a traceback, and ends with the agreed exit code."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kestrel import __version__
from kestrel.cli import main
from kestrel.commands.texts import age, count, milliseconds, size
from kestrel.commands.words import split_words

COMMANDS = (
    ["serve"],
    ["generate"],
    ["bench"],
    ["doctor"],
    ["config"],
    ["kv", "ls"],
    ["kv", "show"],
    ["kv", "find"],
    ["kv", "verify"],
    ["kv", "gc"],
)
TINY = Path(__file__).parent / "oracle" / "llama"
PROMPT = (
    "The falcon is a small bird of prey that hovers over open fields, waiting for the moment to dive. "
    "A page of a prefix is written once, verified on every read, and removed when nobody needs it. "
    "In 2024 there were 366 days, and the falcon hovered over the field on most of them."
)
Captured = pytest.CaptureFixture[str]


def run(*words: str, input: str = "", cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run `kestrel` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "kestrel", *words],
        input=input,
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
        timeout=120,
    )


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_shows_examples_that_start_with_the_command(command: list[str], capsys: Captured) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    examples = text.partition("examples:\n")[2].splitlines()
    assert examples and all(line.startswith(f"  kestrel {' '.join(command)}") for line in examples)


def test_help_of_the_whole_names_every_command(capsys: Captured) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for command in COMMANDS:
        assert f"    {command[0]} " in text


def test_no_command_prints_the_help_and_is_wrong_usage(capsys: Captured) -> None:
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().err


def test_version(capsys: Captured) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"kestrel {__version__}\n")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["fly"], "invalid choice: 'fly'"),
        (["serve", "--fast"], "unknown option --fast"),
        (["serve", "now"], "unexpected word 'now'; settings have the form key=value"),
        (["generate", "one", "two"], "unexpected word 'two'"),
        (["generate", "one", "--prompt-file", "x"], "not both"),
        (["generate", "--max-tokens", "many"], "invalid int value: 'many'"),
        (["kv"], "COMMAND"),
        (["kv", "show"], "which page?"),
        (["kv", "find"], "what should be looked for?"),
        (
            ["kv", "publish", "assistant"],
            "which has none; add one with prefixes=NAME (there are assistant, manual",
        ),
    ],
)
def test_wrong_usage_exits_2_and_says_what_is_wrong(words: list[str], part: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    captured = capsys.readouterr()
    assert ended.value.code == 2
    assert part in captured.err and captured.out == ""


def test_an_expected_failure_is_one_message_without_a_traceback(capsys: Captured) -> None:
    assert main(["config", "server.port=70000"]) == 1
    captured = capsys.readouterr()
    assert captured.err == "kestrel: error: server.port: expected 0 (any free port) to 65535, found 70000\n"
    assert captured.out == ""


@pytest.mark.parametrize("words", [["--debug", "config"], ["config", "--debug"]])
def test_debug_shows_the_traceback(words: list[str]) -> None:
    done = run(*words, "server.port=70000")
    assert done.returncode == 1
    assert "Traceback" in done.stderr and "ConfigError: server.port" in done.stderr


def test_config_prints_yaml_that_reads_back(capsys: Captured) -> None:
    import yaml

    assert main(["config", "cache=board", "server.port=9000"]) == 0
    text = capsys.readouterr().out
    data = yaml.safe_load(text)
    assert (data["server"]["port"], data["cache"]["max_prefix_tokens"]) == (9000, 8192)
    assert "# cache= board | default | off" in text


def test_config_prints_json_that_equals_the_yaml(capsys: Captured) -> None:
    import yaml

    main(["config", "prefixes=assistant"])
    from_yaml = yaml.safe_load(capsys.readouterr().out)
    main(["config", "--json", "prefixes=assistant"])
    assert json.loads(capsys.readouterr().out) == from_yaml


def test_settings_may_stand_anywhere(capsys: Captured) -> None:
    assert main(["config", "server.port=9000", "--json", "cache=off"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["server"]["port"], data["cache"]["enabled"]) == (9000, False)


def test_a_closed_pipe_is_quiet() -> None:
    kestrel = subprocess.Popen(
        [sys.executable, "-m", "kestrel", "config"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert kestrel.stdout is not None and kestrel.stderr is not None
    kestrel.stdout.close()
    assert kestrel.stderr.read() == b""
    assert kestrel.wait(timeout=60) == 141
    kestrel.stderr.close()


def is_reading_stdin(pid: int) -> bool:
    """Whether a process waits in read(0, …): system call 0 on x86-64, 63 on aarch64."""
    number, first, *_ = [*Path(f"/proc/{pid}/syscall").read_text().split(), ""]
    return number in ("0", "63") and first == "0x0"


def test_ctrl_c_exits_130_without_a_traceback(tmp_path: Path) -> None:
    kestrel = subprocess.Popen(
        [sys.executable, "-m", "kestrel", "generate", "-q"],  # waits for stdin
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Background jobs of a shell ignore it, and what they start does too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    while not is_reading_stdin(kestrel.pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    kestrel.send_signal(signal.SIGINT)
    _, errors = kestrel.communicate(timeout=60)
    assert kestrel.returncode == 130
    assert "Traceback" not in errors


@pytest.mark.parametrize("command", [["kv", "ls"], ["kv", "verify"], ["kv", "gc"]], ids=" ".join)
def test_looking_at_no_store_says_so_and_creates_none(
    command: list[str], tmp_path: Path, capsys: Captured
) -> None:
    root = tmp_path / "kv"
    assert main([*command, f"cache.root={root}"]) == (command == ["kv", "verify"])
    assert f"nothing is stored yet: there is no folder {root}" in capsys.readouterr().out
    assert not root.exists()
    root.write_text("a file")
    assert main([*command, f"cache.root={root}"]) == 1
    assert f"cache.root must be a folder, found {root}" in capsys.readouterr().err


def test_ls_of_no_store_as_json(tmp_path: Path, capsys: Captured) -> None:
    assert main(["kv", "ls", "--json", f"cache.root={tmp_path / 'kv'}"]) == 0
    assert json.loads(capsys.readouterr().out)["pages"] == []


def test_an_empty_prompt_on_stdin_is_wrong_usage() -> None:
    done = run("generate")
    assert done.returncode == 2
    assert "the prompt on stdin is empty" in done.stderr


class Folder:
    """A tiny model and a store of its own, and `kestrel` with both."""

    def __init__(self, root: Path) -> None:
        self.store = root / "kv"
        self.settings = (
            f"model.path={TINY}",
            f"model.root={root / 'models'}",
            f"cache.root={self.store}",
            "cache.page_tokens=128",
        )

    def run(self, *words: str, input: str = "") -> subprocess.CompletedProcess[str]:
        return run(*words, *self.settings, input=input)

    def json(self, *words: str) -> Any:
        done = self.run(*words, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A store that holds one answered prompt."""
    made = Folder(tmp_path_factory.mktemp("cli"))
    done = made.run("generate", PROMPT, "--max-tokens", "12", "--ignore-eos")
    assert done.returncode == 0, done.stderr
    return made


def test_generate_prints_the_answer_alone_and_what_it_took_on_stderr(folder: Folder) -> None:
    words = ("generate", PROMPT, "--max-tokens", "12", "--ignore-eos")
    again, cold = folder.run(*words), folder.run(*words, "cache=off")
    assert again.stdout == cold.stdout != ""
    summary = again.stderr.splitlines()[-1]
    assert summary.startswith("kestrel: prompt ") and " restored (" in summary and "TTFT" in summary
    assert "answer 12 tokens" in summary and summary.endswith("finish reason: length")


def test_generate_reads_the_prompt_from_an_operand_stdin_or_a_file(folder: Folder, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT, encoding="utf-8")
    options = ("--max-tokens", "4", "-q")
    answers = {
        folder.run("generate", PROMPT, *options).stdout,
        folder.run("generate", *options, input=PROMPT).stdout,
        folder.run("generate", "-", *options, input=PROMPT).stdout,
        folder.run("generate", "--prompt-file", str(file), *options).stdout,
    }
    assert len(answers) == 1


def test_quiet_is_quiet(folder: Folder) -> None:
    done = folder.run("generate", PROMPT, "--max-tokens", "2", "-q")
    assert (done.returncode, done.stderr) == (0, "")


def test_chat_applies_the_template_and_a_system_message_implies_it(folder: Folder) -> None:
    def prompt_tokens(*words: str) -> int:
        done = folder.run("generate", *words, "--max-tokens", "1", "cache=off")
        return int(done.stderr.splitlines()[-1].split()[2])

    plain, chat = prompt_tokens("hello"), prompt_tokens("hello", "--chat")
    assert plain < chat < prompt_tokens("hello", "--system", "Be brief.")


def test_a_prompt_that_does_not_fit_is_one_line(folder: Folder) -> None:
    done = folder.run("generate", "word " * 200, "model.context_tokens=64", "-q")
    assert done.returncode == 1
    assert done.stderr.startswith("kestrel: error: the prompt has ") and done.stderr.count("\n") == 1


def test_an_interrupted_answer_is_kept(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-m", "kestrel", "generate", PROMPT, "--ignore-eos", *folder.settings],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=Path(__file__).parent.parent,
    ) as kestrel:
        assert kestrel.stdout is not None
        assert kestrel.stdout.read(1)  # the answer has begun
        kestrel.send_signal(signal.SIGTERM)
        assert kestrel.wait(timeout=60) == 143
    tokens = folder.json("kv", "find", PROMPT)
    assert tokens["matched_tokens"] == tokens["prompt_tokens"] - 1


def test_ls_lists_prefixes_and_their_pages(folder: Folder) -> None:
    listed = folder.json("kv", "ls")
    assert listed["files"] == len(listed["pages"]) >= 2
    prefixes, pages = folder.run("kv", "ls").stdout, folder.run("kv", "ls", "--pages").stdout
    for page in listed["pages"]:
        assert page["key"][:12] in pages
        assert (page["key"][:12] in prefixes) == (page["num_children"] == 0)
    assert "llama, " in prefixes and "float32 KV" in prefixes


def test_show_takes_the_beginning_of_a_key_and_shows_tokens_and_text(folder: Folder) -> None:
    leaf = next(page for page in folder.json("kv", "ls")["pages"] if page["num_children"] == 0)
    shown = folder.json("kv", "show", leaf["key"][:10])
    assert shown["key"] == leaf["key"]
    assert (
        shown["prefix_tokens"] == len(shown["tokens"]) == sum(page["num_tokens"] for page in shown["pages"])
    )
    assert PROMPT in shown["text"]
    text = folder.run("kv", "show", leaf["key"][:10], "--tokens").stdout
    assert shown["path"] in text and " ".join(str(token) for token in shown["tokens"]) in text


def test_show_says_why_it_cannot_show_the_text(folder: Folder) -> None:
    leaf = next(page for page in folder.json("kv", "ls")["pages"] if page["num_children"] == 0)
    other = f"model.path={TINY.parent / 'qwen3'}"
    done = run("kv", "show", leaf["key"], *folder.settings[1:], other)
    assert done.returncode == 0 and "no text: it was computed with another model than qwen3" in done.stdout


def test_show_refuses_a_key_that_is_not_there(folder: Folder) -> None:
    done = folder.run("kv", "show", "0" * 32)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "0" * 32 in done.stderr


def test_find_says_what_is_stored_or_why_nothing_is(folder: Folder) -> None:
    found = folder.json("kv", "find", PROMPT)
    assert found["matched_tokens"] == found["prompt_tokens"] - 1
    assert sum(page["num_used"] for page in found["pages"]) == found["matched_tokens"]
    missed = folder.json("kv", "find", "ZZZ" + PROMPT)
    assert missed["matched_tokens"] == 0 and missed["reason"] and missed["pages"] == []
    text = folder.run("kv", "find", "ZZZ" + PROMPT).stdout
    assert text.startswith("0 of ") and f"miss: {missed['reason']}" in text


def test_gc_explains_first_and_then_removes_the_same_files(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    assert folder.run("generate", PROMPT, "--max-tokens", "2").returncode == 0
    before = folder.json("kv", "ls")
    limit = "cache.max_files=1"
    planned = folder.run("kv", "gc", "--dry-run", limit)
    assert f"would remove {before['files'] - 1} file" in planned.stdout
    assert planned.stderr.startswith("next: kestrel kv gc ") and limit in planned.stderr
    assert folder.json("kv", "ls")["files"] == before["files"]
    done = folder.run("kv", "gc", limit)
    lines = [line for line in planned.stdout.splitlines() if "(least recently used)" in line]
    assert lines == [line for line in done.stdout.splitlines() if "(least recently used)" in line] != []
    assert folder.json("kv", "ls")["files"] == 1


def test_verify_names_damaged_files_exits_1_and_moves_them_aside(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    assert folder.run("generate", PROMPT, "--max-tokens", "2").returncode == 0
    sound = folder.run("kv", "verify")
    assert sound.returncode == 0 and ", 0 damaged" in sound.stdout
    file = min(folder.store.rglob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.unlink()
    file.write_bytes(content)
    damaged = folder.run("kv", "verify")
    assert damaged.returncode == 1 and f"damaged: {file}: " in damaged.stdout
    assert damaged.stderr.startswith("next: kestrel kv verify --quarantine ")
    assert folder.run("kv", "verify", "--quarantine").returncode == 1
    assert not file.exists()
    assert folder.run("kv", "verify").returncode == 0


def test_doctor_checks_this_machine(folder: Folder) -> None:
    report = folder.json("doctor")
    findings = {finding["topic"]: finding for finding in report["findings"]}
    assert report["ok"]
    assert {"versions", "cpu", "disk", "store", "model", "numerics", "exactness"} <= set(findings)
    assert all(finding["verdict"] in ("ok", "note") for finding in findings.values())
    assert "the same bits" in findings["exactness"]["text"]


def test_doctor_exits_1_and_names_what_fails(tmp_path: Path) -> None:
    done = run("doctor", "model.path=/there/is/none.gguf", f"cache.root={tmp_path / 'kv'}")
    assert done.returncode == 1
    assert "FAIL  model" in done.stdout and done.stdout.endswith("failed: model\n")
    assert not (tmp_path / "kv").exists()


@pytest.mark.parametrize(
    ("words", "overrides", "operands"),
    [
        (["cache=board", "hello"], ["cache=board"], ["hello"]),
        (["What is x=1 plus 1?"], [], ["What is x=1 plus 1?"]),
        (["x=1 what is x?"], [], ["x=1 what is x?"]),
        (["model.path=/a b/c.gguf"], ["model.path=/a b/c.gguf"], []),
        (["cach=board"], ["cach=board"], []),
        (["+prefixes.m.text=a b", "++server.port=1"], ["+prefixes.m.text=a b", "++server.port=1"], []),
        (["~prefixes.assistant"], ["~prefixes.assistant"], []),
        (["-"], [], ["-"]),
        (["="], [], ["="]),
    ],
)
def test_words_are_told_apart(words: list[str], overrides: list[str], operands: list[str]) -> None:
    assert split_words(words) == (overrides, operands)


def test_numbers_as_people_read_them() -> None:
    assert [count(number, "page") for number in (0, 1, 2)] == ["0 pages", "1 page", "2 pages"]
    assert [size(value) for value in (0, 999, 1000, 234_100_000, 2 * 10**12)] == [
        "0 B",
        "999 B",
        "1.0 KB",
        "234.1 MB",
        "2.0 TB",
    ]
    assert [milliseconds(value) for value in (41.2, 999.4, 1960)] == ["41 ms", "999 ms", "1.96 s"]
    assert [age(value) for value in (-1, 12, 60, 3600, 86400, 200000)] == [
        "0 s",
        "12 s",
        "1 min",
        "1 h",
        "24 h",
        "2 days",
    ]
