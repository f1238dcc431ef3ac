"""Between `.kv` snapshots and pages of the store."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kestrel.errors import ArtifactError, StoreError
from kestrel.identity import Namespace, as_tokens, page_key, prefix_sha256
from kestrel.seed.vlkv import Rows, Shape, Snapshot, encode_head, encode_layer, file_name
from kestrel.store.artifact import OpenPage
from kestrel.store.files import FileTree
from kestrel.store.layout import PageLayout
from kestrel.store.match import PageRef
from kestrel.store.store import Store

ITEMS: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "I8": np.dtype("i1")}

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)


@dataclass(frozen=True)
class Imported:
    """Where an imported snapshot went."""

    namespace: Namespace
    keys: list[bytes]
    num_tokens: int
    nbytes: int


def imported_identity(identity: Mapping[str, Any], version: int) -> dict[str, Any]:
    """The identity of imported pages: that of their model, with a provenance instead of this CPU's numerics.

    So they have a namespace of their own, related to the model's: read under cache.accept=portable only.
    """
    numerics = {"exact": False, "imported": f"kv-version-{version}", "probe": "imported"}
    return {**identity, "numerics": numerics}


def check_fit(shape: Shape, identity: Mapping[str, Any]) -> None:
    """ArtifactError if a snapshot cannot belong to a model: its shape, the type of its values."""
    model = identity["model"]
    expected = (model["num_layers"], model["num_kv_heads"], model["head_dim"], identity["kv"]["dtype"])
    found = (shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.kv_dtype)
    for name, wanted, value in zip(
        ("layers", "KV heads", "head_dim", "KV type"), expected, found, strict=True
    ):
        if wanted != value:
            hint = f"; choose engine.kv={value}" if name == "KV type" else ""
            raise ArtifactError(f"the snapshot has {name} {value}, the model {wanted}{hint}")


def import_snapshot(
    store: Store, snapshot: Snapshot, identity: Mapping[str, Any], page_tokens: int, progress: Progress
) -> Imported:
    """Save a snapshot as pages of the model with this identity, under their provenance.

    Raises ArtifactError if it does not fit the model or holds values that are no numbers; StoreError.
    """
    shape = snapshot.shape
    check_fit(shape, identity)
    vocabulary = identity["model"]["vocab_size"]
    if not (0 <= int(snapshot.tokens.min()) and int(snapshot.tokens.max()) < vocabulary):
        raise ArtifactError(f"{snapshot.path}: token ids must be in [0, {vocabulary}): another model's")
    own = imported_identity(identity, shape.version)
    namespace = Namespace.of(own)
    layout = PageLayout(
        shape.num_layers, shape.num_kv_heads, shape.head_dim, "float32" if shape.version == 1 else "int8"
    )
    keys: list[bytes] = []
    parent, nbytes = namespace.digest, 0
    for first in range(0, shape.num_tokens, page_tokens):
        end = min(first + page_tokens, shape.num_tokens)
        tokens = as_tokens(snapshot.tokens[first:end])
        key = page_key(parent, tokens)
        payload = [_encode_rows(snapshot.rows(layer, first, end)) for layer in range(shape.num_layers)]
        digest = prefix_sha256(snapshot.tokens[:end])
        nbytes += store.publish(namespace, own, layout, key, parent, first, tokens, digest, payload)
        keys.append(key)
        parent = key
        progress(shape.payload_start + shape.num_layers * end * shape.token_nbytes, shape.file_nbytes)
    return Imported(namespace, keys, shape.num_tokens, nbytes)


def export_snapshot(store: Store, key: bytes, folder: Path, progress: Progress) -> tuple[Path, int, bool]:
    """Write the prefix that ends with a page as a `.kv` file into a folder: version 1 for float32 KV, 2 for int8.

    Returns the path, the bytes of the file, and whether it was written now: one that is there already is left alone,
    as its name stands for its tokens. Raises StoreError or ArtifactError.
    """
    chain = store.chain(key)
    tokens = as_tokens(store.prefix_tokens(key))
    identity = store.load_identity(chain[0].namespace)
    model = identity["model"]
    layout = PageLayout(
        model["num_layers"], model["num_kv_heads"], model["head_dim"], identity["kv"]["dtype"]
    )
    shape = Shape(
        1 if layout.kv_dtype == "float32" else 2,
        layout.num_layers,
        layout.num_kv_heads,
        layout.head_dim,
        len(tokens),
    )
    refs = [
        PageRef(
            key=row.key,
            parent=row.parent,
            first=row.first,
            num_tokens=row.num_tokens,
            num_used=row.num_tokens,
            path=store.page_path(row.namespace, row.key),
            nbytes=row.nbytes,
            namespace=row.namespace,
            token_bytes=tokens[row.first : row.first + row.num_tokens].tobytes(),
            prefix_sha256=prefix_sha256(tokens[: row.first + row.num_tokens]),
        )
        for row in chain
    ]
    with ExitStack() as stack:
        stack.enter_context(store.protect([ref.key for ref in refs]))
        pages = [stack.enter_context(store.open_page(ref, layout)) for ref in refs]

        def chunks() -> Iterator[bytes]:
            yield encode_head(shape, tokens)
            for layer in range(shape.num_layers):
                yield from encode_layer(shape, _read_rows(layout, pages, layer))
                progress(shape.payload_start + (layer + 1) * shape.layer_nbytes, shape.file_nbytes)

        tree = FileTree(folder)
        try:
            tree.create_root()
            written = tree.publish_file((file_name(tokens),), chunks())
        except OSError as error:
            raise StoreError(f"cannot write into {folder}: {error}") from error
    return folder / file_name(tokens), shape.file_nbytes, written


def _encode_rows(rows: Rows) -> npt.NDArray[np.uint8]:
    """The bytes of a layer of a page, in the order of PageLayout."""
    parts: list[npt.NDArray[Any]] = [rows.k.transpose(1, 2, 0), rows.v.transpose(1, 0, 2)]
    if rows.k_scale is not None and rows.v_scale is not None:
        parts = [parts[0], rows.k_scale.T, parts[1], rows.v_scale.T]
    return np.concatenate([np.ascontiguousarray(part).view(np.uint8).reshape(-1) for part in parts])


def _read_rows(layout: PageLayout, pages: list[OpenPage], layer: int) -> Rows:
    """One layer of all pages, as rows."""
    parts: dict[str, list[npt.NDArray[Any]]] = {}
    for page in pages:
        buffer = np.empty(page.layer_nbytes, np.uint8)
        page.read_layer_into(layer, buffer)
        at = 0
        for name, dtype, shape, nbytes in layout.layer_tensors(layer, page.header.num_tokens):
            values = buffer[at : at + nbytes].view(ITEMS[dtype]).reshape(shape)
            part = name.rpartition(".")[2]
            order = {"k": (2, 0, 1), "v": (1, 0, 2)}.get(part, (1, 0))
            parts.setdefault(part, []).append(values.transpose(order))
            at += nbytes
    whole = {part: np.concatenate(values) for part, values in parts.items()}
    return Rows(whole["k"], whole["v"], whole.get("k_scale"), whole.get("v_scale"))
