"""What a configuration stands for on this machine: the store it describes, and whether its model is here."""

from pathlib import Path

from kestrel.config import CacheConfig, ModelConfig
from kestrel.store.store import Limits, Store


def configured_store(cache: CacheConfig) -> Store:
    """The store a configuration describes, not opened yet; nothing is touched on disk."""
    limits = Limits(
        max_bytes=cache.max_bytes,
        max_files=cache.max_files,
        max_tokens=cache.max_tokens,
        min_free_bytes=cache.min_free_bytes,
        ttl_seconds=cache.ttl_seconds,
        write_bytes_per_hour=cache.write_bytes_per_hour,
    )
    return Store(Path(cache.root), limits)


def is_at_hand(model: ModelConfig) -> bool:
    """Whether the configured checkpoint can be opened without fetching anything."""
    declared = model.declared
    if model.path is not None:
        return True
    if declared is None or (declared.wheel is None and declared.random_seed is None):
        return False
    return declared.wheel is None or (Path(model.root) / Path(declared.wheel.member).name).is_file()
