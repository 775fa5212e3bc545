"""The decider: whether the prompt is read at a prefill replica or where the answer is written."""

from typing import Final

from router.policy.values import Ask, Candidate, Cost, Disaggregate

SHORT_TOKENS: Final = 256
"""Prompt tokens to compute that fit in one chunk of the engine: such a prompt is called short."""


def remote_wins(ask: Ask, local: Cost, remote: Cost) -> bool:
    """Tell whether the prompt should be read remotely."""
    if ask.disaggregate is Disaggregate.AUTO:
        return remote.total_s < local.total_s
    return ask.disaggregate is Disaggregate.ALWAYS


def why(ask: Ask, decode: Candidate, local: Cost, remote: Cost | None, *, is_remote: bool) -> str:
    """Return the decider's reason, one word; README.md explains them."""
    if ask.disaggregate is Disaggregate.NEVER:
        return "never"
    if remote is None:
        return "no_prefill"
    if ask.disaggregate is Disaggregate.ALWAYS:
        return "always" if is_remote else "no_prefill"
    if is_remote:
        return "remote_sooner" if remote.alone_s < local.alone_s else "spares_streams"
    if 2 * decode.held_tokens >= ask.prompt_tokens:
        return "cached_here"
    return "short_prompt" if ask.prompt_tokens - decode.held_tokens <= SHORT_TOKENS else "local_sooner"
