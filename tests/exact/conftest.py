"""The tiny checkpoints' engines, shared with the tests of the engine."""

from tests.engine.conftest import engine_of

__all__ = ["engine_of"]
