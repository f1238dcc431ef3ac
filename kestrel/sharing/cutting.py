"""Artifacts of a page's first tokens: a prefix that ends inside a longer page gets a last page of its own."""

from typing import Any

import numpy as np
import numpy.typing as npt

from kestrel.identity import Namespace, page_key
from kestrel.store.layout import PageLayout
from kestrel.store.match import PageRef
from kestrel.store.store import Store

ITEMS: dict[str, np.dtype[Any]] = {"F32": np.dtype(np.float32), "I8": np.dtype(np.int8)}


def cut_layer(
    layout: PageLayout, layer: npt.NDArray[np.uint8], num_tokens: int, num_kept: int
) -> npt.NDArray[np.uint8]:
    """The bytes (uint8) of a layer of a page, cut to its first `num_kept` tokens."""
    parts = []
    at = 0
    for name, dtype, shape, nbytes in layout.layer_tensors(0, num_tokens):
        rows = layer[at : at + nbytes].view(ITEMS[dtype]).reshape(shape)
        kept = rows[:, :num_kept] if name.endswith(".v") else rows[..., :num_kept]
        parts.append(np.ascontiguousarray(kept).view(np.uint8).reshape(-1))
        at += nbytes
    return np.concatenate(parts)


def save_cut(store: Store, ref: PageRef, layout: PageLayout, prefix_sha256: str) -> bytes:
    """Save the matched part of a partly used page as an artifact of its own; returns its key.

    `prefix_sha256` covers all tokens up to the match's end. Raises ArtifactError or StoreError.
    """
    identity = store.load_identity(ref.namespace)
    with store.open_page(ref, layout) as page:
        tokens = page.tokens[: ref.num_used]
        buffer = np.empty(page.layer_nbytes, np.uint8)
        payload = []
        for layer in range(layout.num_layers):
            page.read_layer_into(layer, buffer)
            payload.append(cut_layer(layout, buffer, ref.num_tokens, ref.num_used))
    key = page_key(ref.parent, tokens)
    store.publish(
        Namespace(ref.namespace), identity, layout, key, ref.parent, ref.first, tokens, prefix_sha256, payload
    )
    return key
