"""`kestrel top`: what a running server is doing, live."""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kestrel.commands.parsers import add_command
from kestrel.commands.texts import age, milliseconds, size
from kestrel.config import Config
from kestrel.errors import KestrelError

if TYPE_CHECKING:
    from kestrel.commands.parsers import Subparsers

KEY_VARIABLE = "KESTREL_API_KEY"
ANSWER_SECONDS = 10.0  # how long the server may take to say how it is

Samples = Mapping[str, float]


@dataclass(frozen=True)
class Reading:
    """What a server said of itself at one moment (seconds of time.monotonic)."""

    at: float
    health: Mapping[str, Any]
    samples: Samples


def add_parser(commands: "Subparsers", shared: argparse.ArgumentParser) -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        shared,
        "top",
        run,
        summary="show what a running server is doing",
        description="Show what a running server is doing: requests, tokens a second, where prompts came from, "
        f"latencies, the store. With API keys, an admin's in {KEY_VARIABLE}.",
        examples="top\ntop board.local:8080\ntop --once server.port=9000",
        operand=("URL", "where the server is; left out, where the configuration says it listens"),
    )
    parser.add_argument("--once", action="store_true", help="print one reading and end")
    parser.add_argument("--seconds", type=float, default=1.0, metavar="N", help="between two readings (1)")


def run(args: argparse.Namespace, config: Config) -> int:
    """Show readings until interrupted; one only if asked for, or if stdout is no terminal."""
    if not args.seconds > 0:
        args.parser.error("--seconds must be more than 0")
    host = f"[{config.server.host}]" if ":" in config.server.host else config.server.host
    url = (args.operand or f"{host}:{config.server.port}").rstrip("/")
    url = url if "://" in url else f"http://{url}"
    before = None
    now = read(url)
    if args.once or not sys.stdout.isatty():
        print("\n".join(report(url, before, now)))
        return 0
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False, screen=True) as live:
        while True:
            live.update(Text("\n".join([*report(url, before, now), "", "Ctrl+C ends"])), refresh=True)
            time.sleep(args.seconds)
            before, now = now, read(url)


def read(url: str) -> Reading:
    """Ask a server how it is. KestrelError if it does not answer, or not this caller."""
    health = json.loads(_get(f"{url}/health"))
    return Reading(time.monotonic(), health, parse_samples(_get(f"{url}/metrics")))


def _get(url: str) -> str:
    import urllib.error
    import urllib.request

    key = os.environ.get(KEY_VARIABLE)
    try:
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            text: str = answer.read().decode("utf-8")
            return text
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            raise KestrelError(f"{url} wants an admin's API key; set {KEY_VARIABLE}") from error
        if error.code == 503:  # it is shutting down, and says so
            return error.read().decode("utf-8")
        raise KestrelError(f"{url} answered {error.code}; is it a Kestrel server?") from error
    except (OSError, ValueError) as error:
        raise KestrelError(f"no server answers at {url}: {error}; start one with `kestrel serve`") from error


def parse_samples(text: str) -> Samples:
    """Prometheus's text format as values by name, labels included: `name{label="value"}`."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def quantile(samples: Samples, name: str, share: float) -> float | None:
    """The duration, in seconds, that so large a share of a histogram's entries did not exceed; None without any.

    Between the bounds of a bucket it is interpolated; beyond the last bound, that is the answer.
    """
    head = f'{name}_bucket{{le="'
    buckets = [(key[len(head) : -2], count) for key, count in samples.items() if key.startswith(head)]
    total = samples.get(f"{name}_count", 0.0)
    if not total:
        return None
    low, below = 0.0, 0.0
    for bound, count in buckets:
        if bound == "+Inf":
            return low
        if count >= share * total:
            return low + (float(bound) - low) * (share * total - below) / (count - below)
        low, below = float(bound), count
    return low


def report(url: str, before: Reading | None, now: Reading) -> list[str]:
    """The lines that describe a reading; rates need the one before."""
    health, samples = now.health, now.samples
    queue, store = health["queue"], health["store"]

    def rate(name: str) -> float:
        """How much a counter grew a second; since the server started if there is no reading before."""
        grown = samples.get(name, 0.0) - (0.0 if before is None else before.samples.get(name, 0.0))
        seconds: float = health["uptime_seconds"] if before is None else now.at - before.at
        return grown / max(seconds, 1e-9)

    def total(name: str) -> float:
        return samples.get(f"kestrel_{name}", 0.0)

    prompt = {
        source: total(f'prompt_tokens_total{{source="{source}"}}') for source in ("computed", "ram", "disk")
    }
    all_prompt = sum(prompt.values()) or 1.0
    outcomes = {
        outcome: total(f'requests_total{{outcome="{outcome}"}}')
        for outcome in ("stop", "length", "cancelled", "failed")
    }
    refused = sum(value for name, value in samples.items() if name.startswith("kestrel_refused_total"))
    steps = rate("kestrel_steps_total")
    lines = [
        f"{health['model']} at {url}: {health['status']}, up {age(health['uptime_seconds'])}",
        "",
        f"answers   {queue['running']} of {queue['places']} running, {queue['waiting']} of {queue['capacity']} waiting",
        f"          {sum(outcomes.values()):,.0f} done: "
        + ", ".join(f"{value:,.0f} {outcome}" for outcome, value in outcomes.items())
        + f"; {refused:,.0f} refused",
        f"tokens    {rate('kestrel_answer_tokens_total'):,.1f} answered/s, "
        f"{rate('kestrel_step_answers_total') / steps if steps else 0.0:.1f} answers a step",
        "prompts   "
        + ", ".join(f"{100 * value / all_prompt:.0f}% {source}" for source, value in prompt.items()),
        f"TTFT      {_quantiles(samples, 'kestrel_ttft_seconds')}",
        f"restore   {_quantiles(samples, 'kestrel_restore_seconds')}",
        f"KV pages  {total('kv_pages') - total('kv_pages_available'):,.0f} of {total('kv_pages'):,.0f} in use",
    ]
    if store is not None:
        evicted = total('store_total{event="evicted_pages"}')
        lines += [
            f"store     {size(store['bytes'])} in {store['root']}: {store['files']:,} pages, "
            f"{store['tokens']:,} tokens",
            f"          {size(int(rate('kestrel_read_bytes_total')))}/s read, "
            f"{size(int(rate('kestrel_written_bytes_total')))}/s written, "
            f"write amplification {total('write_amplification'):.2f}",
            f"          {evicted:,.0f} evicted, {store['quarantined']:,} quarantined, "
            f"{total('saves_dropped_total'):,.0f} saves dropped, {total('saves_pending'):,.0f} pending",
        ]
    elif health["store_problem"]:
        lines.append(f"store     {health['store_problem']}")
    return lines


def _quantiles(samples: Samples, name: str) -> str:
    p50, p95 = quantile(samples, name, 0.5), quantile(samples, name, 0.95)
    if p50 is None or p95 is None:
        return "none yet"
    return f"p50 {milliseconds(p50 * 1e3)}, p95 {milliseconds(p95 * 1e3)} ({samples[f'{name}_count']:,.0f})"
