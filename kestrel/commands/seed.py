"""`kestrel kv export | import`: snapshots in the format of Kestrel-LLM's `--disk-kv`."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kestrel.commands.listing import KEY_DIGITS, describe_identity
from kestrel.commands.parsers import add_command, suggest
from kestrel.commands.progress import Working
from kestrel.commands.texts import count, size
from kestrel.config import Config
from kestrel.errors import KestrelError, RequestError

if TYPE_CHECKING:
    from kestrel.commands.parsers import Subparsers
    from kestrel.seed.vlkv import Shape
    from kestrel.store.store import Store

CONFIGURED = "configured"


def add_parsers(kv: "Subparsers", shared: argparse.ArgumentParser) -> None:
    """Declare the commands below `kestrel kv`."""
    parser = add_command(
        kv,
        shared,
        "export",
        export,
        summary="write a stored prefix as a .kv file of Kestrel-LLM",
        description="Write the prefix that ends with a page as a snapshot that Kestrel-LLM's --disk-kv reads: "
        "version 1 for float32 KV, version 2 for int8.",
        examples="kv export 3f2a91 --vlkv snapshots",
        operand=("KEY", "the key of a page, or the beginning of it"),
    )
    parser.add_argument("--vlkv", metavar="DIR", required=True, help="the folder to write into")
    parser = add_command(
        kv,
        shared,
        "import",
        import_file,
        summary="read a .kv file of Kestrel-LLM into the store",
        description="Read a snapshot of Kestrel-LLM's --disk-kv (version 1 or 2) into the store. The file does not say "
        "which model computed it: --identity does. Its pages keep their provenance and are read under "
        "cache.accept=portable only.",
        examples="kv import kv_f55db41cdadd0785.kv --identity configured model.path=/models/Qwen3-VL-2B\n"
        "kv import kv_f55db41cdadd0785.kv --identity 32e57ad841a5a1c3",
        operand=("FILE.kv", "the snapshot"),
    )
    parser.add_argument(
        "--identity",
        metavar="WHICH",
        help="the model that computed it: `configured`, or a namespace that `kestrel kv ls` shows",
    )


def export(args: argparse.Namespace, config: Config) -> int:
    """Write one prefix."""
    if args.operand is None:
        args.parser.error("which prefix? give the KEY of its last page, as `kestrel kv ls` shows it")
    from kestrel.configured import configured_store
    from kestrel.seed.exchange import export_snapshot
    from kestrel.seed.vlkv import MAX_TOKENS

    if not Path(config.cache.root).is_dir():
        raise KestrelError(f"there is no store at {config.cache.root} (cache.root)")
    with configured_store(config.cache).open() as store, Working("exporting") as working:
        key = store.resolve_key(args.operand)
        path, nbytes, written = export_snapshot(store, key, Path(args.vlkv), working.report)
        end = store.chain(key)[-1]
    num_tokens = end.first + end.num_tokens
    print(f"{path}: {count(num_tokens, 'token')}, {nbytes:,} bytes" + ("" if written else ", there already"))
    if num_tokens > MAX_TOKENS:
        print(f"note: Kestrel-LLM reads snapshots of at most {MAX_TOKENS} tokens")
    return 0


def import_file(args: argparse.Namespace, config: Config) -> int:
    """Read one snapshot into the store."""
    if args.operand is None:
        args.parser.error("which file? give the path of a .kv snapshot")
    from kestrel.configured import configured_store
    from kestrel.seed.exchange import import_snapshot
    from kestrel.seed.vlkv import Snapshot

    with Snapshot(Path(args.operand)) as snapshot:
        identity = _identity(args, config, snapshot.shape)
        with configured_store(config.cache).open() as store, Working("importing") as working:
            imported = import_snapshot(store, snapshot, identity, config.cache.page_tokens, working.report)
    print(
        f"{count(imported.num_tokens, 'token')} in {count(len(imported.keys), 'page')}, {size(imported.nbytes)} "
        f"written to namespace {imported.namespace.name}; they are read under cache.accept=portable only"
    )
    suggest(args, f"kv show {imported.keys[-1].hex()[:KEY_DIGITS]}")
    return 0


def _identity(args: argparse.Namespace, config: Config, shape: "Shape") -> dict[str, Any]:
    """The model identity the user says a snapshot belongs to; RequestError with the candidates if they did not."""
    from kestrel.configured import configured_store

    if args.identity == CONFIGURED:
        from kestrel.commands.loading import open_runtime

        with open_runtime(config, quiet=False) as runtime:
            return runtime.identity
    candidates: dict[str, dict[str, Any]] = {}
    if Path(config.cache.root).is_dir():
        with configured_store(config.cache).open() as store:
            candidates = _fitting(store, shape)
    if args.identity in candidates:
        return candidates[args.identity]
    lines = [f"  --identity {name}  {describe_identity(identity)}" for name, identity in candidates.items()]
    what = "is not one of those that fit" if args.identity else "must be told"
    raise RequestError(
        f"{args.operand} holds {shape.num_tokens} tokens of a model with {shape.num_layers} layers, "
        f"{shape.num_kv_heads} KV heads of {shape.head_dim}, {shape.kv_dtype} KV; which model that was {what}:\n"
        + "\n".join(
            [f"  --identity {CONFIGURED}  the configured model (with engine.kv={shape.kv_dtype})", *lines]
        )
    )


def _fitting(store: "Store", shape: "Shape") -> dict[str, dict[str, Any]]:
    """The identities in the store that a snapshot of this shape may belong to, by namespace."""
    from kestrel.errors import ArtifactError
    from kestrel.seed.exchange import check_fit

    found = {}
    for row in store.list_namespaces():
        try:
            identity = store.load_identity(row.digest)
            check_fit(shape, identity)
            found[row.digest.hex()[:16]] = identity
        except ArtifactError:  # no identity, or another model's
            pass
    return found
