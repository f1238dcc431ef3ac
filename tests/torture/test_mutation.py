"""Promise: of ten thousand spoilt artifacts none is believed, none crashes a reader, none costs more than its page."""

import os
import random
import resource
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kestrel.cache.restore import Restore
from kestrel.config import load_config
from kestrel.engine.pool import PagePool
from kestrel.errors import ArtifactError, ModelError
from kestrel.identity import as_tokens
from kestrel.runtime import Finished, Request, Runtime, Sampling
from kestrel.store.artifact import OpenPage, encode_header
from kestrel.store.layout import PageLayout
from kestrel.store.store import Limits, PageRef, Store
from tests.store.pages import NAMESPACE, fast_folder, open_store, payload_of, publish
from tests.torture.mutations import MUTATIONS
from tests.torture.talks import Turn, expected_answer, numbers

PAGE_TOKENS = 16
NUM_TOKENS = 2 * PAGE_TOKENS + 12  # two full pages and a partial one
LAYOUTS = {
    "float32": PageLayout(num_layers=3, num_kv_heads=2, head_dim=8),
    "int8": PageLayout(num_layers=3, num_kv_heads=2, head_dim=8, kv_dtype="int8"),
}


def is_sound(store: Store, pool: PagePool, ref: PageRef, table: list[int]) -> bool:
    """Whether the store and a restore take the page's file; if so the rows in the pool must be those saved."""
    try:
        page = store.open_page(ref, pool.layout)
    except ArtifactError as error:
        assert len(str(error)) < 2000  # a reason, not the hostile content
        return False
    restore = Restore(pool, [(ref, page)], table)
    restore.join()
    if restore.damage is not None:
        return False
    for layer, expected in enumerate(payload_of(ref.key, ref.num_tokens, pool.layout)):
        assert rows_of(pool, table[ref.first // PAGE_TOKENS], layer, ref.num_tokens) == expected
    return True


def rows_of(pool: PagePool, page: int, layer: int, count: int) -> bytes:
    """The first rows of a page in the pool, as the payload of an artifact of so many tokens."""
    return b"".join(
        np.ascontiguousarray(array[:, :count] if axis == 1 else np.moveaxis(array, axis, 0)[:count]).tobytes()
        if axis == 1 or array.ndim == 1
        else np.ascontiguousarray(array[..., :count]).tobytes()
        for array, axis in pool.layer_arrays(page, layer)
    )


@pytest.mark.parametrize("kv", LAYOUTS)
def test_no_spoilt_artifact_is_believed(kv: str, scale: Callable[[int, int], int], seed: int) -> None:
    rng, layout = random.Random(f"{kv} {seed}"), LAYOUTS[kv]
    count, started = scale(5_000, 100_000), time.monotonic()
    tried: Counter[str] = Counter()
    with fast_folder() as folder, open_store(Path(folder) / "kv") as store:
        tokens = as_tokens(numbers(rng, NUM_TOKENS))
        publish(store, tokens, PAGE_TOKENS, layout=layout)
        publish(store, as_tokens(numbers(rng, NUM_TOKENS)), PAGE_TOKENS, layout=layout)
        publish(store, tokens[:20], 20, layout=layout)  # the same tokens, cut otherwise
        others = [path.read_bytes() for path in (Path(folder) / "kv").rglob("*.safetensors")]
        refs = store.find_prefix(NAMESPACE, tokens, PAGE_TOKENS, 1).pages
        assert [ref.num_used for ref in refs] == [16, 16, 12]
        pool = PagePool(layout, PAGE_TOKENS, 8 * layout.page_nbytes(PAGE_TOKENS))
        table = [pool.allocate() for _ in refs]
        assert all(is_sound(store, pool, ref, table) for ref in refs)
        sound = {ref: ref.path.read_bytes() for ref in refs}
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        while tried.total() < count:
            ref, mutate = rng.choice(refs), rng.choice(MUTATIONS)
            spoilt = mutate(rng, sound[ref], rng.choice(others))
            if spoilt == sound[ref]:
                continue  # hit the place where it was right
            ref.path.write_bytes(spoilt)
            assert not is_sound(store, pool, ref, table), f"{mutate.__name__} number {tried.total()}"
            if rng.random() < 0.02:
                check_the_store_puts_it_aside(store, ref)
            ref.path.write_bytes(sound[ref])
            tried[mutate.__name__] += 1
        assert all(is_sound(store, pool, ref, table) for ref in refs)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        assert grown < 200, f"{grown} MiB"
        print(
            f"\n{kv}: {count} spoilt files in {time.monotonic() - started:.1f} s, +{grown:.0f} MiB: {dict(tried)}"
        )
        pool.close()


def check_the_store_puts_it_aside(store: Store, ref: PageRef) -> None:
    """Found by a store that knows nothing of it, a file is never taken for the page of its name unless it reads right.

    The header of a file with a spoilt payload is sound: then reading everything finds out.
    """
    with fast_folder() as folder:
        root = Path(folder) / "kv"
        path = root / ref.path.relative_to(store.root)
        path.parent.mkdir(parents=True)
        path.write_bytes(ref.path.read_bytes())
        with Store(root, Limits()) as fresh:
            usage = fresh.usage()
            assert (usage.files, usage.quarantined) in ((0, 1), (1, 0))
            report = fresh.verify(quarantine=True)
            assert report.files == 0 or report.orphans == 1  # a page whose predecessors are not there
            assert fresh.usage().files == report.files
            if (
                report.files
            ):  # its digests agree, so it is the bytes of some sound page's layers under a false prefix
                assert (
                    fresh.find_prefix(NAMESPACE, as_tokens(range(400, 440)), PAGE_TOKENS, 1).num_tokens == 0
                )


def test_spoilt_artifacts_never_change_an_answer(
    words: tuple[str, ...], tmp_path: Path, scale: Callable[[int, int], int], seed: int
) -> None:
    """The whole way: a runtime that meets them answers as a cold one and saves the pages anew."""
    rng = random.Random(3 + seed)
    tokens = numbers(rng, 300)
    request = Request(tokens, 6, Sampling(logprobs=2), ignore_eos=True)
    with Runtime.open(load_config([*words, f"cache.root={tmp_path / 'kv'}"]), lambda line: None) as runtime:
        expected, _ = expected_answer(runtime, request)
        assert runtime.writer is not None and runtime.store is not None
        runtime.writer.drain()
        sound = {path: path.read_bytes() for path in (tmp_path / "kv").rglob("*.safetensors")}
        assert len(sound) == 3
        for number in range(scale(60, 2000)):
            path = rng.choice(list(sound))
            if number < 3:
                path.write_bytes(sound[path][:512])
                os.truncate(path, 10**12)  # a terabyte that takes no room
            else:
                mutate = rng.choice(MUTATIONS)
                path.write_bytes(mutate(rng, sound[path], sound[rng.choice(list(sound))]))
            runtime.engine.pool.forget(list(runtime.engine.pool._cached))
            found = []
            for event in runtime.generate(request):
                found += [] if isinstance(event, Finished) else (event.logprobs or [])
            assert [entry.logprob for entry in found] == expected.logprobs
            runtime.writer.drain()
            assert {page: page.read_bytes() for page in sound} == sound
        assert runtime.store.verify().damaged == ()


def test_what_a_turn_is() -> None:
    """The clients of this folder would notice a single wrong bit."""
    from tests.torture.talks import Answer

    right = Answer("ab", ["a", "b"], [-1.5, -2.5], [{"a": -1.5}, {"b": -2.5}], "length")
    wrong = Answer("ab", ["a", "b"], [-1.5, float(np.nextafter(-2.5, 0))], right.top, "length")
    assert Turn({}, right).expected != wrong and not wrong.begins(right)
    assert Answer("a", ["a"], [-1.5], [{"a": -1.5}]).begins(right)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forged_pages_with_right_digests_fail_one_request_and_are_put_aside(
    words: tuple[str, ...], tmp_path: Path, value: float, temperature: float
) -> None:
    """Digests are checksums: who may write to the store can forge a page. Its nonsense is noticed once it is met."""
    rng = random.Random(4)
    tokens = numbers(rng, 300)
    request = Request(tokens, 6, Sampling(temperature=temperature, seed=1, logprobs=2), ignore_eos=True)
    with Runtime.open(load_config([*words, f"cache.root={tmp_path / 'kv'}"]), lambda line: None) as runtime:
        expected, _ = expected_answer(runtime, request)
        assert runtime.writer is not None and runtime.store is not None
        runtime.writer.drain()
        sound = {path: path.read_bytes() for path in (tmp_path / "kv").rglob("*.safetensors")}
        for path in sound:
            forge(path, value)
        runtime.engine.pool.forget(list(runtime.engine.pool._cached))
        with pytest.raises(ModelError, match="not numbers"):
            list(runtime.generate(request))
        runtime.writer.drain()
        assert [row for row in runtime.store.list_pages()] == []
        again, _ = expected_answer(runtime, request)
        assert again == expected
        runtime.writer.drain()
        assert {path: path.read_bytes() for path in sound} == sound


def forge(path: Path, value: float) -> None:
    """Fill an artifact's layers with one value and make its digests agree."""
    with OpenPage(os.open(path, os.O_RDONLY), path, None) as page:
        layers = [np.full(page.layer_nbytes // 4, value, np.float32) for _ in range(page.layout.num_layers)]
        digests = tuple(xxhash.xxh3_128_hexdigest(memoryview(layer)) for layer in layers)
        header = encode_header(page.layout, replace(page.header, layer_digests=digests))
        tokens = page.tokens.tobytes()
    path.write_bytes(header + b"".join(layer.tobytes() for layer in layers) + tokens)
