"""Stage `prompts`: build the conversation of one cell."""

import hydra
from omegaconf import DictConfig

from kestrel.bench.experiment import write_first_prompt
from pipelines.stage import CONF, cell, stage


@hydra.main(version_base="1.3", config_path=CONF, config_name="config")
def main(cfg: DictConfig) -> None:
    """Run the stage."""
    with stage(cfg) as config:
        write_first_prompt(config, cell(config))


if __name__ == "__main__":
    main()
