"""Stage `report`: ratios, table and chart of all cells that params.yaml names; fails when a promise is broken."""

import hydra
from omegaconf import DictConfig, OmegaConf

from kestrel.bench.chart import draw_report
from kestrel.bench.report import build_report, check_report, markdown, save_report
from pipelines.stage import BENCH, CONF, cell, stage


@hydra.main(version_base="1.3", config_path=CONF, config_name="config")
def main(cfg: DictConfig) -> None:
    """Run the stage."""
    params = OmegaConf.load("params.yaml")
    with stage(cfg):
        cells = [cell(model, context).records for model in params.models for context in params.contexts]
        report = build_report(cells)
        save_report(report, BENCH)
        draw_report(report, BENCH / "report.png")
        print(f"\n{markdown(report)}\n{BENCH}: report.md, report.json, report.png, metrics.json")
        check_report(report)
        print(
            "Try next:\n"
            "  dvc metrics diff                            # these numbers beside the committed ones\n"
            "  dvc exp run -S 'contexts=[2044,4096]'       # another context length\n"
            "  kestrel bench bench.context_tokens=1024     # one cell, without DVC\n"
            f"  kestrel kv ls cache.root={cell(params.models[0], params.contexts[0]).store}   # what was restored"
        )


if __name__ == "__main__":
    main()
