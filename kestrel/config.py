"""Configuration: frozen dataclasses filled from the YAML files of `conf/` by Hydra.

The YAML files hold every default; a dataclass field holds the type, and this module the checks. It is
the only module that knows OmegaConf and Hydra: everything else receives a `Config`.
"""

import dataclasses
import difflib
import os
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kestrel.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

KEY_BLOCK_TOKENS = 128  # keys the attention kernel reads at once; a page holds whole blocks

WEIGHT_RECIPES = ("int8", "int4", "float32")
KV_DTYPES = ("float32", "int8")
ACCEPTED_NUMERICS = ("same", "portable")
LOADS = ("auto", "always")
LOG_FORMATS = ("text", "json")


@dataclass(frozen=True)
class GeometryConfig:
    """Shape of a decoder as a config file declares it; must equal the checkpoint's own."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    context_tokens: int
    rope_theta: float
    norm_eps: float
    qkv_bias: bool
    qk_norm: bool
    tied_head: bool


@dataclass(frozen=True)
class WheelConfig:
    """A Python wheel that carries a checkpoint; both digests are lower-case hex SHA-256."""

    requirement: str
    sha256: str
    member: str
    member_sha256: str


@dataclass(frozen=True)
class DeclaredModel:
    """A model known by name: where its checkpoint comes from (a wheel, a random seed, or nowhere) and its shape."""

    name: str
    wheel: WheelConfig | None
    random_seed: int | None
    geometry: GeometryConfig | None


@dataclass(frozen=True)
class ModelConfig:
    """Which checkpoint is served; None means "the checkpoint's own".

    With a `path`, `declared` is None unless it declares no source of its own: then the checkpoint at `path`
    is meant to be the declared one, and its geometry is checked.
    """

    path: str | None
    name: str | None
    context_tokens: int | None
    chat_template: str | None
    adapter: str | None
    root: str
    declared: DeclaredModel | None


@dataclass(frozen=True)
class EngineConfig:
    """How the model is computed. `threads` None means all cores."""

    weights: str
    kv: str
    chunk_tokens: int
    threads: int | None
    kv_ram_bytes: int
    kv_touched_bytes: int
    speculate: int


@dataclass(frozen=True)
class CacheConfig:
    """The store of KV artifacts and its limits. A limit of None does not limit."""

    enabled: bool
    root: str
    page_tokens: int
    min_match: int
    save_queue_pages: int
    max_bytes: int
    max_files: int | None
    max_tokens: int | None
    max_prefix_tokens: int | None
    min_free_bytes: int
    write_bytes_per_hour: int | None
    ttl_seconds: float | None
    accept: str
    load: str
    pull_seconds: float | None


@dataclass(frozen=True)
class ServerConfig:
    """The HTTP server. `max_queue` counts requests that wait, not those that run; None does not limit.

    `prompt_rows`: most prompt tokens in a step in which answers are generated too.
    """

    host: str
    port: int
    api_keys_file: str | None
    max_running: int
    prompt_rows: int
    max_queue: int
    max_queue_bytes: int | None
    max_running_per_key: int | None
    max_body_bytes: int
    max_prompt_tokens: int | None
    max_choices: int
    max_stops: int
    default_max_tokens: int
    warm: bool
    log_format: str


@dataclass(frozen=True)
class PrefixConfig:
    """A prefix worth preparing: exactly one of `text` and `file`; `role` "system" goes through the chat template."""

    text: str | None
    file: str | None
    role: str | None


@dataclass(frozen=True)
class BenchConfig:
    """The restart experiment: length of the first prompt and of each answer, in tokens. The measures: `repeats`."""

    context_tokens: int
    answer_tokens: int
    repeats: int


@dataclass(frozen=True)
class Config:
    """Everything a command needs to know. Immutable: a different setting is a different Config."""

    model: ModelConfig
    engine: EngineConfig
    cache: CacheConfig
    server: ServerConfig
    prefixes: dict[str, PrefixConfig]
    bench: BenchConfig


GROUPS = tuple(field.name for field in dataclasses.fields(Config))


def load_config(overrides: Sequence[str] = (), config_dir: Path | None = None) -> Config:
    """Compose `conf/` with Hydra overrides (`cache=board`, `server.port=9000`) and check the result.

    Values of text keys are taken literally (`model.path=/models/a (1).gguf` needs no quoting for Hydra), and
    keys that the schema knows need no `+`. A folder `conf` in the current directory adds options to the groups.

    Raises ConfigError naming the full key, what was found and what exists.
    """
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    packaged = (config_dir or packaged_config_dir()).resolve()
    folders = [packaged]
    own = Path.cwd() / "conf"
    if config_dir is None and own.is_dir() and own.resolve() != packaged:
        folders.append(own.resolve())
    words = [_prepared_override(word, folders) for word in overrides]
    for folder in folders[1:]:
        words.append(f"hydra.searchpath=[{_quoted(f'file://{folder}')}]")
    try:
        with initialize_config_dir(str(packaged), version_base="1.3", job_name="kestrel"):
            composed = compose("config", overrides=words)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"the configuration cannot be composed: {_first_lines(error)}") from error
    except (YAMLError, UnicodeDecodeError) as error:
        place = f" of {own}" if len(folders) > 1 else ""
        raise ConfigError(f"a file{place} is no YAML: {error}") from error
    return from_omegaconf(composed)


def from_omegaconf(cfg: "DictConfig") -> Config:
    """Check a composed configuration, as `@hydra.main` hands it to a pipeline. Raises ConfigError."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        data = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"the configuration cannot be resolved: {_first_lines(error)}") from error
    config: Config = _read(Config, data, "")
    _check_values(config)
    return _with_path_over_source(config)


def _with_path_over_source(config: Config) -> Config:
    """Drop the declared checkpoint where a path names another one, so that `model.path=…` needs no `model=custom`."""
    declared = config.model.declared
    if config.model.path is None or declared is None:
        return config
    if declared.wheel is None and declared.random_seed is None:
        return config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, declared=None))


def resolved_dict(config: Config) -> dict[str, Any]:
    """The configuration as plain data (dicts, text, numbers, None), sizes in bytes."""
    return dataclasses.asdict(config)


def packaged_config_dir() -> Path:
    """Folder of the shipped YAML files: inside the package when installed, `../conf` in a work tree."""
    package = Path(__file__).parent
    installed = package / "conf"
    return installed if (installed / "config.yaml").is_file() else package.parent / "conf"


def group_options(group: str, folders: Iterable[Path] | None = None) -> list[str]:
    """Names that `group=…` accepts: the YAML files of that group, the shipped ones and those of `./conf`."""
    searched = (packaged_config_dir(), Path.cwd() / "conf") if folders is None else folders
    return sorted({file.stem for folder in searched for file in (folder / group).glob("*.yaml")})


def parse_size(value: Any, key: str) -> int:
    """Bytes of `1024`, `"500MB"` (powers of 1000) or `"8GiB"` (powers of 1024). Raises ConfigError naming `key`."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    unit = _UNITS_BY_LOWER_CASE.get(match["unit"].lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(
            f'{key}: expected a size (bytes, or a number with {", ".join(_UNITS)}, e.g. "8GiB"), '
            f"found {_shown(value)}"
        )
    return round(float(match["number"]) * unit)


_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_UNITS_BY_LOWER_CASE = {name.lower(): unit for name, unit in _UNITS.items()}
_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[A-Za-z]+)")
_OVERRIDE = re.compile(r"(?P<prefix>\+{1,2}|~)?(?P<key>[A-Za-z_][\w./@:-]*)(=(?P<value>.*))?", re.DOTALL)


# Reading plain data into the dataclasses.


def _read(kind: Any, value: Any, key: str) -> Any:
    """Convert plain data to the annotated type `kind`; `key` is its full name, for messages."""
    origin = typing.get_origin(kind)
    if origin is types.UnionType:  # always "X | None" here
        (inner,) = (arm for arm in typing.get_args(kind) if arm is not types.NoneType)
        return None if value is None else _read(inner, value, key)
    if dataclasses.is_dataclass(kind):
        return _read_record(kind, value, key)
    if origin is dict:
        _, inner = typing.get_args(kind)
        return {
            str(name): _read(inner, item, f"{key}.{name}")
            for name, item in _mapping({} if value is None else value, key).items()
        }
    if kind is int and key.endswith(("_bytes", "_bytes_per_hour")):
        return parse_size(value, key)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(f"{key}: expected {_TYPE_NAMES[kind]}, found {_shown(value)}")
    if key.rpartition(".")[2] in _PATH_NAMES:
        return os.path.expanduser(value)
    return value


_PATH_NAMES = (
    "path",
    "root",
    "file",
    "adapter",
    "chat_template",
    "api_keys_file",
)  # last names of the keys that hold a path


_TYPE_NAMES: dict[Any, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}


def _read_record(kind: Any, value: Any, key: str) -> Any:
    """Convert a mapping to a dataclass; every field must be there (PrefixConfig's may be left out) and no other."""
    data = _mapping(value, key)
    hints = typing.get_type_hints(kind)
    for name in data:
        if name not in hints:
            raise ConfigError(_unknown_key(f"{key}.{name}" if key else str(name), key, hints))
    items = {}
    for name, hint in hints.items():
        full = f"{key}.{name}" if key else name
        if name not in data and kind is not PrefixConfig and kind is not Config:
            hint = _INHERIT_HINT.format(_INHERIT.get(key, "default")) if key in GROUPS else ""
            raise ConfigError(f"{full} is missing{hint}")
        items[name] = _read(hint, data.get(name), full)
    return kind(**items)


_INHERIT_HINT = (
    "; a file of your own inherits what it leaves out when it starts with `defaults: [{}, _self_]`"
)
_INHERIT = {"model": "custom", "engine": "int8"}


def _mapping(value: Any, key: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key}: expected a group of keys, found {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    return "nothing (null)" if value is None else repr(value)


# Checks of values, after the types are right.


def _check_values(config: Config) -> None:
    """Refuse values that no part of Kestrel could work with. Raises ConfigError naming the key."""
    model, engine, cache, server, bench = (
        config.model,
        config.engine,
        config.cache,
        config.server,
        config.bench,
    )
    _require_at_least("model.context_tokens", model.context_tokens, 1)
    _require_text("model.path", model.path)
    _require_text("model.name", model.name)
    _require_text("model.adapter", model.adapter)
    _require_text("model.root", model.root)
    if (
        model.declared is not None
        and model.declared.wheel is not None
        and model.declared.random_seed is not None
    ):
        raise ConfigError("model.declared: expected one of wheel and random_seed, found both")
    if (
        model.declared is not None
        and model.declared.random_seed is not None
        and model.declared.geometry is None
    ):
        raise ConfigError("model.declared.random_seed: a random checkpoint needs model.declared.geometry")

    _require_one_of("engine.weights", engine.weights, WEIGHT_RECIPES)
    _require_one_of("engine.kv", engine.kv, KV_DTYPES)
    _require_at_least("engine.chunk_tokens", engine.chunk_tokens, 1)
    _require_at_least("engine.threads", engine.threads, 1)
    _require_at_least("engine.kv_ram_bytes", engine.kv_ram_bytes, 1)
    _require_at_least("engine.kv_touched_bytes", engine.kv_touched_bytes, 0)
    _require_at_least("engine.speculate", engine.speculate, 0)

    _require_text("cache.root", cache.root)
    if cache.page_tokens < 1 or cache.page_tokens % KEY_BLOCK_TOKENS:
        raise ConfigError(
            f"cache.page_tokens: expected a multiple of {KEY_BLOCK_TOKENS} "
            f"(the keys the attention kernel reads at once), found {cache.page_tokens}"
        )
    _require_at_least("cache.min_match", cache.min_match, 1)
    _require_at_least("cache.save_queue_pages", cache.save_queue_pages, 1)
    _require_at_least("cache.max_bytes", cache.max_bytes, 1)
    _require_at_least("cache.max_files", cache.max_files, 1)
    _require_at_least("cache.max_tokens", cache.max_tokens, 1)
    _require_at_least("cache.max_prefix_tokens", cache.max_prefix_tokens, 1)
    _require_at_least("cache.min_free_bytes", cache.min_free_bytes, 0)
    _require_at_least("cache.write_bytes_per_hour", cache.write_bytes_per_hour, 1)
    if cache.ttl_seconds is not None and not cache.ttl_seconds > 0:
        raise ConfigError(f"cache.ttl_seconds: expected more than 0 (or null), found {cache.ttl_seconds}")

    _require_one_of("cache.accept", cache.accept, ACCEPTED_NUMERICS)
    _require_one_of("cache.load", cache.load, LOADS)
    if cache.pull_seconds is not None and not cache.pull_seconds > 0:
        raise ConfigError(f"cache.pull_seconds: expected more than 0 (or null), found {cache.pull_seconds}")

    _require_text("server.host", server.host)
    if not 0 <= server.port < 65536:
        raise ConfigError(f"server.port: expected 0 (any free port) to 65535, found {server.port}")
    _require_text("server.api_keys_file", server.api_keys_file)
    _require_at_least("server.max_running", server.max_running, 1)
    _require_at_least("server.prompt_rows", server.prompt_rows, 1)
    _require_at_least("server.max_queue", server.max_queue, 0)
    _require_at_least("server.max_queue_bytes", server.max_queue_bytes, 1)
    _require_at_least("server.max_running_per_key", server.max_running_per_key, 1)
    _require_at_least("server.max_prompt_tokens", server.max_prompt_tokens, 1)
    _require_at_least("server.max_choices", server.max_choices, 1)
    _require_at_least("server.max_stops", server.max_stops, 0)
    _require_one_of("server.log_format", server.log_format, LOG_FORMATS)
    _require_at_least("server.max_body_bytes", server.max_body_bytes, 1)
    _require_at_least("server.default_max_tokens", server.default_max_tokens, 1)

    for name, prefix in config.prefixes.items():
        if (prefix.text is None) == (prefix.file is None):
            found = "neither" if prefix.text is None else "both"
            raise ConfigError(f"prefixes.{name}: expected exactly one of text and file, found {found}")
        if prefix.role is not None:
            _require_one_of(f"prefixes.{name}.role", prefix.role, ("system",))

    _require_at_least("bench.context_tokens", bench.context_tokens, 1)
    _require_at_least("bench.answer_tokens", bench.answer_tokens, 1)
    _require_at_least("bench.repeats", bench.repeats, 1)


def _require_at_least(key: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise ConfigError(f"{key}: expected {least} or more, found {value}")


def _require_text(key: str, value: str | None) -> None:
    if value is not None and not value.strip():
        raise ConfigError(f"{key}: expected text, found an empty value")


def _require_one_of(key: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(
            f"{key}: expected {_listed(allowed, ' or ')}, found {_shown(value)}{_did_you_mean(value, allowed)}"
        )


# Overrides: checked against the schema before Hydra sees them, so that messages can name what exists.


def _prepared_override(word: str, folders: Sequence[Path]) -> str:
    """Check one `key=value` word and rewrite it into the form Hydra takes. Raises ConfigError."""
    match = _OVERRIDE.fullmatch(word)
    if match is None or (match["value"] is None and match["prefix"] != "~"):
        raise ConfigError(f"expected key=value, found {word!r} (for example server.port=9000 or cache=board)")
    prefix, key, value = match["prefix"] or "", match["key"], match["value"]
    if key in GROUPS and prefix != "~":
        _check_options(key, value, folders)
        return f"{key}={value}"
    kind = _schema_type(key)
    if prefix == "~":
        if not key.startswith("prefixes."):
            raise ConfigError(f"{word}: a key can be changed but not removed (only prefixes.NAME can)")
        return word
    if _accepts_text(kind):
        value = _literal_text(value)
    return f"++{key}={value}"  # the schema knows the key, so it may be new to the composed files


def _check_options(group: str, value: str, folders: Sequence[Path]) -> None:
    """Refuse `group=name` when no YAML file has that name. `[a,b]` selects several prefix sets."""
    names = [name.strip() for name in value.removeprefix("[").removesuffix("]").split(",")]
    if len(names) > 1 and not (value.startswith("[") and group == "prefixes"):
        raise ConfigError(f"{group}: expected one option, found {value!r}")
    existing = group_options(group, folders)
    for name in names:
        if name in existing:
            continue
        hint = _did_you_mean(name, existing)
        if group == "model" and not hint:
            hint = "; to serve a checkpoint file or folder use model.path=PATH"
        raise ConfigError(
            f"{group}: there is no option {name!r}{hint}\n  {group} has: {', '.join(existing)}"
            f"\n  a file conf/{group}/NAME.yaml in the current directory adds one"
        )


def _schema_type(key: str) -> Any:
    """Annotated type of a full key. Raises ConfigError with the nearest names when there is none."""
    kind: Any = Config
    parent = ""
    for name in key.split("."):
        kind = _without_none(kind)
        full = f"{parent}.{name}" if parent else name
        if typing.get_origin(kind) is dict:
            kind = typing.get_args(kind)[1]
        elif dataclasses.is_dataclass(kind):
            hints = typing.get_type_hints(kind)
            if name not in hints:
                raise ConfigError(_unknown_key(full, parent, hints))
            kind = hints[name]
        else:
            raise ConfigError(f"unknown key {key}: {parent} holds {_TYPE_NAMES[kind]}, not a group of keys")
        parent = full
    return kind


def _unknown_key(key: str, parent: str, siblings: Iterable[str]) -> str:
    names = list(siblings)
    leaf = key.rpartition(".")[2]
    near = difflib.get_close_matches(leaf, names, 1, 0.6)
    if near:
        hint = f"; did you mean {parent + '.' if parent else ''}{near[0]}?"
    else:
        elsewhere = difflib.get_close_matches(
            leaf, [known.rpartition(".")[2] for known in known_keys()], 1, 0.8
        )
        full = [known for known in known_keys() if elsewhere and known.rpartition(".")[2] == elsewhere[0]]
        hint = f"; did you mean {' or '.join(full)}?" if full else ""
    return f"unknown key {key}{hint}\n  {parent or 'the top level'} has: {', '.join(names)}"


def known_keys() -> list[str]:
    """Full names of all keys that hold a value; `NAME` stands for a prefix's name."""

    def walk(kind: Any, key: str) -> Iterable[str]:
        kind = _without_none(kind)
        if typing.get_origin(kind) is dict:
            yield from walk(typing.get_args(kind)[1], f"{key}.NAME")
        elif dataclasses.is_dataclass(kind):
            for name, hint in typing.get_type_hints(kind).items():
                yield from walk(hint, f"{key}.{name}" if key else name)
        else:
            yield key

    return list(walk(Config, ""))


def _without_none(kind: Any) -> Any:
    if typing.get_origin(kind) is types.UnionType:
        (kind,) = (arm for arm in typing.get_args(kind) if arm is not types.NoneType)
    return kind


def _accepts_text(kind: Any) -> bool:
    return _without_none(kind) is str


def _literal_text(value: str) -> str:
    """Quote a text value for Hydra's grammar, unless it is null, quoted already, or holds an interpolation."""
    if value in ("null", "???") or "${" in value or value[:1] in ("'", '"'):
        return value
    return _quoted(value)


def _quoted(value: str) -> str:
    """A single-quoted text in Hydra's grammar: backslashes count only before a quote, where they are doubled."""
    return "'" + re.sub(r"(\\+)(?='|$)", r"\1\1", value).replace("'", r"\'") + "'"


def _did_you_mean(name: str, existing: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(existing), 1, 0.6)
    return f"; did you mean {near[0]}?" if near else ""


def _listed(names: Sequence[str], last: str) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + last + names[-1]


def _first_lines(error: Exception) -> str:
    """The part of a Hydra or OmegaConf message that helps; the rest is its internal state."""
    lines = [line.rstrip() for line in str(error).splitlines() if line.strip()]
    noise = ("object_type", "provider=", "See http", "3. To sweep", "Config search path")
    kept = [line for line in lines if not line.lstrip().startswith(noise)]
    return "\n  ".join(kept[:4]).replace("'++", "'") or type(error).__name__
