"""Promise: FORMAT.md is enough to write an artifact, other tools can read it, equal content is an equal file."""

import hashlib
import json
import os
import stat
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from safetensors import safe_open

from kestrel.identity import Namespace, as_tokens, page_key
from kestrel.store.artifact import MAX_HEADER_NBYTES, PageHeader, encode_header, read_header
from kestrel.store.layout import PageLayout
from kestrel.store.store import Store
from tests.store.pages import IDENTITY, NAMESPACE, all_files, open_store, payload_of, publish

FLOAT = PageLayout(num_layers=11, num_kv_heads=2, head_dim=8)
INT8 = PageLayout(num_layers=3, num_kv_heads=1, head_dim=12, kv_dtype="int8")


def canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def write_by_the_book(
    namespace: bytes, parent: bytes, first: int, prefix: list[int], layers: list[dict[str, Any]]
) -> tuple[str, bytes]:
    """File name and bytes of the page behind position `first`, from FORMAT.md alone.

    `layers`: per layer the tensors in file order, name -> (dtype name, shape, bytes).
    """
    page = prefix[first:]
    token_bytes = struct.pack(f"<{len(page)}i", *page)
    key = xxhash.xxh3_128(parent + token_bytes).hexdigest()
    payload = b""
    digests = []
    entries: dict[str, Any] = {}
    for index, layer in enumerate(layers):
        start = len(payload)
        for name, (dtype, shape, data) in layer.items():
            end = len(payload) + len(data)
            entries[f"layers.{index}.{name}"] = {
                "dtype": dtype,
                "shape": shape,
                "data_offsets": [len(payload), end],
            }
            payload += data
        digests.append(xxhash.xxh3_128(payload[start:]).hexdigest())
    entries["tokens"] = {
        "dtype": "I32",
        "shape": [len(page)],
        "data_offsets": [len(payload), len(payload) + len(token_bytes)],
    }
    facts = {
        "format": 1,
        "namespace": namespace.hex(),
        "key": key,
        "parent": parent.hex(),
        "first": first,
        "num_tokens": len(page),
        "prefix_sha256": hashlib.sha256(struct.pack(f"<{len(prefix)}i", *prefix)).hexdigest(),
        "layer_digests": digests,
    }
    entries["__metadata__"] = {"kestrel": canonical(facts)}
    text = canonical(entries).encode()
    while (8 + len(text)) % 4096:
        text += b" "
    return f"{key}.safetensors", struct.pack("<Q", len(text)) + text + payload + token_bytes


def split(layout: PageLayout, layer: bytes, num_tokens: int) -> dict[str, Any]:
    """The bytes of a layer as the tensors FORMAT.md lists, its sizes worked out here."""
    heads, dim, n = layout.num_kv_heads, layout.head_dim, num_tokens
    if layout.kv_dtype == "float32":
        kinds = {"k": ("F32", [heads, dim, n], 4), "v": ("F32", [heads, n, dim], 4)}
    else:
        kinds = {
            "k": ("I8", [heads, dim, n], 1),
            "k_scale": ("F32", [heads, n], 4),
            "v": ("I8", [heads, n, dim], 1),
            "v_scale": ("F32", [heads, n], 4),
        }
    tensors = {}
    for name, (dtype, shape, size) in kinds.items():
        nbytes = int(np.prod(shape)) * size
        tensors[name] = (dtype, shape, layer[:nbytes])
        layer = layer[nbytes:]
    assert not layer
    return tensors


@pytest.mark.parametrize("layout", [FLOAT, INT8], ids=["float32", "int8"])
@pytest.mark.parametrize("sizes", [[16, 5], [1, 1], [7, 128]])
def test_spec_alone_gives_the_same_bytes(
    store: Store, root: Path, layout: PageLayout, sizes: list[int]
) -> None:
    prefix = [7, 0, 2**31 - 1, *range(50000, 50000 + sum(sizes) - 3)] if sum(sizes) > 3 else [9, 8]
    keys = publish(store, as_tokens(prefix), sizes, layout=layout)
    namespace = xxhash.xxh3_128(canonical(IDENTITY).encode()).digest()
    parent, first = namespace, 0
    for key, size in zip(keys, sizes, strict=True):
        layers = [split(layout, layer, size) for layer in payload_of(key, size, layout)]
        name, content = write_by_the_book(namespace, parent, first, prefix[: first + size], layers)
        path = root / namespace.hex()[:16] / name[:2] / name
        assert path.read_bytes() == content
        parent, first = key, first + size
    identity_file = root / namespace.hex()[:16] / "identity.json"
    assert identity_file.read_bytes() == canonical(IDENTITY).encode()


@pytest.mark.parametrize("layout", [FLOAT, INT8], ids=["float32", "int8"])
def test_safetensors_library_opens_it(store: Store, root: Path, layout: PageLayout) -> None:
    tokens = as_tokens([5, 6, 7, 2**31 - 1])
    (key,) = publish(store, tokens, layout=layout)
    payload = payload_of(key, len(tokens), layout)
    with safe_open(store.page_path(NAMESPACE.digest, key), framework="numpy") as file:
        assert list(file.metadata()) == ["kestrel"]
        assert set(file.keys()) == {spec.name for spec in layout.tensors(4)} | {"tokens"}
        assert file.get_tensor("tokens").tolist() == tokens.tolist()
        for index, layer in enumerate(payload):
            for name, (_, shape, data) in split(layout, layer, 4).items():
                tensor = file.get_tensor(f"layers.{index}.{name}")
                assert list(tensor.shape) == shape
                assert tensor.tobytes() == data  # the bits, so NaN counts too


def test_bytes_do_not_depend_on_when_where_or_what_for(tmp_path: Path) -> None:
    contents = []
    for number, other in enumerate(([], [1, 2, 3])):
        with open_store(tmp_path / str(number) / "elsewhere") as store:
            if other:
                publish(store, as_tokens(other))
            (key,) = publish(store, as_tokens(range(10)))
            store.touch([key])
            contents.append(store.page_path(NAMESPACE.digest, key).read_bytes())
    assert contents[0] == contents[1]


def test_only_the_owner_can_read(store: Store, root: Path) -> None:
    publish(store, as_tokens(range(40)))
    for path in [root, *root.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_payload_is_aligned_and_layers_are_contiguous(store: Store) -> None:
    (key,) = publish(store, as_tokens(range(11)), layout=FLOAT)
    fd = os.open(store.page_path(NAMESPACE.digest, key), os.O_RDONLY)
    try:
        header, layout, tokens, start = read_header(fd, FLOAT)
        assert layout == FLOAT and tokens.tolist() == list(range(11)) and start % 4096 == 0
        for index, layer in enumerate(payload_of(key, 11, FLOAT)):
            assert os.pread(fd, len(layer), start + index * FLOAT.layer_nbytes(11)) == layer
            assert header.layer_digests[index] == xxhash.xxh3_128_hexdigest(layer)
    finally:
        os.close(fd)


def test_a_thousand_int8_layers_fit_the_header() -> None:
    tokens = as_tokens([1])
    namespace = Namespace.of({})
    header = PageHeader(
        namespace=namespace.digest.hex(),
        key=page_key(namespace.digest, tokens).hex(),
        parent=namespace.digest.hex(),
        first=0,
        num_tokens=1,
        prefix_sha256="0" * 64,
        layer_digests=("0" * 32,) * 1000,
    )
    layout = PageLayout(num_layers=1000, num_kv_heads=8, head_dim=128, kv_dtype="int8")
    assert len(encode_header(layout, header)) < MAX_HEADER_NBYTES


@pytest.mark.parametrize("shape", [(0, 1, 4), (1, 0, 4), (1, 1, 0), (1, 1, -4)])
def test_impossible_layouts_are_refused(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        PageLayout(*shape)


def test_no_other_file_is_left(store: Store, root: Path) -> None:
    publish(store, as_tokens(range(40)))
    names = {path.name for path in all_files(root) if path.suffix != ".safetensors"}
    assert names == {
        "lock",
        "identity.json",
        "catalog.sqlite3",
        "catalog.sqlite3-wal",
        "catalog.sqlite3-shm",
    }
