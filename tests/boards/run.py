"""Try exactness on CPUs that are not here, under qemu-user: an AVX2 machine and the Cortex-A76 of an RK3588.

`make exact-boards` runs it; --boards and --recipes try a part.

For every board: the kernels alone, beside this machine's; then the whole matrix of kestrel.exactness on a tiny
checkpoint with float32, int8 and int4 weights; then the page files the board wrote, read here. Prints a report,
also into outputs/exact-boards.md; exit code 1 if a bit differs that must not.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kestrel.config import Config, load_config
from kestrel.exactness.guarantees import Guarantee, compare_processes, compare_ways, run_trial
from kestrel.exactness.ways import PAGE_TOKENS, PROMPT_TOKENS, Observation, Trial, prompt_of
from kestrel.runtime import Runtime

ROOT = Path(__file__).parent.parent.parent
KERNELS = Path(__file__).parent / "kernels.py"
REPORT = ROOT / "outputs" / "exact-boards.md"
RECIPES = ("float32", "int8", "int4")
MODEL = (
    "llama"  # the tiny checkpoint: grouped heads, scaled rotary embedding; no norms, so no further kernels
)
SPLITS = 4
Seen = dict[str, Observation]  # by KV dtype


@dataclass(frozen=True)
class Board:
    """A CPU to try, and how Python is run on it."""

    name: str
    interpreter: tuple[str, ...]
    environment: dict[str, str]

    def kernels(self) -> dict[str, dict[str, object]]:
        """What kernels.py prints there."""
        done = subprocess.run(
            [*self.interpreter, str(KERNELS)],
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"{self.name}: kernels.py failed: {done.stderr.strip()[-2000:]}")
        result: dict[str, dict[str, object]] = json.loads(done.stdout)
        return result


def boards(aarch64: Path) -> dict[str, Board]:
    """The emulated ones; each keeps its compiled kernels beside the aarch64 environment."""
    root = aarch64 / "root"

    def environment(name: str, path: str) -> dict[str, str]:
        return {"PYTHONPATH": path, "XDG_CACHE_HOME": str(aarch64 / f"cache-{name}")}

    return {
        "haswell": Board(
            "Haswell (AVX2)",
            ("qemu-x86_64", "-cpu", "Haswell", sys.executable),
            environment("haswell", str(ROOT)),
        ),
        "cortex-a76": Board(
            "Cortex-A76 (NEON)",
            ("qemu-aarch64", "-cpu", "cortex-a76", "-L", str(root), str(root / "usr/bin/python3.11")),
            environment("cortex-a76", f"{ROOT}:{aarch64 / 'site'}"),
        ),
    }


class Run:
    """One run over all boards: what is printed, and what failed."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.lines: list[str] = []
        self.started = time.perf_counter()

    def say(self, line: str = "") -> None:
        print(line, flush=True)
        self.lines.append(line)

    def require(self, good: bool, what: str) -> str:
        """Note a failure; "ok" or "FAILED" for the report."""
        if not good:
            self.failures.append(what)
        return "ok" if good else "FAILED"

    def compare_kernels(self, here: Board, there: list[Board]) -> None:
        """The table of kernels; attention must have the same bits everywhere."""
        results = {board.name: board.kernels() for board in (here, *there)}
        own = results[here.name]
        self.say("## Kernels\n")
        for name, result in results.items():
            facts = result["facts"]
            self.say(f"- {name}: {facts['cpu']}, {facts['seconds']:.0f} s with compiling")
        self.say(
            "\nBits equal to this machine's, and the rows from which on a GEMM's row has the same bits.\n"
        )
        self.say(f"| kernel | {' | '.join(board.name for board in there)} | least rows, here first |")
        self.say(f"|---|{'---|' * len(there)}---|")
        for kernel, digest in own["digests"].items():
            equal = [results[board.name]["digests"][kernel] == digest for board in there]
            least = [result["least_rows"].get(kernel) for result in results.values()]
            is_gemm = kernel in own["least_rows"]
            self.say(
                f"| {kernel} | {' | '.join('equal' if same else 'differs' for same in equal)} | "
                f"{', '.join(str(rows) for rows in least) if is_gemm else ''} |"
            )
            if kernel.startswith("attention"):
                self.require(all(equal), f"{kernel}: bits differ between CPUs")
            if is_gemm:
                self.require(
                    None not in least, f"{kernel}: a row depends on its company at any number of rows"
                )
        self.say()

    def try_board(self, board: Board, here: Board, recipes: Sequence[str], folder: Path) -> None:
        """The matrix on one board, then its pages here."""
        checkpoint = folder / MODEL
        shutil.copytree(ROOT / "tests" / "oracle" / MODEL, checkpoint)
        declared = json.loads((checkpoint / "config.json").read_text())
        declared["max_position_embeddings"] = 2048  # more keys than one split of the attention kernel
        (checkpoint / "config.json").write_text(json.dumps(declared))
        for recipe in recipes:
            config = load_config(
                [
                    f"model.path={checkpoint}",
                    f"model.root={folder / 'models'}",
                    f"engine={recipe}",
                    "engine.kv_ram_bytes=64MiB",
                    "engine.threads=2",
                ]
            )
            started = time.perf_counter()
            store = folder / recipe
            first, second = (
                run_trial(
                    Trial(
                        replace(config, engine=replace(config.engine, threads=threads)), store, extent, SPLITS
                    ),
                    board.interpreter,
                    board.environment,
                )
                for threads, extent in ((2, "all"), (1, "after"))
            )
            seconds = time.perf_counter() - started
            native = run_trial(Trial(config, folder / "native" / recipe, "whole"), here.interpreter)
            self.say(f"### {board.name}, {recipe} weights ({seconds:.0f} s)\n")
            self.say("| guarantee | float32 KV | int8 KV |\n|---|---|---|")
            for guarantee in self._guarantees(first, second):
                cells = [
                    self.require(kept, f"{board.name}, {recipe} weights, {kv} KV: {guarantee.text}")
                    for kv, kept in guarantee.kept.items()
                ]
                self.say(f"| {guarantee.text} | {' | '.join(cells)} |")
            self.say(f"| {self._across(first, native)} |")
            self.say(f"| page files of the board, read here | {' | '.join(self._read_here(config, store))} |")
            self.say()

    def _guarantees(self, first: Seen, second: Seen) -> Iterator[Guarantee]:
        yield from compare_ways(first, SPLITS)
        yield from compare_processes(first, second)

    def _across(self, there: Seen, here: Seen) -> str:
        """Whether the board's K, V and logits have this machine's bits; the probe must say the same."""
        cells = []
        for kv, seen in there.items():
            equal = seen.digests["whole"] == here[kv].digests["whole"]
            same_probe = seen.facts["probe"] == here[kv].facts["probe"]
            self.require(equal or not same_probe, f"{kv} KV: equal probes but other bits on two CPUs")
            cells.append(
                ("equal" if equal else "differ") + (", same namespace" if same_probe else ", own namespace")
            )
        return f"bits beside this machine's | {' | '.join(cells)}"

    def _read_here(self, config: Config, store: Path) -> list[str]:
        """Under cache.accept=portable the pages are read, under same only if the numerics are the same."""
        cells = []
        for kv in ("float32", "int8"):
            found = {}
            for accept in ("same", "portable"):
                cache = replace(
                    config.cache,
                    root=str(store / kv),
                    page_tokens=PAGE_TOKENS,
                    accept=accept,
                    load="always",
                    pull_seconds=None,
                    min_free_bytes=0,
                )
                engine = replace(config.engine, kv=kv, kv_touched_bytes=0)
                with Runtime.open(replace(config, cache=cache, engine=engine), lambda line: None) as runtime:
                    prompt = prompt_of(runtime)[:PROMPT_TOKENS]
                    sequence = runtime.cache.open(prompt.tolist(), persist=False)
                    try:
                        sequence.prefill()
                        stats = sequence.stats
                        found[accept] = (stats.restored_tokens, stats.foreign, stats.miss_reason)
                    finally:
                        sequence.close()
            portable, same = found["portable"], found["same"]
            read = portable[0] == PROMPT_TOKENS - 1
            refused = same[0] == 0 and "other numerics" in (same[2] or "")
            is_own = portable[1] is None and same[0] == portable[0]
            good = read and (refused or is_own)
            what = "its own" if is_own else "portable: read, same: refused"
            cells.append(f"{self.require(good, f'pages written elsewhere, {kv} KV: {found}')} ({what})")
        return cells


def main() -> int:
    parser = argparse.ArgumentParser(description="try exactness on emulated CPUs")
    parser.add_argument("folder", type=Path, help="the aarch64 environment that aarch64.sh made")
    parser.add_argument("--boards", nargs="+", choices=("haswell", "cortex-a76"))
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    parser.add_argument("--report", type=Path, default=REPORT)
    args = parser.parse_args()
    known = boards(args.folder.resolve())
    chosen = [known[name] for name in args.boards or known]
    for board in chosen:
        if shutil.which(board.interpreter[0]) is None:
            print(
                f"{board.interpreter[0]} is not here; on Debian: apt-get install qemu-user", file=sys.stderr
            )
            return 1
    here = Board("this machine", (sys.executable,), {"PYTHONPATH": str(ROOT)})
    run = Run()
    run.say("# Exactness on other CPUs (qemu-user)\n")
    run.compare_kernels(here, chosen)
    run.say(f"## The matrix, checkpoint {MODEL} (tiny), {SPLITS} random splits and mixes each\n")
    with tempfile.TemporaryDirectory(prefix="kestrel-boards-") as folder:
        for board in chosen:
            run.try_board(board, here, args.recipes, Path(folder) / board.name.split()[0])
    run.say(f"{time.perf_counter() - run.started:.0f} s in all")
    for failure in run.failures:
        run.say(f"FAILED: {failure}")
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text("\n".join(run.lines) + "\n", encoding="utf-8")
    print(
        f"\n{REPORT.relative_to(ROOT)}: this report\n{'failed' if run.failures else 'all boards are exact'}"
    )
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
