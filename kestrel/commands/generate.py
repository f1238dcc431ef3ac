"""`kestrel generate`: one answer on the terminal."""

import argparse
import signal
import sys
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, cast

from kestrel.commands.parsers import add_command
from kestrel.commands.progress import Working
from kestrel.commands.texts import milliseconds, size
from kestrel.config import Config
from kestrel.errors import KestrelError, RequestError

if TYPE_CHECKING:
    from kestrel.commands.parsers import Subparsers
    from kestrel.runtime import Delta, Finished, Request, Runtime, Stats

TERMINATED = 143  # 128 + SIGTERM


def add_parser(commands: "Subparsers", shared: argparse.ArgumentParser) -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        shared,
        "generate",
        run,
        summary="answer one prompt on the terminal",
        description="Answer one prompt: the text goes to stdout, what it took to stderr. Without PROMPT "
        "(or with -) the prompt is read from stdin.",
        examples="""
generate "The capital of France is"
generate --chat "Why is the sky blue?" --max-tokens 80
generate --chat --system "Answer in French." "Why is the sky blue?"
generate --prompt-file manual.txt --temperature 0.7 --seed 1
generate "The capital of France is" cache=off engine=int4
generate --chat < question.txt
""",
        operand=("PROMPT", "the prompt"),
    )
    parser.add_argument("--prompt-file", metavar="FILE", help="read the prompt from this file (UTF-8)")
    parser.add_argument(
        "--chat", action="store_true", help="the prompt is a user's message: apply the chat template"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message before the prompt (implies --chat)")
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="length of the answer (default: server.default_max_tokens)",
    )
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="nucleus sampling (default 1: off)"
    )
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="choose among K tokens (default 0: all)"
    )
    parser.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="relative floor (default 0: off)"
    )
    parser.add_argument("--repetition-penalty", type=float, default=1.0, metavar="R", help="default 1: none")
    parser.add_argument("--seed", type=int, metavar="N", help="makes sampling reproducible")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the end token (for measuring)")
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="only the answer, nothing on stderr but errors"
    )


def run(args: argparse.Namespace, config: Config) -> int:
    """Print the answer as it is computed; the session is saved before the command returns."""
    prompt = _prompt(args)
    from kestrel.commands.loading import open_runtime

    signal.signal(signal.SIGTERM, _exit_on_signal)  # so that closing saves what was computed
    with open_runtime(config, args.quiet) as runtime:
        finished = _stream(runtime, _request(args, config, runtime, prompt), args.quiet)
    if not args.quiet:
        print(
            f"kestrel: {summary_line(finished.stats)}, finish reason: {finished.finish_reason}",
            file=sys.stderr,
        )
    return 0


def _stream(runtime: "Runtime", request: "Request", quiet: bool) -> "Finished":
    """Write the answer's pieces to stdout as they come. Returns how it ended."""
    from kestrel.runtime import Finished

    working = None if quiet else Working(f"computing the prompt ({len(request.tokens)} tokens)")
    events = cast("Generator[Delta | Finished, None, None]", runtime.generate(request))
    try:
        with closing(
            events
        ):  # an interrupted answer is saved as far as it goes, before the runtime is closed
            for event in events:
                if working is not None:
                    working.stop()
                if isinstance(event, Finished):
                    print(flush=True)
                    return event
                print(event.text, end="", flush=True)
    finally:
        if working is not None:
            working.stop()
    raise KestrelError("the engine ended without finishing the answer; run `kestrel doctor`")


def _request(args: argparse.Namespace, config: Config, runtime: "Runtime", prompt: str) -> "Request":
    from kestrel.runtime import Request, Sampling

    if args.chat or args.system is not None:
        if runtime.chat is None:
            raise RequestError(
                f"{runtime.name} has no chat template; leave --chat out or set model.chat_template=FILE"
            )
        messages = [{"role": "system", "content": args.system}] if args.system is not None else []
        prompt = runtime.chat.render([*messages, {"role": "user", "content": prompt}])
    return Request(
        tokens=runtime.tokenizer.encode(prompt),
        max_tokens=config.server.default_max_tokens if args.max_tokens is None else args.max_tokens,
        sampling=Sampling(
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            min_p=args.min_p,
            repetition_penalty=args.repetition_penalty,
            seed=args.seed,
        ),
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
    )


def _prompt(args: argparse.Namespace) -> str:
    """The prompt's text from the operand, a file or stdin. Ends with exit code 2 when there is none."""
    operand: str | None = args.operand
    if args.prompt_file is not None:
        if operand is not None:
            args.parser.error("give the prompt as a word or with --prompt-file, not both")
        try:
            return Path(args.prompt_file).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise RequestError(f"{args.prompt_file} is not UTF-8 text: {error}") from error
    if operand is not None and operand != "-":
        return operand
    if sys.stdin.isatty() and operand is None:
        args.parser.error('a prompt is needed: kestrel generate "…", or pipe it to stdin')
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"stdin is not UTF-8 text: {error}") from error
    if not text:
        args.parser.error('the prompt on stdin is empty; give one: kestrel generate "…"')
    return text


def summary_line(stats: "Stats") -> str:
    """What a request took, in one line: where its prompt came from, TTFT, speed, wall time."""
    parts = [f"prompt {stats.prompt_tokens} tokens: {stats.computed_tokens} computed"]
    if stats.restored_tokens:
        parts.append(
            f"{stats.restored_tokens} restored ({size(stats.bytes_read)} in {milliseconds(stats.restore_ms)})"
        )
    if stats.pulled_tokens:
        parts.append(
            f"{stats.pulled_tokens} pulled ({size(stats.pulled_bytes)} in {milliseconds(stats.pull_ms)})"
        )
    if stats.pull_problem:
        parts.append(stats.pull_problem)
    if stats.foreign:
        parts.append(f"not exact: restored rows have {stats.foreign}")
    if stats.ram_tokens:
        parts.append(f"{stats.ram_tokens} from RAM")
    if stats.skipped_tokens and not stats.miss_reason:
        parts.append(f"{stats.skipped_tokens} stored tokens computed ({stats.load})")
    if stats.miss_reason:
        diverged = "" if stats.diverged_at is None else f" (the nearest differs at token {stats.diverged_at})"
        parts.append(f"miss: {stats.miss_reason}{diverged}")
    decode_ms = stats.wall_ms - stats.ttft_ms
    if stats.completion_tokens > 1 and decode_ms > 0:
        rate = f" at {(stats.completion_tokens - 1) / decode_ms * 1000:.1f} tok/s"
    else:
        rate = ""
    parts.append(f"answer {stats.completion_tokens} tokens{rate}")
    parts.append(f"prefill {milliseconds(stats.prefill_ms)}")
    parts.append(f"TTFT {milliseconds(stats.ttft_ms)}")
    parts.append(f"wall {milliseconds(stats.wall_ms)}")
    return ", ".join(parts)


def _exit_on_signal(*_: object) -> None:
    sys.exit(TERMINATED)
