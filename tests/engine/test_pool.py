"""Pages are shared by reference, remembered until room is needed, and copied before a shared one is extended."""

import ctypes
import mmap
import time

import numpy as np
import pytest

from kestrel.engine import pool as pool_module
from kestrel.engine.pool import PagePool
from kestrel.errors import CapacityError, ConfigError
from kestrel.identity import Namespace, as_tokens, page_key
from kestrel.store.layout import PageLayout

ROOT = Namespace.of({"model": "a"}).digest


def pool_of(pages: int, kv_dtype: str = "float32") -> PagePool:
    layout = PageLayout(2, 2, 16, kv_dtype)
    return PagePool(layout, 128, pages * layout.page_nbytes(128))


def test_a_released_page_without_a_key_is_handed_out_again() -> None:
    pool = pool_of(2)
    first, second = pool.allocate(), pool.allocate()
    with pytest.raises(CapacityError, match="kv_ram_bytes"):
        pool.allocate()
    pool.release(first)
    assert pool.allocate() == first and second != first


def test_remembered_pages_are_found_by_their_tokens_and_dropped_oldest_first() -> None:
    pool = pool_of(3)
    tokens = as_tokens(range(300))
    keys, parent = [], ROOT
    for first in (0, 128, 256):
        page = pool.allocate()
        pool.remember(page, parent, tokens[first : first + 128])
        parent = page_key(parent, tokens[first : first + 128])
        keys.append((page, parent))
    assert [rows for _, rows in pool.find(ROOT, tokens)] == [128, 128, 44]
    assert [rows for _, rows in pool.find(ROOT, tokens[:290])] == [128, 128, 34]
    changed = tokens.copy()
    changed[140] = 9999
    assert [rows for _, rows in pool.find(ROOT, changed)] == [128, 12]
    for page, _ in reversed(keys):
        pool.release(page)
    assert pool.allocate() == keys[2][0]  # the leaf went first
    assert [rows for _, rows in pool.find(ROOT, tokens)] == [128, 128]


def test_a_page_that_was_forgotten_since_it_was_found_cannot_be_taken() -> None:
    pool = pool_of(2)
    tokens = as_tokens(range(128))
    page = pool.allocate()
    pool.remember(page, ROOT, tokens)
    pool.release(page)
    ((found, _),) = pool.find(ROOT, tokens)
    assert pool.take(found)
    pool.release(page)
    pool.forget([found.key])
    assert not pool.take(found)
    again = pool.allocate()
    assert again == page and pool.references(page) == 1
    pool.remember(again, ROOT, tokens)  # the same tokens, but another page's content
    assert not pool.take(found)


def test_kv_of_a_token_is_counted_as_it_is_kept() -> None:
    floats, ints = (PagePool(PageLayout(2, 3, 64, kind), 128, 1 << 22) for kind in ("float32", "int8"))
    assert floats.token_nbytes == 2 * 2 * 3 * 64 * 4
    assert ints.token_nbytes == 2 * 2 * 3 * (64 + 4)


def test_a_referenced_page_is_never_handed_out() -> None:
    pool = pool_of(2)
    page = pool.allocate()
    pool.remember(page, ROOT, as_tokens(range(128)))
    pool.release(page)
    pool.retain(page)
    assert pool.allocate() != page
    with pytest.raises(CapacityError):
        pool.allocate()


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_a_copy_has_the_same_bytes_and_its_own_memory(kv_dtype: str) -> None:
    pool = pool_of(3, kv_dtype)
    page = pool.allocate()
    for layer in range(2):
        pool.layer_block(page, layer)[:] = np.random.default_rng(layer).integers(
            0, 256, len(pool.layer_block(page, layer))
        )
    copy = pool.copy(page)
    for layer in range(2):
        assert (pool.layer_block(page, layer) == pool.layer_block(copy, layer)).all()
    pool.layer_block(copy, 0)[:] = 0
    assert pool.layer_block(page, 0).any()


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_the_offsets_of_the_kernel_and_the_views_of_the_store_name_the_same_memory(kv_dtype: str) -> None:
    pool = pool_of(2, kv_dtype)
    page = pool.num_pages - 1
    arrays = [array for array, _ in pool.layer_arrays(page, 1)]
    for number, array in enumerate(arrays, 1):
        array[:] = number
    k_at, ks_at, v_at, vs_at = pool.layer_offsets(1)
    assert pool.kv[page * pool.page_size + k_at] == 1
    assert pool.kv[page * pool.page_size + v_at] == (3 if kv_dtype == "int8" else 2)
    if kv_dtype == "int8":
        assert pool.scales[page * (pool.page_size // 4) + ks_at] == 2
        assert pool.scales[page * (pool.page_size // 4) + vs_at] == 4


def test_a_budget_below_two_pages_is_refused_with_the_size_of_a_page() -> None:
    with pytest.raises(ConfigError, match="kv_ram_bytes"):
        pool_of(1)


def test_committing_memory_ahead_of_use_changes_no_byte_of_a_page_in_use() -> None:
    layout = PageLayout(2, 2, 64)
    nbytes = layout.page_nbytes(128)
    pool = PagePool(layout, 128, 200 * nbytes, touched_nbytes=50 * nbytes)
    pool.expect(1 << 40)
    for number in range(150):
        page = pool.allocate()
        pool.layer_block(page, 0)[:] = pool.layer_block(page, 1)[:] = number + 1
    for page in range(150):
        for layer in range(2):
            assert (pool.layer_block(page, layer) == page + 1).all()
    pool.close()


def test_memory_for_later_is_committed_when_no_page_is_being_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_QUIET_SECONDS", 1.0)
    layout = PageLayout(2, 2, 64)
    nbytes = layout.page_nbytes(128)
    pool = PagePool(layout, 128, 200 * nbytes, touched_nbytes=8 * nbytes)

    def committed() -> int:
        """Pages of the pool in memory: none of these tests touches one."""
        memory_pages = pool.num_pages * nbytes // mmap.PAGESIZE
        present = (ctypes.c_ubyte * memory_pages)()
        start = pool.layer_block(0, 0).ctypes.data
        ctypes.CDLL(None).mincore(
            ctypes.c_void_p(start), ctypes.c_size_t(len(present) * mmap.PAGESIZE), present
        )
        return sum(byte & 1 for byte in present) * mmap.PAGESIZE // nbytes

    def wait_for(pages: int) -> None:
        deadline = time.monotonic() + 30
        while committed() < pages:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    pool.allocate()
    time.sleep(0.3)
    assert committed() == 0  # nothing to be restored is known of
    pool.expect(3 * nbytes)
    wait_for(4)
    pool.expect(1 << 40)
    wait_for(9)
    started = time.monotonic()
    for _ in range(5):
        pool.allocate()
    time.sleep(0.3)
    assert committed() == 9 or time.monotonic() - started > 0.9
    wait_for(14)
    pool.close()
