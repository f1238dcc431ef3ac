"""Promise: a search finds the longest stored prefix there is, to the token, with few look-ups, and explains a miss."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrel.errors import StoreError
from kestrel.identity import Namespace, as_tokens, prefix_sha256
from kestrel.store.catalog import NewPage, common_tokens, order_bytes
from kestrel.store.store import Store
from tests.store.pages import IDENTITY, NAMESPACE, check_bits, fast_folder, open_store, publish, restore

Prefix = tuple[int, ...]
Chain = tuple[Prefix, ...]  # the pages of a prefix, each with its tokens


def common(a: Prefix, b: Prefix) -> int:
    """Length of the common prefix, the plain way."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def longest(stored: set[Chain], prompt: Prefix) -> int:
    """The longest prefix any stored chain covers, by trying all."""
    return max((common(sum(chain, ()), prompt) for chain in stored), default=0)


# Few different tokens and page lengths from 1: prefixes share beginnings, pages of all sizes begin alike.
prefixes = st.lists(st.integers(0, 2), min_size=1, max_size=14).map(tuple)
sizes = st.lists(st.integers(1, 5), min_size=14, max_size=14)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(prefixes, sizes), max_size=12),
    st.lists(prefixes, min_size=1, max_size=5),
    st.integers(1, 4),
)
def test_finds_what_trying_everything_finds(
    saves: list[tuple[Prefix, list[int]]], prompts: list[Prefix], page_tokens: int
) -> None:
    stored: set[Chain] = set()
    with fast_folder() as folder, open_store(Path(folder)) as store:
        for prefix, lengths in saves:
            chain: list[Prefix] = []
            while sum(map(len, chain)) < len(prefix):
                done = sum(map(len, chain))
                chain.append(prefix[done : done + lengths[len(chain)]])
            publish(store, as_tokens(prefix), [len(page) for page in chain])
            stored |= {tuple(chain[: end + 1]) for end in range(len(chain))}
        for prompt in [*prompts, *(prefix for prefix, _ in saves)]:
            match = store.find_prefix(NAMESPACE, as_tokens(prompt), page_tokens, 1)
            expected = longest(stored, prompt)
            assert match.num_tokens == expected
            assert (match.reason is None) == (expected > 0)
            covered: Prefix = ()
            for ref in match.pages:
                page = tuple(np.frombuffer(ref.token_bytes, "<i4").tolist())
                assert ref.first == len(covered)
                assert ref.num_used == ref.num_tokens or ref is match.pages[-1]
                assert ref.prefix_sha256 == prefix_sha256(as_tokens(covered + page))
                covered += page[: ref.num_used]
                check_bits(store, ref)
            assert covered == prompt[:expected]
            goes_on = any(
                common(sum(chain, ()), prompt) == expected < len(sum(chain, ())) for chain in stored
            )
            if expected == len(prompt) or not goes_on:
                assert match.diverged_at is None
            elif match.num_tokens and match.diverged_at is None:
                # What goes on hangs behind another chain that covers the prompt just as far.
                assert match.pages[-1].num_used == match.pages[-1].num_tokens
            else:
                assert match.diverged_at == expected


def test_the_usual_session(store: Store) -> None:
    session = as_tokens(range(1000, 1100))
    publish(store, session, 16)
    assert restore(store, session) == 100  # six full pages and one of 4 tokens
    assert restore(store, session[:-1]) == 99  # the prompt again, last token left to compute
    assert restore(store, session[:50]) == 50
    longer = as_tokens([*session, *range(40)])
    assert restore(store, longer) == 100
    branch = longer.copy()
    branch[37] += 1
    match = store.find_prefix(NAMESPACE, branch, 16, 16)
    assert (match.num_tokens, match.diverged_at, match.reason) == (37, 37, None)
    assert [(ref.first, ref.num_tokens, ref.num_used) for ref in match.pages] == [
        (0, 16, 16),
        (16, 16, 16),
        (32, 16, 5),
    ]


def test_pages_of_another_size_are_found_too(store: Store) -> None:
    session = as_tokens(range(100))
    publish(store, session, 16)
    publish(store, session[:24], 24)  # the page size has been changed; one page has been saved since
    assert restore(store, session, page_tokens=24) == 100
    assert restore(store, session, page_tokens=16) == 100
    assert restore(store, session, page_tokens=7) == 100


def test_of_equal_matches_the_smaller_one_is_read(store: Store) -> None:
    session = as_tokens(range(64))
    publish(store, session, 64)
    publish(store, session[:8], 8)
    match = store.find_prefix(NAMESPACE, session[:8], 16, 1)
    assert [ref.num_tokens for ref in match.pages] == [8]


def test_a_miss_says_why(store: Store) -> None:
    session = as_tokens(range(40))

    def find(tokens: list[int]) -> tuple[str | None, int | None]:
        match = store.find_prefix(NAMESPACE, as_tokens(tokens), 16, 16)
        assert match.pages == () and match.num_tokens == 0
        return match.reason, match.diverged_at

    assert find([*range(40)]) == ("no page of this model identity is stored", None)
    publish(store, session)
    assert find([99, *range(40)]) == ("no stored page begins with the first token", 0)
    assert find([*range(15), 99]) == ("the nearest page shares 15 tokens, fewer than min_match 16", 15)
    assert find([*range(15)]) == ("the nearest page shares 15 tokens, fewer than min_match 16", None)
    assert find([]) == ("there are no tokens to look for", None)
    other = Namespace.of({**IDENTITY, "weights": "others"})
    match = store.find_prefix(other, session, 16, 16)
    assert match.reason == "no page of this model identity is stored"
    assert store.find_prefix(NAMESPACE, as_tokens([*range(16), 99]), 16, 16).num_tokens == 16


def test_orphans_are_out_of_reach_until_their_prefix_is_back(store: Store) -> None:
    session = as_tokens(range(64))
    keys = publish(store, session)
    store.quarantine(store.page_path(NAMESPACE.digest, keys[1]), "a test")
    assert restore(store, session) == 16
    with pytest.raises(StoreError, match="not in"):
        store.chain(keys[3])
    publish(store, session)
    assert restore(store, session) == 64


def test_few_look_ups_whatever_is_stored(store: Store) -> None:
    """Counts SQL statements: they grow with the pages of the prompt, not with what else is stored."""
    prompt = as_tokens(range(32 * 16))
    publish(store, prompt)
    catalog = store._current_catalog()

    def count(tokens: list[int]) -> int:
        statements: list[str] = []
        catalog.reader.set_trace_callback(statements.append)
        store.find_prefix(NAMESPACE, as_tokens(tokens), 16, 16)
        catalog.reader.set_trace_callback(None)
        return len(statements)

    questions = [
        prompt.tolist(),
        [*prompt.tolist()[:300], 7, 7, 7],
        [5] * 100,
        [*range(20), *range(500, 600)],
    ]
    before = [count(question) for question in questions]
    assert before[0] == 32
    random = np.random.default_rng(0)
    parents = [NAMESPACE.digest, *(row.key for row in store.chain(store.list_pages()[0].key)[:3])]
    catalog.insert(
        NewPage(
            NAMESPACE.digest,
            random.bytes(16),
            parents[number % 4],
            16 * (number % 4),
            16,
            1000,
            0.0,
            order_bytes(as_tokens(random.integers(0, 600, 16))),
        )
        for number in range(8000)
    )
    # Four pages on the way now have 2,000 children each: a handful of look-ups more for each of them, at most.
    assert all(now <= then + 20 for now, then in zip(map(count, questions), before, strict=True))
    for sql in ("tokens <= ? ORDER BY tokens DESC LIMIT 1", "tokens > ? ORDER BY tokens LIMIT 1"):
        plan = catalog.read(
            f"EXPLAIN QUERY PLAN SELECT * FROM pages WHERE namespace = ? AND parent = ? AND {sql}",
            (b"", b"", b""),
        )
        assert "USING INDEX children" in str(plan) and "TEMP B-TREE" not in str(plan)


@given(
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=6),
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=6),
)
def test_common_prefix_of_blobs(a: list[int], b: list[int]) -> None:
    expected = common(tuple(a), tuple(b))
    assert common_tokens(order_bytes(as_tokens(a)), order_bytes(as_tokens(b))) == expected
