"""What a measurement was made on: the facts a reader needs to compare two of them."""

import importlib.metadata
import os
import platform
import time
from pathlib import Path

from kestrel import __version__
from kestrel.bench.process import drop_from_page_cache
from kestrel.bench.records import Machine

# Instructions that the kernels profit from, as /proc/cpuinfo spells them.
_USEFUL_FLAGS = {
    "x86_64": ("avx2", "fma", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8"),
    "aarch64": ("asimd", "asimddp", "i8mm", "sve", "bf16"),
}
_PROBE_BYTES = 64 * 2**20  # written and read once to measure the disk
_BLOCK_BYTES = 2**20


def describe_machine(folder: Path) -> Machine:
    """Describe this machine; the disk is the one that holds `folder`, measured with a 64 MiB file."""
    read, write = measure_disk(folder)
    return Machine(
        cpu=_cpu_name(),
        instructions=" ".join(instructions()) or "no extras",
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        os=f"{_distribution()}, {platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        onnxruntime=importlib.metadata.version("onnxruntime"),
        numba=importlib.metadata.version("numba"),
        kestrel=__version__,
        disk_read_mb_s=read,
        disk_write_mb_s=write,
    )


def measure_disk(folder: Path) -> tuple[float, float]:
    """(read, write) in MB/s: one file written and synced, dropped from the page cache, and read back."""
    path = folder / f".disk-probe-{os.getpid()}"
    block = os.urandom(_BLOCK_BYTES)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        started = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            for _ in range(_PROBE_BYTES // _BLOCK_BYTES):
                file.write(block)
            os.fsync(file.fileno())
        written = time.perf_counter()
        drop_from_page_cache([path])
        reading = time.perf_counter()
        with path.open("rb", buffering=0) as file:
            while file.read(_BLOCK_BYTES):
                pass
        ended = time.perf_counter()
    finally:
        path.unlink(missing_ok=True)
    megabytes = _PROBE_BYTES / 1e6
    return round(megabytes / (ended - reading)), round(megabytes / (written - started))


def busy_share(seconds: float = 0.5) -> float:
    """Share of all processors' time, 0 to 1, that was not idle over the next `seconds`; the caller sleeps meanwhile."""
    before = _processor_times()
    time.sleep(seconds)
    idle, total = (now - then for now, then in zip(_processor_times(), before, strict=True))
    return 1 - idle / total if total else 0.0


def _processor_times() -> tuple[int, int]:
    """(idle, all) ticks since boot, waiting for the disk counted as idle."""
    fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return fields[3] + fields[4], sum(fields)


def instructions() -> list[str]:
    """The instructions of this CPU that the kernels profit from, as /proc/cpuinfo spells them."""
    fields = cpuinfo()
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return [flag for flag in _USEFUL_FLAGS.get(platform.machine(), ()) if flag in flags]


def cpuinfo() -> dict[str, str]:
    """Fields of the first processor in /proc/cpuinfo; empty where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    first = text.split("\n\n")[0]
    return {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())
    }


def _cpu_name() -> str:
    """The board's or the processor's name, as the kernel knows it."""
    board = Path("/proc/device-tree/model")  # ARM boards: "Radxa ROCK 5B"
    if board.is_file():
        return board.read_text(errors="replace").strip("\0\n ")
    return cpuinfo().get("model name") or platform.processor() or platform.machine()


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
    except OSError:
        return platform.system()
