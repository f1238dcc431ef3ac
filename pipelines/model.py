"""Stage `model`: fetch a checkpoint and convert its weights."""

import hydra
from omegaconf import DictConfig

from kestrel.bench.experiment import prepare_model
from pipelines.stage import BENCH, CONF, model_choice, stage


@hydra.main(version_base="1.3", config_path=CONF, config_name="config")
def main(cfg: DictConfig) -> None:
    """Run the stage."""
    with stage(cfg) as config:
        prepare_model(config, BENCH / "records" / f"{model_choice()}.json")


if __name__ == "__main__":
    main()
