"""Whether a token's result depends on anything but its prefix, tried out on one model and one CPU.

Processes of their own compute one prompt in every way a server may come to compute it (in steps of any size, beside
strangers, token by token, restored from a real store, on another number of threads, after a restart) and print
digests of the bits: every row of K and V, and the logits of the last rows. `check` compares them and says which
guarantees hold. The interpreter of those processes can be an emulator's, so that other CPUs are tried the same way.
"""

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kestrel.config import Config
from kestrel.errors import KestrelError
from kestrel.exactness.ways import Observation, Trial

_CHILD = "from kestrel.exactness.ways import answer_stdin; answer_stdin()"


@dataclass(frozen=True)
class Guarantee:
    """One promise and for which KV dtypes it was kept. `text` says what was compared."""

    name: str
    text: str
    kept: dict[str, bool]  # by KV dtype
    problem: str = ""  # what was found instead, where it was not kept

    @property
    def holds(self) -> bool:
        """Whether it was kept everywhere."""
        return all(self.kept.values())


# The ways a first process tries, and what each of them promises.
WAYS = {
    "split": "computed in odd steps of 1 to 77 tokens",
    "strangers": "computed in one step with other sequences",
    "decoded": "continued token by token behind what is in memory",
    "restored at a page boundary": "restored from disk up to a page boundary",
    "restored inside a page": "restored from disk up to the middle of a page",
    "restored but for one": "restored from disk but for the last token",
    "restored one token": "restored from disk up to its first token",
}


def check(
    config: Config,
    interpreter: Sequence[str] = (sys.executable,),
    environment: Mapping[str, str] | None = None,
    *,
    splits: int = 1,
    store: Path | None = None,
) -> Iterator[Guarantee]:
    """Try the model, weights and threads of `config` with both KV dtypes; yield the guarantees, kept or not.

    interpreter: the command that runs Python, e.g. an emulator and its Python. store: where the pages go, to be kept;
    None for a temporary folder. KestrelError when a process fails.
    """
    with tempfile.TemporaryDirectory(prefix="kestrel-exactness-") as folder:
        trial = Trial(config, store or Path(folder), "all", splits)
        first = run_trial(trial, interpreter, environment)
        yield from compare_ways(first, splits)
        threads = _other_threads(next(iter(first.values())))
        other = replace(config, engine=replace(config.engine, threads=threads))
        second = run_trial(Trial(other, trial.store, "after", splits), interpreter, environment)
        yield from compare_processes(first, second)


def compare_ways(seen: Mapping[str, Observation], splits: int = 1) -> Iterator[Guarantee]:
    """The guarantees that one process can show, from its observations by KV dtype."""
    rows = {kv: int(one.facts["least_rows"]) for kv, one in seen.items()}
    kept = {kv: bool(one.facts["exact"]) for kv, one in seen.items()}
    text = f"the kernels give a row the same bits in steps of {max(rows.values())} rows or more"
    yield Guarantee("kernels", text, kept, "the start-up check found no number of rows from which they do")
    for way, text in WAYS.items():
        kept, problems = {}, []
        for kv, one in seen.items():
            short = way == "restored one token"
            found, whole = one.digests[way], one.digests["short" if short else "whole"]
            kept[kv] = found == whole
            if not kept[kv]:
                problems.append(f"{kv} KV: bits differ from those of one whole step")
        if way in ("split", "strangers"):
            text += f" ({splits} ways)" if splits > 1 else ""
        yield Guarantee(way, text, kept, "; ".join(problems))


def compare_processes(
    first: Mapping[str, Observation], second: Mapping[str, Observation]
) -> Iterator[Guarantee]:
    """The guarantees that it takes a second process to show."""
    before, after = (next(iter(seen.values())).facts["threads"] for seen in (first, second))
    threads = f"{before} and on {after}" if before != after else f"{before} (there is no other number here)"
    for name, text, way in (
        ("threads", f"computed in two processes, on threads: {threads}", "whole"),
        ("restart", "restored in a second process from the files of the first", "restored but for one"),
    ):
        kept = {kv: second[kv].digests[way] == first[kv].digests["whole"] for kv in first}
        problem = "the second process got other bits"
        yield Guarantee(name, text, kept, "" if all(kept.values()) else problem)
    kept = {kv: second[kv].facts["probe"] == first[kv].facts["probe"] for kv in first}
    yield Guarantee(
        "probe",
        "the numerics probe is the same in both processes",
        kept,
        "the probes differ: no page is ever found",
    )


def _other_threads(seen: Observation) -> int:
    """Another number of threads than the first process had, where there is one."""
    if int(seen.facts["threads"]) > 1:
        return 1
    return min(2, len(os.sched_getaffinity(0)))


def run_trial(
    trial: Trial, interpreter: Sequence[str], environment: Mapping[str, str] | None = None
) -> dict[str, Observation]:
    """What one process sees, by KV dtype. environment: added to this process's own. KestrelError when it fails."""
    done = subprocess.run(
        [*interpreter, "-c", _CHILD],
        input=pickle.dumps(trial),
        capture_output=True,
        env=None if environment is None else {**os.environ, **environment},
    )
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise KestrelError(
            f"the exactness check failed in its own process (exit code {done.returncode}): "
            f"{' | '.join(lines[-3:]) or 'it printed nothing'}"
        )
    seen = [Observation(**json.loads(line)) for line in done.stdout.decode().splitlines()]
    return {one.kv: one for one in seen}
