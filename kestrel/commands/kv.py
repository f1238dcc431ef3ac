"""`kestrel kv …`: what the store holds, and keeping it in order."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kestrel.commands import seed, sharing
from kestrel.commands.listing import (
    KEY_DIGITS,
    ROW_HEAD,
    describe_identity,
    identity_line,
    row_cells,
    row_facts,
    shortened,
    usage_facts,
    usage_line,
)
from kestrel.commands.parsers import add_command, suggest
from kestrel.commands.progress import Working
from kestrel.commands.texts import count, print_json, print_table, size
from kestrel.config import Config
from kestrel.errors import KestrelError, RequestError, StoreError

if TYPE_CHECKING:
    from kestrel.commands.parsers import Subparsers
    from kestrel.store.store import Store


def add_parser(commands: "Subparsers", shared: argparse.ArgumentParser) -> None:
    """Declare the commands."""
    group = commands.add_parser(
        "kv",
        help="list, show, find, verify, evict and share KV artifacts",
        description="What the store holds, keeping it in order, and sharing it with other boards.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n  kestrel kv ls\n  kestrel kv show 3f2a\n  kestrel kv gc --dry-run\n"
        "  kestrel kv publish assistant prefixes=assistant",
        parents=[shared],
    )
    kv = group.add_subparsers(title="commands", metavar="COMMAND", required=True)

    parser = add_command(
        kv,
        shared,
        "ls",
        list_prefixes,
        summary="list the stored prefixes",
        description="List the stored prefixes, most recently used first: one line for each page that no other page "
        "continues. With --published: what is part of the repository, whether its data is here or not.",
        examples="kv ls\nkv ls --pages\nkv ls --published\nkv ls --json cache.root=/data/kv",
    )
    parser.add_argument("--pages", action="store_true", help="one line for every page")
    parser.add_argument("--published", action="store_true", help="what is published, here or elsewhere")
    parser.add_argument("--json", action="store_true", help="print JSON (all pages)")

    parser = add_command(
        kv,
        shared,
        "show",
        show,
        summary="show one prefix: its pages and its text",
        description="Show the prefix that ends with one page: the pages it is made of, how they were used, and "
        "its text as the configured model's tokenizer reads it.",
        examples="kv show 3f2a91\nkv show 3f2a91 --tokens\nkv show 3f2a91 --json model.path=/models/foo.gguf",
        operand=("KEY", "the key of a page, or the beginning of it"),
    )
    parser.add_argument("--tokens", action="store_true", help="also print all token ids")
    parser.add_argument("--json", action="store_true", help="print JSON (with all token ids)")

    parser = add_command(
        kv,
        shared,
        "find",
        find,
        summary="say what a prompt would find in the store",
        description="Say how much of a prompt the store holds for the configured model, and if little, why. "
        "Nothing is computed. With - the prompt is read from stdin.",
        examples="""
kv find "You are a helpful assistant"
kv find - < prompt.txt
kv find --json engine=int4 "Once upon a time"
""",
        operand=("TEXT", "the prompt, or - for stdin"),
    )
    parser.add_argument(
        "--chat", action="store_true", help="TEXT is a user's message: apply the chat template"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")

    parser = add_command(
        kv,
        shared,
        "verify",
        verify,
        summary="read every artifact and check its digests",
        description="Read every artifact and check its structure, its digests and its place in the chain of pages. "
        "Exit code 1 if any is damaged, or if there is no store.",
        examples="kv verify\nkv verify --quarantine",
    )
    parser.add_argument(
        "--quarantine", action="store_true", help="move damaged artifacts to <root>/quarantine"
    )

    parser = add_command(
        kv,
        shared,
        "gc",
        collect,
        summary="remove what the limits of the configuration do not allow",
        description="Bring the store within the limits of the configuration: expired pages first, then the "
        "least recently used. Never a pinned page, never one that a kept page continues, never the only copy of a "
        "published page.",
        examples="kv gc --dry-run\nkv gc cache.max_bytes=2GiB\nkv gc cache.ttl_seconds=86400\nkv gc --published",
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would be removed, and why")
    parser.add_argument(
        "--published",
        action="store_true",
        help="also free what DVC's cache holds of published pages that left the store and that the remote has",
    )
    sharing.add_parsers(kv, shared)
    seed.add_parsers(kv, shared)


def list_prefixes(args: argparse.Namespace, config: Config) -> int:
    """Print one line a prefix (or a page), grouped by namespace, and what the store takes in all."""
    if args.published:
        return sharing.list_published(args, config)
    store = _open_store(config)
    if store is None:
        return _report_no_store(args, config)
    with store:
        rows = store.list_pages()
        usage = store.usage()
        if args.json:
            print_json(
                {"root": config.cache.root, **usage_facts(usage), "pages": [row_facts(row) for row in rows]}
            )
            return 0
        shown = rows if args.pages else [row for row in rows if row.num_children == 0]
        for namespace in dict.fromkeys(row.namespace for row in rows):
            print(f"{namespace.hex()[:16]}  {identity_line(store, namespace)}")
            print_table(
                ROW_HEAD,
                [row_cells(row) for row in shown if row.namespace == namespace],
            )
            print()
    print(usage_line(usage, config.cache))
    if rows:
        suggest(args, f"kv show {shown[0].key.hex()[:KEY_DIGITS]}")
    else:
        suggest(args, 'generate "a prompt of a few sentences"')
    return 0


def show(args: argparse.Namespace, config: Config) -> int:
    """Print one prefix: its pages from position 0 on, its text, and where its last page's file is."""
    if args.operand is None:
        args.parser.error("which page? give its KEY or the beginning of it, as `kestrel kv ls` shows it")
    store = _open_store(config)
    if store is None:
        raise KestrelError(f"there is no store at {os.path.abspath(config.cache.root)} (cache.root)")
    with store:
        key = store.resolve_key(args.operand)
        chain = store.chain(key)
        tokens = store.prefix_tokens(key)
        path = store.page_path(chain[-1].namespace, key)
        identity = store.load_identity(chain[-1].namespace)
    text, why_no_text = _text(config, identity, [int(token) for token in tokens])
    if args.json:
        print_json(
            {
                **row_facts(chain[-1]),
                "path": str(path),
                "prefix_tokens": len(tokens),
                "tokens": [int(token) for token in tokens],
                "text": text,
                "pages": [row_facts(row) for row in chain],
            }
        )
        return 0
    num_bytes = sum(row.nbytes for row in chain)
    print(f"prefix of {count(len(tokens), 'token')} in {count(len(chain), 'page')}, {size(num_bytes)}")
    print(f"namespace {chain[-1].namespace.hex()[:16]}  {describe_identity(identity)}")
    print(f"file {path}\n")
    print_table(ROW_HEAD, [row_cells(row) for row in chain])
    print(f"\nno text: {why_no_text}" if text is None else f"\ntext:\n{shortened(text)}")
    if args.tokens:
        print("\ntoken ids:\n" + " ".join(str(token) for token in tokens))
    return 0


def find(args: argparse.Namespace, config: Config) -> int:
    """Print how many tokens of the prompt are stored, in which pages, or why none are."""
    if args.operand is None:
        args.parser.error("what should be looked for? give TEXT, or - to read it from stdin")
    text = sys.stdin.read() if args.operand == "-" else args.operand
    from kestrel.commands.loading import open_runtime

    with open_runtime(config, quiet=args.json) as runtime:
        if args.chat:
            if runtime.chat is None:
                raise RequestError(f"{runtime.name} has no chat template; leave --chat out")
            text = runtime.chat.render([{"role": "user", "content": text}])
        tokens = runtime.tokenizer.encode(text)
        match = runtime.find(tokens)
        namespace = runtime.namespace.name
    if args.json:
        print_json(
            {
                "namespace": namespace,
                "prompt_tokens": len(tokens),
                "matched_tokens": match.num_tokens,
                "reason": match.reason,
                "diverged_at": match.diverged_at,
                "pages": [
                    {
                        "key": ref.key.hex(),
                        "first": ref.first,
                        "num_tokens": ref.num_tokens,
                        "num_used": ref.num_used,
                    }
                    for ref in match.pages
                ],
            }
        )
        return 0
    print(f"{match.num_tokens} of {len(tokens)} tokens are stored in namespace {namespace}")
    if match.reason is not None:
        print(f"miss: {match.reason}")
    if match.diverged_at is not None:
        print(f"the nearest stored prefix has another token at position {match.diverged_at}")
    for ref in match.pages:
        print(f"  {ref.key.hex()[:KEY_DIGITS]}  tokens {ref.first} to {ref.first + ref.num_used}  {ref.path}")
    return 0


def verify(args: argparse.Namespace, config: Config) -> int:
    """Check all artifacts; damaged ones are listed with the reason. Without a store nothing is in order."""
    store = _open_store(config)
    if store is None:
        _report_no_store(args, config)
        return 1
    with store, Working("verifying") as working:
        result = store.verify(working.report, quarantine=args.quarantine)
    for path, reason in result.damaged:
        print(f"damaged: {path}: {reason}")
    print(
        f"{count(result.files, 'sound artifact')} ({size(result.bytes)}), {len(result.damaged)} damaged, "
        f"{count(result.orphans, 'orphan')}"
    )
    if result.damaged and not args.quarantine:
        suggest(args, "kv verify --quarantine")
    return 1 if result.damaged else 0


def collect(args: argparse.Namespace, config: Config) -> int:
    """Evict, or say what would be evicted; each line gives the reason."""
    store = _open_store(config)
    if store is None:
        return _report_no_store(args, config)
    with store:
        evictions = store.sweep(dry_run=args.dry_run)
        usage = store.usage()
    for eviction in evictions:
        held = ", frees nothing: DVC's cache keeps the bytes" if eviction.num_links > 1 else ""
        published = ", published" if eviction.is_published else ""
        print(f"{size(eviction.nbytes):>9}  {eviction.path}  ({eviction.reason}{published}{held})")
    freed = sum(eviction.nbytes for eviction in evictions if eviction.num_links == 1)
    if args.published:
        freed += sharing.free_cached(config, args.dry_run)
    print(
        f"{'would remove' if args.dry_run else 'removed'} {count(len(evictions), 'file')}, {size(freed)} freed"
    )
    print(usage_line(usage, config.cache))
    if args.dry_run and evictions:
        suggest(args, "kv gc")
    elif (
        any(eviction.is_published and eviction.num_links > 1 for eviction in evictions) and not args.published
    ):
        suggest(args, "kv gc --published")
    return 0


def _open_store(config: Config) -> "Store | None":
    """The configured store, or None where nothing has been stored yet (listing must not create it)."""
    root = Path(config.cache.root)
    if not root.is_dir():
        if os.path.lexists(root):
            raise StoreError(f"cache.root must be a folder, found {root.absolute()}, which is none")
        return None
    from kestrel.configured import configured_store

    return configured_store(config.cache).open()


def _text(config: Config, identity: dict[str, Any], tokens: list[int]) -> tuple[str | None, str]:
    """The tokens as the configured model's tokenizer reads them, or None and the reason."""
    from kestrel.configured import is_at_hand
    from kestrel.models.fetch import resolve_model

    if not is_at_hand(config.model):
        return None, "the configured model is not here (name the one it was computed with: model.path=PATH)"
    checkpoint, name = resolve_model(config.model)
    if checkpoint.geometry.as_identity() != identity.get("model"):
        return None, f"it was computed with another model than {name} (name that one: model.path=PATH)"
    return checkpoint.tokenizer().decode(tokens, skip_special=False), ""


def _report_no_store(args: argparse.Namespace, config: Config) -> int:
    if getattr(args, "json", False):
        print_json({"root": config.cache.root, "pages": []})
    else:
        print(f"nothing is stored yet: there is no folder {os.path.abspath(config.cache.root)} (cache.root)")
        suggest(args, 'generate "a prompt of a few sentences"')
    return 0
