"""What `generate`, `chat` and the demonstration share: flags of a request, and showing its answer."""

import argparse
import sys
from collections.abc import AsyncIterable, Iterable
from typing import Protocol

from kvrelay.cli.target import add_target_flags
from kvrelay.client import Answer, Options, Part

SAMPLING_FLAGS: tuple[tuple[str, type[int] | type[float], str], ...] = (
    ("max_tokens", int, "most tokens to write (default: what the context leaves)"),
    ("temperature", float, "0 is greedy, at most 2 (default: 0)"),
    ("top_k", int, "keep the k most likely tokens; 0 keeps all (default: 0)"),
    ("top_p", float, "keep the most likely tokens that make up this probability (default: 1)"),
    ("min_p", float, "drop tokens less likely than this times the best (default: 0)"),
    ("seed", int, "makes sampling repeatable (default: drawn)"),
    ("deadline_s", float, "seconds until the whole answer must be there (default: 600)"),
    ("priority", int, "higher first, from -100 to 100 (default: 0)"),
)


class Answering(Protocol):
    """A stream that has been read to its end."""

    @property
    def answer(self) -> Answer:
        """The whole answer."""


def add_request_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a request."""
    for name, kind, text in SAMPLING_FLAGS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=text)
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="text that ends the answer; repeatable"
    )
    parser.add_argument("--model", help="model alias (default: the only one served)")
    parser.add_argument(
        "--stats", action="store_true", help="tell on stderr where the answer came from and what it cost"
    )
    add_target_flags(parser)


def request_options(args: argparse.Namespace) -> Options:
    """Return the options that were given."""
    names = [name for name, _, _ in SAMPLING_FLAGS] + ["model"]
    options: Options = {}
    options.update({name: value for name in names if (value := getattr(args, name)) is not None})  # type: ignore[typeddict-item] # names are keys of Options
    if args.stop:
        options["stop_strings"] = tuple(args.stop)
    return options


def show(parts: Iterable[Part]) -> None:
    """Print text as it arrives."""
    for part in parts:
        _write(part)
    print()


async def show_async(parts: AsyncIterable[Part]) -> None:
    """Print text as it arrives."""
    async for part in parts:
        _write(part)
    print()


def _write(part: Part) -> None:
    if part.text:
        print(part.text, end="", flush=True)


def show_stats(answer: Answer) -> None:
    """Tell what an answer cost, apart from its text."""
    print(summary(answer), file=sys.stderr)


def summary(answer: Answer) -> str:
    """Say in one line where an answer came from and what it cost."""
    usage, finish = answer.usage, answer.finish
    prompt = [f"{usage.cached_tokens} cached", f"{usage.pulled_tokens} pulled", f"{usage.computed_tokens} computed"]
    if usage.prefill_cached_tokens:
        prompt.insert(1, f"{usage.prefill_cached_tokens} cached at prefill")
    if usage.prefill_pulled_tokens:
        prompt.insert(-2, f"{usage.prefill_pulled_tokens} pulled at prefill")
    parts = [
        f"{_route(answer)}",
        f"prompt {usage.prompt_tokens} tokens: {', '.join(prompt)}",
        _pulled(usage.pulled_bytes, usage.pull_s),
        f"TTFT {finish.ttft_s * 1e3:.0f} ms, TPOT {finish.tpot_s * 1e3:.1f} ms",
        f"{usage.output_tokens} tokens written ({finish.reason})",
    ]
    if finish.attempts > 1:
        parts.append(f"{finish.attempts} attempts")
    return " | ".join(parts)


def _route(answer: Answer) -> str:
    decision, finish = answer.decision, answer.finish
    decode = decision.decode.replica_id if decision.decode else "?"
    where = f"{finish.prefill.replica_id} → {decode}" if finish.prefill else decode
    why = [word for word in (decision.reason, decision.decider_reason, finish.prefill_reason) if word]
    return f"{where} ({', '.join(why)})"


def _pulled(size: int, seconds: float) -> str:
    if not size:
        return "no KV moved"
    speed = f" at {_rate(size / seconds)}" if seconds > 0 else ""
    return f"KV {size / 1e6:.1f} MB over NIXL{speed}"


def _rate(bytes_per_s: float) -> str:
    """Return a rate in the unit that shows two digits of it."""
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e8 else f"{bytes_per_s / 1e6:.2g} MB/s"
