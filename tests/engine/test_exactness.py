"""A row's bits depend on its prefix alone: not on chunking, neighbours, page size or the number of threads."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.conftest import TINY, EngineOf
from tests.engine.sequences import Run, random_tokens

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe", "qwen3vl")
RECIPES = ("float32", "int8", "int4")
KV_DTYPES = ("float32", "int8")

each_engine = pytest.mark.parametrize(
    "architecture, recipe, kv_dtype", [(a, r, k) for a in ARCHITECTURES for r in RECIPES for k in KV_DTYPES]
)


@each_engine
def test_any_split_of_a_prompt_gives_the_same_bits(
    engine_of: EngineOf, architecture: str, recipe: str, kv_dtype: str
) -> None:
    engine = engine_of(architecture, recipe, kv_dtype)
    tokens = random_tokens(engine, 300)
    whole = Run(engine, tokens).steps([]).bits()

    @settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.integers(1, 150), max_size=12))
    def check(counts: list[int]) -> None:
        assert Run(engine, tokens).steps(counts).bits() == whole

    check()
    assert Run(engine, tokens).steps([1] * 5 + [128, 1, 120] + [1] * 46).bits() == whole


@each_engine
def test_rows_computed_beside_strangers_have_the_bits_of_a_lone_run(
    engine_of: EngineOf, architecture: str, recipe: str, kv_dtype: str
) -> None:
    engine = engine_of(architecture, recipe, kv_dtype)
    tokens = random_tokens(engine, 290)
    alone = Run(engine, tokens).steps([]).bits()
    random = np.random.default_rng(1)
    run = Run(engine, tokens)
    strangers = [Run(engine, random_tokens(engine, 600, seed)) for seed in (2, 3)]
    while run.position < len(tokens):
        spans = [strangers[0].span(int(random.integers(1, 20))), run.span(int(random.integers(1, 60)))]
        spans.append(strangers[1].span(1))
        logits = engine.forward(spans)
        first = len(spans[0].tokens)
        run.logits.append(logits[first : first + len(spans[1].tokens)])
    for stranger in strangers:
        for page in stranger.table:
            engine.pool.release(page)
    assert run.bits() == alone


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_the_page_size_cannot_be_seen_in_the_result(engine_of: EngineOf, kv_dtype: str) -> None:
    logits = []
    for page_tokens in (128, 256, 384):
        engine = engine_of("qwen3", "int8", kv_dtype, page_tokens)
        run = Run(engine, random_tokens(engine, 700)).steps([100, 1, 37])
        logits.append(np.concatenate(run.logits).tobytes())
        run.bits()
    assert logits[0] == logits[1] == logits[2]


@pytest.mark.parametrize("architecture", ["llama", "qwen3moe"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_one_thread_and_two_threads_in_two_processes_give_the_same_bits(
    recipe: str, architecture: str, tmp_path: Path
) -> None:
    program = (
        "import sys, hashlib; from pathlib import Path\n"
        "from kestrel.engine.engine import Engine\n"
        "from kestrel.models.checkpoint import open_checkpoint\n"
        "from kestrel.models.weights import load_weights\n"
        "from tests.engine.sequences import Run, random_tokens\n"
        "path, recipe, converted, threads = sys.argv[1:]\n"
        "weights = load_weights(open_checkpoint(Path(path)), recipe, Path(converted))\n"
        "engine = Engine(weights, kv_dtype='float32', page_tokens=128, chunk_tokens=192,\n"
        "                kv_ram_bytes=64 << 20, threads=int(threads), context_tokens=1024)\n"
        "run = Run(engine, random_tokens(engine, 700)).steps([150, 150, 1, 1, 1])\n"
        "print(hashlib.sha256(run.bits()).hexdigest(), engine.numerics.digest)\n"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", program, str(TINY / architecture), recipe, str(tmp_path), threads],
            capture_output=True,
            text=True,
            check=True,
            cwd=TINY.parent.parent,
        ).stdout
        for threads in ("1", "2")
    }
    assert len(printed) == 1


@pytest.mark.parametrize("architecture", ["llama", "qwen3moe"])
def test_a_step_whose_restore_fails_computes_nothing_more_and_the_next_has_the_bits_of_a_lone_run(
    engine_of: EngineOf, architecture: str
) -> None:
    engine = engine_of(architecture, "int8", "float32")
    tokens = random_tokens(engine, 40)
    lone = Run(engine, tokens).steps([]).bits()
    for failing in range(engine.geometry.num_layers):

        def ready(layer: int, failing: int = failing) -> None:
            if layer == failing:
                raise TimeoutError

        engine.graphs._residuals[1][:] = np.nan
        run = Run(engine, tokens)
        with pytest.raises(TimeoutError):
            engine.forward([run.span(40)], ready)
        if not failing:  # the sums of later layers go to the one buffer or to the other
            assert (engine.graphs.residual[:40] == engine.weights.embed(tokens)).all()
            assert np.isnan(engine.graphs._residuals[1]).all()
        run.position = 0
        assert run.steps([]).bits() == lone
