"""Opening a model takes the memory of onnxruntime's packed weights, once, and little more."""

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from kestrel.engine import memory
from kestrel.engine.priority import Activity
from kestrel.engine.rope import RopeTable, rope_table
from tests.engine.conftest import EngineOf

PROGRAM = """
import re, sys
from pathlib import Path
from kestrel.engine import attention
from kestrel.engine.engine import Engine
from kestrel.models.checkpoint import open_checkpoint
from kestrel.models.geometry import Geometry, Rope
from kestrel.models.random import RandomCheckpoint
from kestrel.models.weights import load_weights

def megabytes(name):
    found = re.search(rf"^{name}: +(\\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    return int(found[1]) / 1024

geometry = Geometry(
    architecture="qwen3", num_layers=6, hidden_size=1024, num_heads=16, num_kv_heads=8, head_dim=128, ffn_size=3072,
    vocab_size=8192, context_tokens=40960, rope=Rope(1e6, 128, None), norm_eps=1e-6,
    qkv_bias=False, qk_norm=True, tied_head=True,
)
weights = load_weights(RandomCheckpoint(geometry, 0), sys.argv[1], Path(sys.argv[2]))
weights.leave_memory()
anonymous, resident = megabytes("Anonymous"), megabytes("Rss")
engine = Engine(weights, kv_dtype="float32", page_tokens=128, chunk_tokens=64, kv_ram_bytes=64 << 20)
weights.leave_memory()
print(weights.nbytes / 2**20, megabytes("Anonymous") - anonymous, megabytes("Rss") - resident)
"""


@pytest.mark.parametrize(("recipe", "packed"), [("int8", 1.2), ("int4", 1.2), ("float32", 1.0)])
def test_an_open_model_holds_its_weights_once(recipe: str, packed: float, tmp_path: Path) -> None:
    program = [sys.executable, "-c", PROGRAM, recipe, str(tmp_path)]
    stored, anonymous, resident = map(float, subprocess.check_output(program, text=True).split())
    assert anonymous < packed * stored + 64  # the kernels, the probe and buffers take 45
    assert resident < anonymous + 64  # 42 of code: the converted file is not in memory


def test_the_rotary_table_is_the_same_however_far_it_is_filled_at_a_time(engine_of: EngineOf) -> None:
    geometry = engine_of("llama", "int8", "float32").geometry
    whole = rope_table(geometry, 0, 5000)
    table = RopeTable(geometry, 5000)
    for positions in (1, 1, 2048, 2049, 4999, 5000):
        table.reach(positions)
        for found, expected in zip((table.cosine, table.sine), whole, strict=True):
            assert (found[:positions].view(np.int32) == expected[:positions].view(np.int32)).all()


def test_no_memory_is_moved_for_an_engine_that_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another engine of the process may compute by then, and its page faults would wait."""
    movers: list[threading.Thread] = []  # those of other tests' engines may be at work too

    def advise(*_: int) -> bool:
        movers.append(threading.current_thread())
        return True

    monkeypatch.setattr(memory, "advise", advise)
    activity, others = Activity(), set(threading.enumerate())
    with activity:
        with memory.heap_in_huge_pages(activity):
            block = np.ones(4 * memory._HUGE_PAGE, np.uint8)
        activity.end()
    (mover,) = set(threading.enumerate()) - others
    mover.join(30)
    assert not mover.is_alive()
    assert mover not in movers
    assert block.all()
