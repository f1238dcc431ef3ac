"""What all tests share: a DVC that keeps to temporary folders, and the default model's checkpoint."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session", autouse=True)
def _private_dvc(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep DVC's site-wide cache and its analytics out of the tests."""
    os.environ["DVC_SITE_CACHE_DIR"] = str(tmp_path_factory.mktemp("dvc-site-cache"))
    os.environ["DVC_NO_ANALYTICS"] = "1"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's GGUF file, fetched once into artifacts/models."""
    from kestrel.config import load_config
    from kestrel.models.fetch import fetch_declared

    return fetch_declared(load_config([f"model.root={ROOT / 'artifacts' / 'models'}"]).model)
