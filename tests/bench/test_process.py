"""A measured server gets exactly the configuration that was asked for, and the fewest words that say so."""

import dataclasses
from pathlib import Path

import pytest

from kestrel.bench.process import ServerProcess, server_words, with_free_port
from kestrel.bench.records import BenchError, Machine, PageList, load_record, save_record
from kestrel.config import load_config

TINY = [
    "model=custom",
    "model.declared.name=tiny",
    "model.declared.wheel=null",
    "model.declared.random_seed=3",
    *(
        f"model.declared.geometry.{key}={value}"
        for key, value in {
            "architecture": "llama",
            "num_layers": 2,
            "hidden_size": 64,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 16,
            "ffn_size": 128,
            "vocab_size": 320,
            "context_tokens": 1024,
            "rope_theta": 10000.0,
            "norm_eps": 1e-05,
            "qkv_bias": False,
            "qk_norm": False,
            "tied_head": True,
        }.items()
    ),
]


@pytest.mark.parametrize(
    "words",
    (
        [],
        ["model=qwen3-0.6b-random", "engine=int4", "cache=board"],
        ["model=qwen3-0.6b", "model.path=/models/a (1), b's.gguf", "model.name=it's"],
        ["model.path=relative/model.gguf", "server.port=9001"],
        TINY,
        ["cache=off", "engine.threads=1", "cache.ttl_seconds=1.5", "cache.max_bytes=3GiB"],
    ),
)
def test_the_words_make_the_configuration(words: list[str]) -> None:
    config = load_config(words)
    assert load_config(server_words(config)) == config


def test_prefixes_are_left_out_and_defaults_need_no_word() -> None:
    assert server_words(load_config(["prefixes=assistant"])) == []
    assert server_words(load_config(["cache.root=/tmp/x"])) == ["cache.root=/tmp/x"]


def test_records_are_equal_bytes_and_come_back(tmp_path: Path) -> None:
    record = PageList("0123", "ab", ["0123/aa/x.safetensors"])
    save_record(tmp_path / "one" / "pages.json", record)
    save_record(tmp_path / "two.json", load_record(PageList, tmp_path / "one" / "pages.json"))
    assert (tmp_path / "one" / "pages.json").read_bytes() == (tmp_path / "two.json").read_bytes()
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["pages.json"]


def test_a_record_of_another_form_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    with pytest.raises(BenchError, match="is missing; run the steps before"):
        load_record(PageList, path)
    path.write_text("{")
    with pytest.raises(BenchError, match="is not JSON"):
        load_record(PageList, path)
    path.write_text('{"namespace": "x"}')
    with pytest.raises(BenchError, match="expected the keys namespace, numerics, paths, found namespace"):
        load_record(PageList, path)


def test_the_machine_is_described(tmp_path: Path) -> None:
    from kestrel.bench.machine import describe_machine

    machine = describe_machine(tmp_path)
    assert all(getattr(machine, field.name) for field in dataclasses.fields(Machine))
    assert not list(tmp_path.iterdir())


def test_a_server_that_cannot_start_is_explained_by_its_own_log(tmp_path: Path) -> None:
    config = with_free_port(load_config([f"model.path={tmp_path / 'absent.gguf'}"]))
    with pytest.raises(BenchError, match="ended before it was ready with exit code 1") as caught:
        ServerProcess(config, tmp_path / "server.log", print).start()
    assert "no checkpoint at" in str(caught.value)
