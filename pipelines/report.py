"""Stage `report`: ratios, tables and charts of all cells that params.yaml names; fails when a promise is broken."""

from itertools import product

import hydra
from omegaconf import DictConfig, OmegaConf

from kestrel.bench.chart import draw_breakdown, draw_report
from kestrel.bench.page import load_board, render_page
from kestrel.bench.records import cell_of
from kestrel.bench.report import build_report, check_report, markdown, save_report
from pipelines.stage import BENCH, CONF, stage

BOARDS = BENCH / "boards"  # report.json of other boards, copied here under any name


@hydra.main(version_base="1.3", config_path=CONF, config_name="config")
def main(cfg: DictConfig) -> None:
    """Run the stage."""
    params = OmegaConf.load("params.yaml")
    with stage(cfg):
        matrix = product(params.models, params.contexts, params.kv)
        report = build_report([cell_of(BENCH, model, context, kv) for model, context, kv in matrix])
        save_report(report, BENCH)
        draw_report(report, BENCH / "report.png")
        draw_breakdown(report, BENCH / "breakdown.png")
        others = [load_board(path) for path in sorted(BOARDS.glob("*.json"))]
        (BENCH / "report.html").write_text(render_page(report, others), encoding="utf-8")
        files = "report.html, report.md, report.json, report.png, breakdown.png, metrics/"
        print(f"\n{markdown(report)}\n{BENCH}: {files}")
        check_report(report)


if __name__ == "__main__":
    main()
