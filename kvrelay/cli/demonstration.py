"""Asks a fleet twice at the end of the same long chat, and shows what was computed, pulled and cached."""

import shutil
import sys
from pathlib import Path

from kvrelay.cli import demo_text
from kvrelay.cli.asking import show_async, summary
from kvrelay.client import Answer, AsyncClient, Message, Usage
from kvrelay.config import UpConfig

MAX_TOKENS = 96
"""Enough for a few sentences, and seconds on a laptop."""

EXIT_NOT_SHOWN = 3
"""Nothing went over NIXL, or nothing was cached: the fleet answers, but not as it should."""


async def demonstrate(router: str) -> int:
    """Ask twice; return 0 when KV went over NIXL and the second question found it cached, else `EXIT_NOT_SHOWN`."""
    async with AsyncClient(router) as client:
        print(f"\nAt the end of a chat that no replica has seen: {demo_text.FIRST_QUESTION}\n", flush=True)
        first = await _ask(client, demo_text.FIRST_QUESTION)
        print(f"\nAt the end of the same chat: {demo_text.SECOND_QUESTION}\n", flush=True)
        second = await _ask(client, demo_text.SECOND_QUESTION)
    faults = find_faults(first, second)
    for fault in faults:
        print(f"kvrelay: {fault}", file=sys.stderr)
    if not faults:
        usage = second.usage
        print(f"\n{_cached(usage)} of the second prompt's {usage.prompt_tokens} tokens were in cache.", flush=True)
    return EXIT_NOT_SHOWN if faults else 0


def find_faults(first: Answer, second: Answer) -> list[str]:
    """Say what the demonstration should have shown and did not."""
    faults = []
    if not first.usage.pulled_bytes:
        faults.append("no KV went over NIXL for the first question; see prefill's and decode's logs")
    if not _cached(second.usage):
        faults.append("no prompt token of the second question was cached, though it begins like the first")
    return faults


def next_steps(state_dir: str) -> str:
    """Say what to try while the fleet runs."""
    program = _program()
    flag = "" if state_dir == UpConfig.state_dir else f" --state-dir {state_dir}"
    return "\n".join(
        [
            "",
            "The fleet stays up until Ctrl-C. In another terminal, in this folder:",
            f'  {program} chat{flag} "What is the capital of France?"',
            f"  {program} status{flag}",
            f"  {program} kill{flag} prefill-0      # during an answer: it ends well, and prefill-0 comes back",
        ]
    )


def _cached(usage: Usage) -> int:
    """Return the prompt tokens that nobody computed: what one of the replicas holds, the other mostly holds, too."""
    return max(usage.cached_tokens, usage.prefill_cached_tokens)


async def _ask(client: AsyncClient, question: str) -> Answer:
    messages = [*demo_text.CHAT, Message("user", question)]
    async with client.stream_chat(messages, max_tokens=MAX_TOKENS) as stream:
        await show_async(stream)
        print(f"\n  {summary(stream.answer)}", flush=True)
        return stream.answer


def _program() -> str:
    """Return how this program is called from here."""
    found = shutil.which("kvrelay")
    own = Path(sys.argv[0]).absolute()
    if found is not None and Path(found).absolute() == own:
        return "kvrelay"
    return str(own.relative_to(Path.cwd())) if own.is_relative_to(Path.cwd()) else str(own)
