"""Opening a model takes the memory of onnxruntime's packed weights, once, and little more."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

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
