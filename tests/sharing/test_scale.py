"""Promise: thousands of published pages are listed and looked up at once, without data and without DVC."""

import sys
import time
from pathlib import Path

import numpy as np

from kestrel.identity import Namespace, canonical_json, page_key
from kestrel.sharing.listing import Listing
from kestrel.sharing.mark import PublishedPage, encode_mark, write_mark
from tests.cache.conftest import tokens_of

IDENTITY = {"model": {"num_layers": 28}, "numerics": {"probe": "0" * 32}}
NAMESPACE = Namespace.of(IDENTITY)
PAGES, CHAIN, PAGE = 2000, 20, 256


def make_mark(root: Path, parent: bytes, first: int, tokens: np.ndarray, prefix: str | None) -> PublishedPage:
    key = page_key(parent, tokens.astype("<i4"))
    return PublishedPage(
        path=root / NAMESPACE.name / key.hex()[:2] / f"{key.hex()}.safetensors",
        md5=key.hex(),
        nbytes=5_898_240,
        namespace=NAMESPACE.digest,
        key=key,
        parent=parent,
        first=first,
        num_tokens=len(tokens),
        prefix=prefix,
        identity_text=canonical_json(IDENTITY).decode("ascii"),
    )


def test_two_thousand_pages(tmp_path: Path) -> None:
    prompts = [np.array(tokens_of(CHAIN * PAGE, seed), "<i4") for seed in range(PAGES // CHAIN)]
    for number, prompt in enumerate(prompts):
        parent = NAMESPACE.digest
        for index in range(CHAIN):
            name = f"prefix-{number}" if index == CHAIN - 1 else None
            page = make_mark(tmp_path, parent, index * PAGE, prompt[index * PAGE : (index + 1) * PAGE], name)
            page.path.parent.mkdir(parents=True, exist_ok=True)
            page.mark_path.write_bytes(encode_mark(page))
            parent = page.key
    started = time.process_time()
    listing = Listing(tmp_path).refresh()
    assert len(listing.pages) == PAGES and len(listing.prefixes()) == len(prompts)
    assert time.process_time() - started < 1.0
    started = time.process_time()
    listing.refresh()
    for prompt in prompts:
        assert len(listing.follow(NAMESPACE.digest, prompt)) == CHAIN
    assert time.process_time() - started < 0.01 * len(prompts)
    assert [page.num_prefix_tokens for page in listing.with_ancestors(listing.resolve(["prefix-7"]))] == list(
        range(PAGE, CHAIN * PAGE + 1, PAGE)
    )


def test_marks_that_come_and_go_are_noticed(tmp_path: Path) -> None:
    prompt = np.array(tokens_of(2 * PAGE + 7), "<i4")
    listing = Listing(tmp_path).refresh()
    assert listing.follow(NAMESPACE.digest, prompt) == []
    first = make_mark(tmp_path, NAMESPACE.digest, 0, prompt[:PAGE], None)
    last = make_mark(tmp_path, first.key, PAGE, prompt[PAGE : PAGE + 40], "short")
    for page in (first, last):
        page.path.parent.mkdir(parents=True, exist_ok=True)
        write_mark(page)
        listing.refresh()
    assert listing.follow(NAMESPACE.digest, prompt) == [first, last]
    assert listing.follow(NAMESPACE.digest, prompt[: PAGE + 39]) == [first]
    last.mark_path.unlink()
    assert listing.refresh(at_most_every=60).follow(NAMESPACE.digest, prompt) == [first, last]
    assert listing.refresh().follow(NAMESPACE.digest, prompt) == [first]
    first.mark_path.write_text("<<<<<<< ours\n")
    later = first.mark_path.with_name("x")
    later.touch()
    assert listing.refresh().pages == [] and first.mark_path in listing.unreadable


def test_listing_needs_no_dvc() -> None:
    import subprocess

    code = "import kestrel.sharing.ondemand, kestrel.sharing.exchange, sys; print('dvc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
