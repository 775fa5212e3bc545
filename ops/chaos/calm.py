"""What a fleet answers when nothing goes wrong: one engine of its own, undisturbed."""

from functools import cache

from kvrelay.config import EngineConfig
from kvrelay.engine.protocol import Ended, Event, Generate, Prompt, Tokens
from kvrelay.kv.faults import listed
from kvrelay.kv.keys import block_keys, root_key
from kvrelay.kv.memory import MemoryNetwork
from kvrelay.types import Sampling, pack_ids
from ops.chaos.host import Host

BLOCK_TOKENS = 4
ROOT_KEY = root_key(model_fingerprint="m", tokenizer_fingerprint="t", block_tokens=BLOCK_TOKENS)
STEPS_MAX = 10_000
"""More than any answer asked for here takes."""


def prompt_of(prompt_ids: tuple[int, ...], output_ids: tuple[int, ...] = ()) -> Prompt:
    """Return a prompt, and the output so far, with their block keys."""
    packed, written = pack_ids(list(prompt_ids)), pack_ids(list(output_ids))
    keys = block_keys(ROOT_KEY, packed + written, BLOCK_TOKENS)
    return Prompt(prompt_ids=packed, output_ids=written, root_key=ROOT_KEY, block_keys=keys)


@cache
def expected(prompt_ids: tuple[int, ...], sampling: Sampling) -> tuple[int, ...]:
    """Return the answer of the mock model.

    Raises:
        AssertionError: it does not end.
    """
    host = Host(
        "calm",
        EngineConfig(engine="mock", block_tokens=BLOCK_TOKENS, page_tokens=BLOCK_TOKENS, kv_mib=1),
        pages=(len(prompt_ids) + (sampling.max_tokens or 0)) // BLOCK_TOKENS + 2,
        clock=lambda: 0.0,
        network=MemoryNetwork(),
        plan=lambda _: listed({}),
    )
    told: list[Event] = []
    host.routes["calm"] = told.append
    host.handle(Generate(job_id="calm", prompt=prompt_of(prompt_ids), sampling=sampling))
    for _ in range(STEPS_MAX):
        if told and isinstance(told[-1], Ended):
            return tuple(token for event in told if isinstance(event, Tokens) for token in event.ids)
        host.step()
    raise AssertionError(f"the calm engine does not end: {told}")
