"""Stage `control`: the second prompt without a store."""

import hydra
from omegaconf import DictConfig

from kestrel.bench.experiment import run_control
from pipelines.stage import CONF, cell, stage


@hydra.main(version_base="1.3", config_path=CONF, config_name="config")
def main(cfg: DictConfig) -> None:
    """Run the stage."""
    with stage(cfg) as config:
        run_control(config, cell(config))


if __name__ == "__main__":
    main()
