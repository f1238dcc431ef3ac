"""What the stages share: their configuration, the folders of their cell, and how they fail."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from kestrel.bench.records import Cell, cell_of
from kestrel.config import Config, from_omegaconf
from kestrel.errors import KestrelError

BENCH = Path("artifacts/bench")
CONF = str(Path("conf").absolute())  # stages run at the root of a work tree, and dvc.yaml names its files


@contextmanager
def stage(cfg: DictConfig) -> Iterator[Config]:
    """The checked configuration; an expected failure inside ends the process with one message and exit code 1."""
    GlobalHydra.instance().clear()  # this app is composed; a step may compose the words for its servers
    try:
        yield from_omegaconf(cfg)
    except KestrelError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def model_choice() -> str:
    """The file of conf/model that this run chose."""
    choice: str = HydraConfig.get().runtime.choices["model"]
    return choice


def cell(config: Config) -> Cell:
    """Where this run's cell keeps its files."""
    return cell_of(BENCH, model_choice(), config.bench.context_tokens, config.engine.kv)
