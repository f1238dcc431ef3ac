"""Stage `report`: ratios, table and chart of all cells that params.yaml names; fails when a promise is broken."""

import json

import hydra
from omegaconf import DictConfig, OmegaConf

from kestrel.bench.chart import draw_report
from kestrel.bench.page import render_page
from kestrel.bench.report import build_report, check_report, markdown, save_report
from pipelines.stage import BENCH, CONF, cell, stage

BOARDS = BENCH / "boards"  # report.json of other boards, copied here under any name


@hydra.main(version_base="1.3", config_path=CONF, config_name="config")
def main(cfg: DictConfig) -> None:
    """Run the stage."""
    params = OmegaConf.load("params.yaml")
    with stage(cfg):
        cells = [cell(model, context).records for model in params.models for context in params.contexts]
        report = build_report(cells)
        save_report(report, BENCH)
        draw_report(report, BENCH / "report.png")
        others = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(BOARDS.glob("*.json"))]
        (BENCH / "report.html").write_text(render_page(report, others), encoding="utf-8")
        print(f"\n{markdown(report)}\n{BENCH}: report.html, report.md, report.json, report.png, metrics.json")
        check_report(report)


if __name__ == "__main__":
    main()
