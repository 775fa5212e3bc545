"""A fleet of one prefill and one decode replica on the bundled model: TTFT, TPOT, pull rate, and what is cached.

Every prompt is read remotely. `ttft_ms`, `tpot_ms` and `pull_gb_s` are medians over prompts that nobody has seen;
`cached_share` is the share of a prompt's tokens that were neither computed nor pulled when it was asked again.
"""

import random

from bench.local_fleet import LocalFleet
from bench.report import Report, main
from kvrelay.client import Answer, Client

PROMPT_TOKENS = 512
OUTPUT_TOKENS = 64
SAMPLES = 20
SAMPLES_QUICK = 5
FIRST_PLAIN_ID = 1000
"""Ids from here on are ordinary text in the bundled model's vocabulary."""
VOCAB_SIZE = 49_152


def measure(quick: bool, report: Report) -> None:  # noqa: FBT001 - the one form of a benchmark
    """Ask prompts that are new, then each again."""
    rng = random.Random(0)
    prompts = [rng.choices(range(FIRST_PLAIN_ID, VOCAB_SIZE), k=PROMPT_TOKENS) for _ in range(_samples(quick))]
    with LocalFleet({"prefill": 1, "decode": 1, "disaggregate": "always"}) as fleet, fleet.client() as client:
        _ask(client, rng.choices(range(FIRST_PLAIN_ID, VOCAB_SIZE), k=PROMPT_TOKENS))  # connects the replicas
        fresh = [_ask(client, prompt) for prompt in prompts]
        again = [_ask(client, prompt) for prompt in prompts]
    report.add("ttft_ms", [answer.finish.ttft_s * 1e3 for answer in fresh])
    report.add("tpot_ms", [answer.finish.tpot_s * 1e3 for answer in fresh])
    report.add("pull_gb_s", [answer.usage.pulled_bytes / answer.usage.pull_s / 1e9 for answer in fresh])
    report.add("cached_share", [answer.usage.cached_tokens / answer.usage.prompt_tokens for answer in again])
    report.add("ttft_again_ms", [answer.finish.ttft_s * 1e3 for answer in again])
    report.notes.append(f"{PROMPT_TOKENS}-token prompts, {OUTPUT_TOKENS} tokens out, one stream, real engine")


def _samples(quick: bool) -> int:  # noqa: FBT001
    return SAMPLES_QUICK if quick else SAMPLES


def _ask(client: Client, prompt: list[int]) -> Answer:
    return client.generate(prompt, max_tokens=OUTPUT_TOKENS, ignore_eos=True)


if __name__ == "__main__":
    main("fleet", measure)
