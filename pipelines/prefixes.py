"""Stage `prefixes`: the declared prefixes, computed where neither the store nor the remote has them."""

import json
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from kestrel.preparation import prepare
from kestrel.runtime import Runtime
from pipelines.stage import CONF, model_choice, stage

PREFIXES = Path("artifacts/prefixes")


@hydra.main(version_base="1.3", config_path=CONF, config_name="config")
def main(cfg: DictConfig) -> None:
    """Run the stage. The output lists page keys; the pages themselves are in the store, where they can be published."""
    choice = str(HydraConfig.get().runtime.choices["prefixes"])
    with stage(cfg) as config, Runtime.open(config) as runtime:
        rows = []
        for name, prefix in config.prefixes.items():
            prepared = prepare(runtime, name, prefix)
            print(f"{name}: {prepared.num_tokens} tokens, {prepared.num_computed} of them computed now")
            keys = [key.hex() for key in prepared.keys]
            rows.append({"name": name, "tokens": prepared.num_tokens, "bytes": prepared.nbytes, "keys": keys})
        record = {
            "model": runtime.name,
            "namespace": runtime.namespace.digest.hex(),
            "identity": runtime.identity,
            "prefixes": rows,
        }
        PREFIXES.mkdir(parents=True, exist_ok=True)
        path = PREFIXES / f"{model_choice()}-{choice}.json"
        path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        print(f"{path}: next: kestrel kv publish {' '.join(config.prefixes)} prefixes={choice}")


if __name__ == "__main__":
    main()
