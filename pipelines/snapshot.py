"""Stage `snapshot`: the first session, from an empty store to SIGKILL."""

import hydra
from omegaconf import DictConfig

from kestrel.bench.experiment import run_first_session
from pipelines.stage import CONF, cell, stage


@hydra.main(version_base="1.3", config_path=CONF, config_name="config")
def main(cfg: DictConfig) -> None:
    """Run the stage."""
    with stage(cfg) as config:
        run_first_session(config, cell(config))


if __name__ == "__main__":
    main()
