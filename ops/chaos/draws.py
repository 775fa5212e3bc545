"""What schedules draw: how often what goes wrong, and what is asked."""

import random
from dataclasses import dataclass

from ops.chaos.calm import BLOCK_TOKENS

PROMPT_FAMILIES = 3


@dataclass(frozen=True, kw_only=True)
class Mood:
    """How often what happens, a tick and a host or request; drawn anew for each schedule, so that some are calm."""

    kill: float
    stop: float
    cancel: float
    reset: float
    revoke: float
    churn: float
    prefix_lease: float
    reads: float
    lost: float


def draw_mood(rng: random.Random) -> Mood:
    """Draw how often what happens."""

    def rate(most: float) -> float:
        return most * rng.random() if rng.random() < 0.6 else 0.0

    return Mood(
        kill=rate(0.003),
        stop=rate(0.004),
        cancel=rate(0.01),
        reset=rate(0.01),
        revoke=rate(0.05),
        churn=rate(0.08),
        prefix_lease=rate(0.05),
        reads=rate(0.9),
        lost=rate(0.3),
    )


def draw_prompt(rng: random.Random) -> tuple[int, ...]:
    """Prompts share prefixes often: the first pages come from a small family."""
    family = rng.randrange(PROMPT_FAMILIES)
    shared = [family * 10 + index % 7 + 1 for index in range(rng.randrange(6 * BLOCK_TOKENS))]
    return (*shared, *(rng.randrange(1, 200) for _ in range(rng.randint(1, 2 * BLOCK_TOKENS))))
