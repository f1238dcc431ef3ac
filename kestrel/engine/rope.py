"""The rotary embedding's table: a cosine and a sine for each position and pair of numbers."""

import numpy as np

from kestrel.models.geometry import Geometry
from kestrel.models.quantisation import Floats

_BLOCK = 2048  # positions worked out at a time


class RopeTable:
    """Cosines and sines of positions [0, n): two float32 [positions, rope.dim / 2], right up to where `reach` has come.

    A context of 40960 tokens takes 0.2 s to work out, and most sequences are short.
    """

    def __init__(self, geometry: Geometry, positions: int):
        self._geometry = geometry
        self._num_filled = 0
        half = len(geometry.rope.frequencies()[0])
        self.cosine: Floats = np.empty((positions, half), np.float32)
        self.sine: Floats = np.empty((positions, half), np.float32)

    def reach(self, positions: int) -> None:
        """Fill the table for positions [0, positions)."""
        while self._num_filled < positions:
            start, end = self._num_filled, min(self._num_filled + _BLOCK, len(self.cosine))
            self.cosine[start:end], self.sine[start:end] = rope_table(self._geometry, start, end)
            self._num_filled = end


def rope_table(geometry: Geometry, start: int, end: int) -> tuple[Floats, Floats]:
    """Cosines and sines of positions [start, end): two float32 [end - start, rope.dim / 2], worked out in float64."""
    frequencies, factor = geometry.rope.frequencies()
    angles = np.arange(start, end, dtype=np.float64)[:, None] * frequencies
    return (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(np.float32)
