"""Promise: a wrong setting is named with its full key and what exists; a right one arrives unchanged."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrel.config import (
    GROUPS,
    Config,
    group_options,
    known_keys,
    load_config,
    packaged_config_dir,
    parse_size,
    resolved_dict,
)
from kestrel.errors import ConfigError


def message(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    "choice", [f"{group}={option}" for group in GROUPS for option in group_options(group)]
)
def test_every_shipped_option_composes_and_passes_the_checks(choice: str) -> None:
    assert isinstance(load_config([choice]), Config)


def test_defaults() -> None:
    config = load_config()
    assert config.model.declared is not None and config.model.declared.name == "smollm2-135m"
    assert (config.engine.weights, config.engine.chunk_tokens, config.engine.threads) == ("int8", 512, None)
    assert config.engine.kv_ram_bytes == 2 * 2**30
    assert (config.cache.root, config.cache.page_tokens, config.cache.min_match) == ("artifacts/kv", 256, 16)
    assert (config.server.host, config.server.port) == ("127.0.0.1", 8080)
    assert config.prefixes == {}


def test_board_bounds_a_prefix_and_all_of_them() -> None:
    cache = load_config(["cache=board"]).cache
    assert (cache.max_prefix_tokens, cache.max_tokens, cache.min_match) == (8192, 8 * 8192, 16)


def test_every_key_has_a_comment_in_the_reference_file_of_its_group() -> None:
    reference = {"model": ("custom", "smollm2-135m"), "engine": ("int8",), "prefixes": ("assistant",)}
    for key in known_keys():
        group, *names = key.split(".")
        texts = [
            (packaged_config_dir() / group / f"{option}.yaml").read_text(encoding="utf-8")
            for option in reference.get(group, ("default",))
        ]
        assert any(
            line.strip().startswith(f"{names[-1]}:") and " # " in line
            for text in texts
            for line in text.splitlines()
        ), f"{key} has no comment"


def test_options_of_cache_and_engine_are_complete_files() -> None:
    """A pipeline stage may depend on keys of the selected file alone."""
    import yaml

    for group, kind in (("cache", "CacheConfig"), ("engine", "EngineConfig")):
        config = getattr(load_config(), group)
        assert type(config).__name__ == kind
        names = {field.name for field in dataclasses.fields(config)}
        for option in group_options(group):
            file = packaged_config_dir() / group / f"{option}.yaml"
            assert set(yaml.safe_load(file.read_text(encoding="utf-8"))) == names


def test_overrides_change_what_they_name_and_nothing_else() -> None:
    before, after = load_config(), load_config(["server.port=9000", "cache.max_bytes=500MB"])
    assert (after.server.port, after.cache.max_bytes) == (9000, 500_000_000)
    undone = dataclasses.replace(
        after,
        server=dataclasses.replace(after.server, port=before.server.port),
        cache=dataclasses.replace(after.cache, max_bytes=before.cache.max_bytes),
    )
    assert undone == before


@settings(max_examples=20, deadline=None)
@given(
    st.text(
        alphabet=st.characters(blacklist_categories=("Cs", "Cc"), blacklist_characters="${}~'\""), min_size=1
    ).filter(lambda text: text.strip() and text not in ("null", "???"))
)
def test_text_values_arrive_literally(text: str) -> None:
    assert load_config([f"model.name={text}"]).model.name == text


@pytest.mark.parametrize(
    "path", ["/models/a (1).gguf", "/it's/here.gguf", "a=b,c.gguf", "a\\", "a\\'b", "1e3", "[x]", "tab\there"]
)
def test_awkward_paths_arrive_literally(path: str) -> None:
    assert load_config([f"model.path={path}"]).model.path == path


def test_the_home_folder_is_expanded_in_paths_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert load_config(["model.path=~/m.gguf"]).model.path == "/home/someone/m.gguf"
    assert load_config(["cache.root=~/kv"]).cache.root == "/home/someone/kv"
    assert load_config(["model.adapter=~/lora"]).model.adapter == "/home/someone/lora"
    assert load_config(["model.name=~x"]).model.name == "~x"


def test_a_path_needs_no_other_model_group() -> None:
    assert load_config(["model.path=/models/foo.gguf"]).model.declared is None


def test_a_path_for_a_declared_shape_keeps_the_declaration_to_check_it() -> None:
    declared = load_config(["model=qwen3-0.6b", "model.path=/models/foo.gguf"]).model.declared
    assert declared is not None and declared.geometry is not None and declared.geometry.num_layers == 28


def test_a_prefix_is_added_by_naming_it() -> None:
    prefixes = load_config(["prefixes=assistant", "prefixes.manual.file=docs/manual.md"]).prefixes
    assert set(prefixes) == {"assistant", "manual"}
    assert (prefixes["manual"].file, prefixes["manual"].text, prefixes["manual"].role) == (
        "docs/manual.md",
        None,
        None,
    )


def test_prefix_sets_combine() -> None:
    assert set(load_config(["prefixes=[none,assistant]"]).prefixes) == {"assistant"}


def test_null_switches_a_limit_off() -> None:
    assert load_config(["cache=board", "cache.max_tokens=null"]).cache.max_tokens is None


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("cache.page_token=256", ["cache.page_token;", "did you mean cache.page_tokens?", "min_free_bytes"]),
        ("page_tokens=256", ["unknown key page_tokens", "did you mean cache.page_tokens?"]),
        ("cach=off", ["unknown key cach;", "did you mean cache?", "prefixes"]),
        ("nothing.like.it=1", ["unknown key nothing", "the top level has: model, engine"]),
        ("server.port.x=1", ["server.port.x", "server.port holds a whole number"]),
        ("model.declared.geometry.layers=1", ["model.declared.geometry.layers", "num_layers"]),
        ("cache=bord", ["'bord'", "did you mean board?", "cache has: board, default, off"]),
        ("model=/x/foo.gguf", ["'/x/foo.gguf'", "model.path=PATH", "smollm2-135m"]),
        ("cache=[board,off]", ["cache: expected one option"]),
        ("cache.page_tokens=100", ["cache.page_tokens", "multiple of 128", "found 100"]),
        ("cache.page_tokens=0", ["cache.page_tokens", "found 0"]),
        ("cache.page_tokens=big", ["cache.page_tokens: expected a whole number, found 'big'"]),
        ("engine.threads=2.5", ["engine.threads: expected a whole number, found 2.5"]),
        ("engine.threads=0", ["engine.threads: expected 1 or more, found 0"]),
        ("cache.enabled=1", ["cache.enabled: expected true or false, found 1"]),
        ("server.port=true", ["server.port: expected a whole number, found True"]),
        ("server.port=null", ["server.port: expected a whole number, found nothing (null)"]),
        ("server.port=-1", ["server.port: expected 0 (any free port) to 65535, found -1"]),
        ("server.log_format=xml", ["server.log_format: expected text or json"]),
        ("server.port=65536", ["server.port: expected 0 (any free port) to 65535, found 65536"]),
        ("server.port=[1", ["cannot be composed", "[1"]),
        ("server.port=1,2", ["server.port=1,2"]),
        ("server.port", ["expected key=value, found 'server.port'"]),
        ("~server.port", ["can be changed but not removed"]),
        ("engine.weights=int5", ["engine.weights: expected int8, int4 or float32", "did you mean int8?"]),
        ("engine.kv=bf16", ["engine.kv: expected float32 or int8", "'bf16'"]),
        ("cache.max_bytes=8G", ["cache.max_bytes: expected a size", "GiB", "found '8G'"]),
        ("cache.ttl_seconds=0", ["cache.ttl_seconds: expected more than 0"]),
        ("cache.ttl_seconds=nan", ["cache.ttl_seconds: expected more than 0"]),
        ("cache.root=", ["cache.root: expected text, found an empty value"]),
        ("model.root=${cache.rot}", ["cannot be resolved", "cache.rot"]),
        ("prefixes.m.role=system", ["prefixes.m: expected exactly one of text and file, found neither"]),
        ("prefixes.m.txt=x", ["unknown key prefixes.m.txt", "did you mean prefixes.m.text?"]),
        (
            "model.declared.random_seed=1",
            ["model.declared: expected one of wheel and random_seed, found both"],
        ),
        ("hydra.run.dir=x", ["unknown key hydra"]),
    ],
)
def test_messages_name_the_key_what_was_found_and_what_exists(override: str, parts: list[str]) -> None:
    text = message(override)
    for part in parts:
        assert part in text


def test_an_unknown_role_and_a_double_source_are_refused() -> None:
    assert "prefixes.m.role: expected system, found 'user'" in message(
        "prefixes.m.text=x", "prefixes.m.role=user"
    )
    assert "found both" in message("prefixes.m.text=x", "prefixes.m.file=y")


def test_a_conf_folder_of_ones_own_adds_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my stuff" / "conf" / "cache"
    folder.mkdir(parents=True)
    (folder / "tiny.yaml").write_text("defaults: [default, _self_]\nmax_bytes: 64MiB\n", encoding="utf-8")
    monkeypatch.chdir(folder.parent.parent)
    assert load_config(["cache=tiny"]).cache.max_bytes == 64 * 2**20
    assert "tiny" in message("cache=tinny")


@pytest.mark.parametrize("content", [b"max_bytes: [64", b"root: \xff\xfe"])
def test_a_file_of_ones_own_that_is_no_yaml(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "conf" / "cache"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_bytes(content)
    monkeypatch.chdir(tmp_path)
    assert f"a file of {tmp_path / 'conf'} is no YAML" in message("cache=mine")


def test_a_file_of_ones_own_is_checked_like_the_shipped_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "conf" / "cache"
    folder.mkdir(parents=True)
    (folder / "short.yaml").write_text("max_bytes: 64MiB\n", encoding="utf-8")
    (folder / "typo.yaml").write_text("defaults: [default, _self_]\nmax_byte: 64MiB\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert "cache.enabled is missing" in message("cache=short")
    assert "defaults: [default, _self_]" in message("cache=short")
    assert "did you mean cache.max_bytes?" in message("cache=typo")


def test_resolved_dict_is_plain_json_data() -> None:
    import json

    data = resolved_dict(load_config(["prefixes=assistant"]))
    assert json.loads(json.dumps(data)) == data
    assert data["cache"]["max_bytes"] == 8 * 2**30


@pytest.mark.parametrize(
    ("text", "expected"),
    [("500MB", 500_000_000), ("8GiB", 2**33), ("1.5 KiB", 1536), ("7B", 7), ("2tib", 2**41), (12, 12)],
)
def test_sizes(text: str | int, expected: int) -> None:
    assert parse_size(text, "key") == expected


@pytest.mark.parametrize("text", ["", "8", "GiB", "-1GiB", "8 Gi B", "8GiBs", None, True, 1.5])
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(ConfigError, match="key: expected a size"):
        parse_size(text, "key")
