"""What drafts from the session's own text bring: answers that repeat their prompt, and answers that repeat nothing."""

from pathlib import Path

from kestrel.bench.measures.result import (
    Bars,
    Column,
    Observation,
    Result,
    Row,
    Target,
    common_settings,
    median,
)
from kestrel.bench.measures.setting import log_line, opened, with_parts
from kestrel.config import Config
from kestrel.generation import Delta, Finished, Request
from kestrel.runtime import Runtime, Sampling

ANSWER_TOKENS = 160
LONGEST_DRAFT = 8  # where the configuration switches speculation off
LEAST_RATIO = 0.95
CROSSINGS = ("red fox", "grey heron", "brown bear", "black crow", "white hare", "green lizard")
LIST = "".join(f"{number}. the {animal} crosses the river\n" for number, animal in enumerate(CROSSINGS, 1))
TEXTS = {
    "copies": f"Repeat this list word for word, twice:\n{LIST}",
    "writes freely": "Tell me a story about a lighthouse keeper who finds a strange letter.",
}
COLUMNS = (
    Column("what", "what"),
    Column("sampling", "sampling"),
    Column("without", "tok/s without", "{:,.4g}"),
    Column("with", "tok/s with", "{:,.4g}"),
    Column("ratio", "with / without", "{:.3f}"),
    Column("guessed", "tokens guessed right", "{:.0%}"),
    Column("same", "same answer"),
)


def run(config: Config, out: Path, full: bool = False) -> Result:
    """Two prompts, greedy and (full) sampled, each answered with and without drafts in turns."""
    observation = Observation(out)
    longest = config.engine.speculate or LONGEST_DRAFT
    off = with_parts(config, cache={"enabled": False}, engine={"speculate": 0})
    on = with_parts(config, cache={"enabled": False}, engine={"speculate": longest})
    choices = {"greedy": Sampling()} | (
        {"temperature 0.8": Sampling(temperature=0.8, seed=1)} if full else {}
    )
    rows: list[Row] = []
    with opened(off) as without, opened(on) as with_it:
        name = without.name
        for what, text in TEXTS.items():
            for how, sampling in choices.items():
                log_line(f"speculate: an answer that {what}, {how}")
                rows.append(_compare(without, with_it, what, text, how, sampling, config.bench.repeats))
    labels = [f"{row['what']}, {row['sampling']}" for row in rows]
    targets = [
        Target(label, row["ratio"], LEAST_RATIO, False) for label, row in zip(labels, rows, strict=True)
    ]
    targets += [
        Target(f"{label}: same answer", float(row["same"] == "yes"), 1, False)
        for label, row in zip(labels, rows, strict=True)
    ]
    panels = [
        Bars(
            "Decode speed",
            "tokens a second",
            labels,
            {"without drafts": [row["without"] for row in rows], "with": [row["with"] for row in rows]},
        )
    ]
    return observation.publish(
        Result(
            "speculate",
            "What speculation brings",
            common_settings(config, name, full),
            COLUMNS,
            rows,
            targets,
            panels,
            (
                f"drafts of at most {longest} tokens, {ANSWER_TOKENS} answer tokens, with and without in turns",
            ),
        )
    )


def _compare(
    without: Runtime, with_it: Runtime, what: str, text: str, how: str, sampling: Sampling, repeats: int
) -> Row:
    tokens = _prompt(without, text)
    request = Request(
        tokens, min(ANSWER_TOKENS, without.context_tokens - len(tokens)), sampling, ignore_eos=True
    )
    rates: dict[Runtime, list[float]] = {without: [], with_it: []}
    answers: dict[Runtime, list[int]] = {}
    guessed = 0
    for turn in range(repeats):
        for runtime in (without, with_it) if turn % 2 else (with_it, without):
            answer, rate, accepted = _answer(runtime, request)
            rates[runtime].append(rate)
            answers[runtime] = answer
            guessed = max(guessed, accepted)
    slow, fast = median(rates[without]), median(rates[with_it])
    return {
        "what": what,
        "sampling": how,
        "without": slow,
        "with": fast,
        "ratio": fast / slow,
        "guessed": guessed / len(answers[with_it]),
        "same": "yes" if answers[without] == answers[with_it] else "no",
    }


def _prompt(runtime: Runtime, text: str) -> list[int]:
    if runtime.chat is None:
        return runtime.tokenizer.encode(text)
    return runtime.tokenizer.encode(runtime.chat.render([{"role": "user", "content": text}]))


def _answer(runtime: Runtime, request: Request) -> tuple[list[int], float, int]:
    """Tokens of an answer, tokens a second behind the first one, and how many were guessed right."""
    generation = runtime.start(request)
    tokens: list[int] = []
    try:
        while not generation.finished:
            runtime.step([generation])
            for event in generation.take():
                if isinstance(event, Delta):
                    tokens += event.tokens
                if isinstance(event, Finished):
                    seconds = (event.stats.wall_ms - event.stats.ttft_ms) / 1e3
                    return tokens, (len(tokens) - 1) / seconds, generation.accepted_drafts
    finally:
        generation.close()
    raise AssertionError("a generation ends with Finished")
