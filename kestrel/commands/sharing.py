"""`kestrel kv publish | push | pull | rm` and what they list: KV that travels with the repository."""

import argparse
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kestrel.commands.listing import KEY_DIGITS, describe_identity
from kestrel.commands.parsers import add_command, suggest
from kestrel.commands.progress import Working
from kestrel.commands.texts import count, print_json, print_table, size
from kestrel.config import Config, group_options

if TYPE_CHECKING:
    from kestrel.commands.parsers import Subparsers
    from kestrel.sharing.exchange import Outcome
    from kestrel.sharing.listing import Listing
    from kestrel.sharing.mark import PublishedPage

HEAD = ("KEY", "PREFIX", "PAGES", "SIZE", "HERE", "NAME")


def add_parsers(kv: "Subparsers", shared: argparse.ArgumentParser) -> None:
    """Declare the commands below `kestrel kv`."""
    operand = (
        "NAME|KEY",
        "a prefix of the configuration, or the key of its last page or the beginning of it",
    )
    published = ("NAME|KEY", "a published prefix, or the key of its last page; none means all")
    parser = add_command(
        kv,
        shared,
        "publish",
        publish,
        summary="make stored prefixes part of the repository",
        description="Make stored prefixes part of the DVC repository that the store lies in: their pages get an "
        "object in DVC's cache and a .dvc file each, for git. A NAME of the configuration (`prefixes`) is computed "
        "first if it is not stored. Publishing again changes nothing.",
        examples="kv publish assistant prefixes=assistant\nkv publish 3f2a91 --as manual",
        operand=operand,
        many=True,
    )
    parser.add_argument("--as", dest="name", metavar="NAME", help="the name to give to a prefix given by KEY")
    for name, run, summary, description in (
        (
            "push",
            push,
            "send published pages to a remote",
            "Send the data of published prefixes to a DVC remote. Push data before git, so that nobody clones "
            "what cannot be pulled yet.",
        ),
        (
            "pull",
            pull,
            "fetch published pages into the store",
            "Fetch the data of published prefixes from DVC's cache or a remote into the store. A server does so by "
            "itself, page by page, when a prompt needs them.",
        ),
    ):
        parser = add_command(
            kv,
            shared,
            name,
            run,
            summary=summary,
            description=description,
            examples=f"kv {name}\nkv {name} assistant\nkv {name} 3f2a91 --remote storage",
            operand=published,
            many=True,
        )
        parser.add_argument("--remote", metavar="NAME", help="a DVC remote (default: core.remote)")
    add_command(
        kv,
        shared,
        "rm",
        withdraw,
        summary="unpublish prefixes",
        description="Remove the .dvc files of published prefixes, except those of pages that other published "
        "prefixes need. Artifacts stay in the store until they are evicted, objects in DVC's cache and remotes until "
        "`dvc gc`.",
        examples="kv rm assistant\nkv rm 3f2a91",
        operand=("NAME|KEY", "a published prefix, or the key of its last page"),
        many=True,
    )


def publish(args: argparse.Namespace, config: Config) -> int:
    """Publish prefixes by name or key."""
    if not args.operands:
        args.parser.error(
            "what should be published? give a NAME of `prefixes` or a KEY that `kestrel kv ls` shows"
        )
    from kestrel.configured import configured_store
    from kestrel.sharing.exchange import Outcome, open_repository
    from kestrel.sharing.exchange import publish as publish_pages
    from kestrel.store.store import KEY_TEXT

    for word in args.operands:
        if word not in config.prefixes and not KEY_TEXT.fullmatch(word.lower()):
            args.parser.error(
                f"{word!r} is no key of a page, and no prefix of the configuration, which has "
                f"{', '.join(sorted(config.prefixes)) or 'none'}; add one with prefixes=NAME "
                f"(there are {', '.join(group_options('prefixes'))}) or prefixes.NAME.file=FILE"
            )
    if args.name is not None and len(args.operands) > 1:
        args.parser.error("--as gives a name to one prefix; publish the others by themselves")
    repository = open_repository(Path(config.cache.root))
    keys = {name: _prepared_key(name, config) for name in args.operands if name in config.prefixes}
    outcomes: list[Outcome] = []
    with configured_store(config.cache).open() as store:
        for word in args.operands:
            pages = store.chain(keys.get(word) or store.resolve_key(word))
            name = args.name or (word if word in keys else None)
            with Transferring(f"publishing {word}") as moving:
                outcome = publish_pages(store, repository, pages, name, moving.report)
            moving.tell(outcome, "published", "published already")
            outcomes.append(outcome)
    _tell_problems(outcomes)
    suggest(args, "kv push")
    return 0


def push(args: argparse.Namespace, config: Config) -> int:
    """Send published pages to a remote."""
    from kestrel.sharing.exchange import open_repository
    from kestrel.sharing.exchange import push as push_pages

    listing, pages = _chosen(args, config)
    if not pages:
        return _report_nothing(args, config)
    repository = open_repository(listing.root)
    remote = repository.remote(args.remote)
    with Transferring(f"pushing to {remote.name}") as moving:
        outcome = push_pages(repository, remote, pages, moving.report)
    moving.tell(outcome, f"pushed to {remote.name} ({remote.url})", "there already")
    _tell_problems([outcome])
    return 1 if outcome.problems else 0


def pull(args: argparse.Namespace, config: Config) -> int:
    """Fetch published pages into the store."""
    from kestrel.configured import configured_store
    from kestrel.sharing.exchange import open_repository
    from kestrel.sharing.exchange import pull as pull_pages

    listing, pages = _chosen(args, config)
    if not pages:
        return _report_nothing(args, config)
    repository = open_repository(listing.root)
    with configured_store(config.cache).open() as store, Transferring("pulling") as moving:
        outcome = pull_pages(store, repository, lambda: repository.remote(args.remote), pages, moving.report)
    moving.tell(outcome, "pulled", "here already")
    suggest(args, "kv ls")
    return 0


def withdraw(args: argparse.Namespace, config: Config) -> int:
    """Unpublish prefixes."""
    if not args.operands:
        args.parser.error(
            "what should be unpublished? give a NAME or KEY that `kestrel kv ls --published` shows"
        )
    from kestrel.sharing.exchange import withdraw as withdraw_pages

    listing, _ = _chosen(args, config)
    gone = withdraw_pages(listing, listing.resolve(args.operands))
    print(
        f"unpublished {count(len(gone), 'page')} ({size(sum(page.nbytes for page in gone))}); the data stays in the "
        "store, in DVC's cache and in remotes (`dvc gc` removes what no commit needs)"
    )
    return 0


def list_published(args: argparse.Namespace, config: Config) -> int:
    """Print one line for each published prefix, whether its data is here or not."""
    from kestrel.sharing.ondemand import published_pages

    listing = published_pages(Path(config.cache.root))
    pages = listing.pages
    if args.json:
        print_json({"root": config.cache.root, "pages": [page_facts(page) for page in pages]})
        return 0
    ends = listing.prefixes() if not args.pages else pages
    for namespace, any_page in sorted(listing.namespaces.items()):
        print(f"{namespace.hex()[:16]}  {describe_identity(any_page.identity)}")
        print_table(HEAD, [_cells(listing, page) for page in ends if page.namespace == namespace])
        print()
    here = [page for page in pages if page.is_here]
    print(
        f"{config.cache.root}: {count(len(pages), 'published page')}, {size(sum(page.nbytes for page in pages))}; "
        f"{len(here)} of them here ({size(sum(page.nbytes for page in here))})"
    )
    for path, reason in sorted(listing.unreadable.items()):
        print(f"unreadable: {path}: {reason}")
    if not pages:
        suggest(args, "kv publish assistant prefixes=assistant")
    elif len(here) < len(pages):
        suggest(args, "kv pull")
    return 0


def free_cached(config: Config, dry_run: bool) -> int:
    """Free what DVC's cache holds of published pages that left the store; returns the bytes."""
    from kestrel.sharing.exchange import free, open_repository
    from kestrel.sharing.ondemand import published_pages

    listing = published_pages(Path(config.cache.root))
    repository = open_repository(listing.root)
    freed = free(repository, repository.remote(None), listing.pages, dry_run)
    for page in freed:
        print(
            f"{size(page.nbytes):>9}  {repository.object_path(page.md5)}  (in DVC's cache only; a remote has it)"
        )
    return sum(page.nbytes for page in freed)


class Transferring:
    """Progress in bytes, and at the end what was moved at which rate."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._started = time.monotonic()
        self._working = Working(label)

    def report(self, done: int, total: int) -> None:
        """Note the bytes done."""
        rate = done / max(time.monotonic() - self._started, 1e-3)
        self._working.report(
            done, total, f"{self._label}: {size(done)} of {size(total)}, {size(round(rate))}/s"
        )

    def tell(self, outcome: "Outcome", moved: str, present: str) -> None:
        """Print what became of it."""
        seconds = max(time.monotonic() - self._started, 1e-3)
        rate = f" at {size(round(outcome.moved_bytes / seconds))}/s" if outcome.moved else ""
        print(
            f"{count(outcome.moved, 'page')} {moved} ({size(outcome.moved_bytes)}{rate}), {outcome.present} {present}"
        )

    def __enter__(self) -> "Transferring":
        return self

    def __exit__(self, *_: object) -> None:
        self._working.stop()


def page_facts(page: "PublishedPage") -> dict[str, Any]:
    """A published page as JSON."""
    return {
        "namespace": page.namespace.hex(),
        "key": page.key.hex(),
        "parent": page.parent.hex(),
        "first": page.first,
        "num_tokens": page.num_tokens,
        "prefix": page.prefix,
        "md5": page.md5,
        "nbytes": page.nbytes,
        "here": page.is_here,
    }


def _cells(listing: "Listing", page: "PublishedPage") -> tuple[str, ...]:
    chain = listing.chain(page)
    here = sum(part.is_here for part in chain)
    return (
        page.key.hex()[:KEY_DIGITS],
        str(page.num_prefix_tokens),
        str(len(chain)),
        size(sum(part.nbytes for part in chain)),
        f"{here} of {len(chain)}",
        page.prefix or "",
    )


def _chosen(args: argparse.Namespace, config: Config) -> tuple["Listing", list["PublishedPage"]]:
    """What is published, and the pages of the prefixes given as operands (all without any)."""
    from kestrel.sharing.ondemand import published_pages

    listing = published_pages(Path(config.cache.root))
    if not args.operands:
        return listing, listing.pages
    return listing, listing.with_ancestors(listing.resolve(args.operands))


def _prepared_key(name: str, config: Config) -> bytes:
    """Key of the last page of a configured prefix, which is computed and saved if it is not stored."""
    from kestrel.commands.loading import open_runtime
    from kestrel.preparation import prepare

    with open_runtime(config, quiet=False) as runtime:
        return prepare(runtime, name, config.prefixes[name]).keys[-1]


def _report_nothing(args: argparse.Namespace, config: Config) -> int:
    print(f"nothing is published in {os.path.abspath(config.cache.root)} (cache.root)")
    suggest(args, "kv publish assistant prefixes=assistant")
    return 0


def _tell_problems(outcomes: Iterable["Outcome"]) -> None:
    for outcome in outcomes:
        for problem in outcome.problems:
            print(f"problem: {problem}")
