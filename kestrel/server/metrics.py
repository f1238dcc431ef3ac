"""What the server has done since it started, in Prometheus's text format."""

import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from kestrel.runtime import Finished, Runtime

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Upper bounds of the buckets in seconds: a cached prompt on a fast machine to 8K tokens on a small board.
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)

OUTCOMES = ("stop", "length", "cancelled", "failed")
REFUSALS = ("queue", "bytes", "key")


class Histogram:
    """How often a duration was at most so long."""

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def expose(self, name: str, about: str) -> list[str]:
        """The lines of this histogram; buckets are cumulative, as Prometheus wants them."""
        lines = [f"# HELP kestrel_{name} {about}", f"# TYPE kestrel_{name} histogram"]
        total = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            lines.append(f'kestrel_{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"kestrel_{name}_sum {self._sum:.9g}", f"kestrel_{name}_count {total}"]


class Totals:
    """Sums over all answers that have left the engine. Thread-safe."""

    def __init__(self, kv_bytes_per_token: int) -> None:
        self._kv_bytes_per_token = kv_bytes_per_token
        self._lock = threading.Lock()
        self._answers = dict.fromkeys(OUTCOMES, 0)
        self._refusals = dict.fromkeys(REFUSALS, 0)
        self._prompt_tokens = dict.fromkeys(("disk", "ram", "computed"), 0)
        self._answer_tokens = 0
        self._seconds = dict.fromkeys(("queue", "prefill", "restore", "wall"), 0.0)
        self._bytes_read = 0
        self._steps = 0
        self._step_answers = 0
        self._ttft = Histogram()
        self._restore = Histogram()

    def add_finished(self, finished: Finished, queue_seconds: float) -> None:
        """Count an answer that came to its end; `queue_seconds` passed before the engine took it."""
        stats = finished.stats
        with self._lock:
            self._answers[finished.finish_reason] += 1
            self._prompt_tokens["disk"] += stats.restored_tokens
            self._prompt_tokens["ram"] += stats.ram_tokens
            self._prompt_tokens["computed"] += stats.computed_tokens
            self._answer_tokens += stats.completion_tokens
            self._seconds["queue"] += queue_seconds
            self._seconds["prefill"] += stats.prefill_ms / 1e3
            self._seconds["restore"] += stats.restore_ms / 1e3
            self._seconds["wall"] += queue_seconds + stats.wall_ms / 1e3
            self._bytes_read += stats.bytes_read
            if stats.completion_tokens:
                self._ttft.add(queue_seconds + stats.ttft_ms / 1e3)
            if stats.restored_tokens:
                self._restore.add(stats.restore_ms / 1e3)

    def add_outcome(self, outcome: str) -> None:
        """Count an answer that never came to its end: "failed" or "cancelled"."""
        with self._lock:
            self._answers[outcome] += 1

    def add_refused(self, limit: str) -> None:
        """Count a request refused with 429: "queue", "bytes" or "key" is full."""
        with self._lock:
            self._refusals[limit] += 1

    def add_step(self, num_answers: int) -> None:
        """Count an engine step that `num_answers` answers shared."""
        with self._lock:
            self._steps += 1
            self._step_answers += num_answers

    def expose(self, runtime: Runtime, num_running: int, num_waiting: int) -> str:
        """The text that Prometheus reads."""
        with self._lock:
            lines = [
                *_family(
                    "requests_total",
                    "outcome",
                    self._answers,
                    "Answers that left the server (a request with n = 3 has three).",
                ),
                *_family("refused_total", "limit", self._refusals, "Requests refused with 429."),
                *_family(
                    "prompt_tokens_total",
                    "source",
                    self._prompt_tokens,
                    "Prompt tokens by origin of their KV.",
                ),
                *_single("answer_tokens_total", self._answer_tokens, "Generated tokens."),
                *_family(
                    "seconds_total", "part", self._seconds, "Time of answers; wall includes the other parts."
                ),
                *self._ttft.expose("ttft_seconds", "From a request's arrival to its first token."),
                *self._restore.expose("restore_seconds", "Reading stored pages of a prompt."),
                *_single("read_bytes_total", self._bytes_read, "Bytes of artifacts read."),
                *_single("steps_total", self._steps, "Engine steps."),
                *_single("step_answers_total", self._step_answers, "Answers taking part in steps, summed."),
            ]
            num_computed = self._prompt_tokens["computed"] + self._answer_tokens
        pool = runtime.engine.pool
        lines += [
            *_single("requests_running", num_running, "Answers in the engine."),
            *_single("requests_waiting", num_waiting, "Answers in the queue."),
            *_single("kv_pages", pool.num_pages, "Pages of the KV pool in memory."),
            *_single("kv_pages_available", pool.num_available, "Pages that no answer and no save holds."),
        ]
        if runtime.store is not None and runtime.writer is not None:
            written = runtime.store.stats()["published_bytes"]
            computed = num_computed * self._kv_bytes_per_token
            lines += [
                *_family("store_total", "event", runtime.store.stats(), "What happened in the store."),
                *_single("written_bytes_total", written, "Bytes of artifacts written."),
                *_single("computed_bytes_total", computed, "Bytes of KV computed by finished answers."),
                *_single(
                    "write_amplification",
                    written / computed if computed else 0.0,
                    "Bytes written for each byte of KV computed.",
                ),
                *_single("saves_dropped_total", runtime.writer.num_dropped, "Pages that were not saved."),
                *_single("saves_pending", runtime.writer.num_pending, "Pages still to be written."),
            ]
        return "\n".join(lines) + "\n"


def _family(name: str, label: str, values: Mapping[str, float], about: str) -> list[str]:
    lines = _head(name, about)
    return lines + [f'kestrel_{name}{{{label}="{key}"}} {value:.15g}' for key, value in values.items()]


def _single(name: str, value: float, about: str) -> list[str]:
    return [*_head(name, about), f"kestrel_{name} {value:.15g}"]


def _head(name: str, about: str) -> list[str]:
    kind = "counter" if name.endswith("_total") else "gauge"
    return [f"# HELP kestrel_{name} {about}", f"# TYPE kestrel_{name} {kind}"]
