"""How listing, looking up and DVC's own commands grow with the number of published pages.

The pages are made up and small; git, DVC and the repositories are real: pages are published with `kestrel kv publish`,
committed and cloned. What DVC takes depends on the number of `.dvc` files, not on the size of what they name.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from kestrel.bench.measures.result import Column, Lines, Observation, Result, Row, Target, median
from kestrel.bench.measures.setting import log_line
from kestrel.bench.measures.synthetic import SyntheticStore, write_store
from kestrel.bench.records import BenchError
from kestrel.config import Config
from kestrel.sharing.listing import Listing
from kestrel.store.census import TICK_NS
from kestrel.store.store import Limits, Store

SIZES = (10, 1_000, 2_000)
MOST_FOR_DVC = 1_000  # quick: more pages are listed and looked up only
COLUMNS = (
    Column("pages", "pages", "{:,}"),
    Column("publish_ms", "publish, ms a page", "{:.1f}"),
    Column("list_s", "kv ls --published, s", "{:.2f}"),
    Column("look_ms", "look again, ms", "{:.2f}"),
    Column("follow_ms", "find, ms", "{:.3f}"),
    Column("status_s", "dvc status, s", "{:.2f}"),
    Column("repro_s", "dvc repro, s", "{:.2f}"),
    Column("outer_status_s", "subrepo: dvc status, s", "{:.2f}"),
    Column("outer_repro_s", "dvc repro, s", "{:.2f}"),
)
KESTREL = (sys.executable, "-m", "kestrel", "kv")
DVC = (sys.executable, "-m", "dvc")
STATUS, REPRO = (*DVC, "status", "--quiet"), (*DVC, "repro", "--quiet")
NUM_LOOKS = 20
# As in Kestrel's own repository.
IGNORED = "/kv/**\n!/kv/**/\n!/kv/**/*.dvc\n"
STAGE = (
    "stages:\n  nothing:\n    cmd: echo done > done.txt\n    outs:\n    - done.txt:\n        cache: false\n"
)


def run(config: Config, out: Path, full: bool = False) -> Result:
    """10 and 1,000 pages, and 2,000 to be listed. Full: DVC's commands with 2,000 too. The model does not matter."""
    observation = Observation(out)
    folder = out / "boards"
    rows = []
    for size in SIZES:
        with_dvc = full or size <= MOST_FOR_DVC
        rows.append(measure_size(folder, size, config.bench.repeats, with_dvc))
    few, many, most = rows
    targets = [
        Target(f"kv ls --published of {most['pages']:,} in a clone without data, s", most["list_s"], 1.0),
        Target(f"dvc status with {many['pages']:,}, s", many["status_s"], 3.0),
        Target(
            f"dvc repro with {many['pages']:,}, more than with 10, s", many["repro_s"] - few["repro_s"], 2.0
        ),
        Target(f"dvc status around a subrepo of {many['pages']:,}, s", many["outer_status_s"], 3.0),
        Target(
            f"dvc repro around a subrepo of {many['pages']:,}, more than with 10, s",
            many["outer_repro_s"] - few["outer_repro_s"],
            2.0,
        ),
    ]

    def curve(key: str, factor: float = 1.0) -> list[tuple[float, float]]:
        return [(row["pages"], row[key] * factor) for row in rows if row[key] is not None]

    commands = {
        "dvc status": curve("status_s"),
        "dvc repro": curve("repro_s"),
        "dvc status, subrepo": curve("outer_status_s"),
        "kv ls --published": curve("list_s"),
    }
    server = {"look again": curve("look_ms"), "find": curve("follow_ms")}
    panels = (
        Lines("Commands", "published pages", "s", commands),
        Lines("In a server", "published pages", "ms", server),
    )
    settings = {"repeats": config.bench.repeats, "cases": "all" if full else "quick"}
    notes = (
        "commands: from start to end of their process, the files in the page cache; repro has nothing to do",
        "find: the published pages of one prompt, without data; look again: nothing changed since the last time",
        "subrepo: the pages lie in a DVC repository of their own, inside the one whose commands are timed",
    )
    return observation.publish(
        Result("published", "Many published pages", settings, COLUMNS, rows, targets, panels, notes)
    )


def measure_size(folder: Path, num_pages: int, repeats: int, with_dvc: bool) -> Row:
    """Everything about so many published pages; `folder` is made and removed."""
    shutil.rmtree(folder, ignore_errors=True)
    board = Repositories(folder / "board")
    board.init()
    seconds, made = board.publish("artifacts/kv", num_pages)
    board.commit()
    clone = Repositories(folder / "clone")
    board.run("git", "clone", "--quiet", ".", str(clone.root))
    listing = (*KESTREL, "ls", "--published", "cache.root=artifacts/kv")
    row: Row = {
        "pages": num_pages,
        "publish_ms": seconds / num_pages * 1e3,
        "list_s": clone.seconds(listing, repeats),
        **_look(clone.root / "artifacts" / "kv", made),
        **dict.fromkeys(("status_s", "repro_s", "outer_status_s", "outer_repro_s")),
    }
    if with_dvc:
        row |= {"status_s": board.seconds(STATUS, repeats), "repro_s": board.seconds(REPRO, repeats)}
        outer = Repositories(folder / "outer")
        outer.init("shared")
        outer.publish("shared/artifacts/kv", num_pages)
        outer.commit()
        row |= {
            "outer_status_s": outer.seconds(STATUS, repeats),
            "outer_repro_s": outer.seconds(REPRO, repeats),
        }
    shutil.rmtree(folder)
    return row


def _look(root: Path, made: SyntheticStore) -> Row:
    """What a server does in a clone without data: look for what is new, and find the pages of a prompt."""
    listing = Listing(root).refresh()
    if len(listing.pages) != made.num_pages:
        raise BenchError(f"published {made.num_pages} pages, the clone lists {len(listing.pages)}")
    time.sleep(2 * TICK_NS / 1e9)  # folders that have only just changed are listed again
    listing.refresh()
    looking = [_seconds(listing.refresh) for _ in range(NUM_LOOKS)]
    namespace = made.namespace.digest
    prompts = [made.sessions[number % len(made.sessions)] for number in range(NUM_LOOKS)]
    finding = [_seconds(partial(listing.follow, namespace, prompt)) for prompt in prompts]
    return {"look_ms": median(looking) * 1e3, "follow_ms": median(finding) * 1e3}


class Repositories:
    """A git repository with a DVC repository and a stage, perhaps another DVC repository inside it."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._environment = os.environ | {
            "DVC_NO_ANALYTICS": "1",
            "DVC_SITE_CACHE_DIR": str(self.root.with_name(f"{root.name}-site")),
            "GIT_CONFIG_GLOBAL": os.devnull,
        }

    def init(self, subrepo: str | None = None) -> None:
        """Make it; `subrepo`: the folder of the inner one."""
        self.root.mkdir(parents=True)
        self.run("git", "init", "--quiet")
        self.run(*DVC, "init", "--quiet")
        inner = self.root
        if subrepo is not None:
            inner = self.root / subrepo
            inner.mkdir()
            self.run(*DVC, "init", "--quiet", "--subdir", folder=inner)
        self.run(*DVC, "config", "cache.type", "reflink,hardlink,symlink,copy", folder=inner)
        (inner / "artifacts").mkdir()
        (inner / "artifacts" / ".gitignore").write_text(IGNORED)
        (self.root / "dvc.yaml").write_text(STAGE)
        self.run(*REPRO)

    def publish(self, store: str, num_pages: int) -> tuple[float, SyntheticStore]:
        """Make pages and publish them; the seconds that publishing took."""
        log_line(f"published: publishing {num_pages:,} pages in {store}")
        made = write_store(self.root / store, num_pages)
        with Store(made.root, Limits()) as opened:
            ends = [page.key.hex() for page in opened.list_pages() if not page.num_children]
        publish = (*KESTREL, "publish", *ends, f"cache.root={store}", "cache.min_free_bytes=0")
        return _seconds(lambda: self.run(*publish)), made

    def commit(self) -> None:
        """Commit everything."""
        author = ("-c", "user.name=bench", "-c", "user.email=bench@example.invalid")
        self.run("git", "add", "--all")
        self.run("git", *author, "commit", "--quiet", "--message", "published pages")

    def seconds(self, command: Sequence[str], repeats: int) -> float:
        """Median seconds of a command that has been run once before."""
        self.run(*command)
        return median([_seconds(lambda: self.run(*command)) for _ in range(repeats)])

    def run(self, *command: str, folder: Path | None = None) -> None:
        """Run a command at the root or in another folder. BenchError."""
        done = subprocess.run(
            command, cwd=folder or self.root, env=self._environment, capture_output=True, text=True
        )
        if done.returncode:
            raise BenchError(f"{' '.join(command[:6])} failed: {done.stderr.strip()[-500:]}")


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
