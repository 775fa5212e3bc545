"""Policy `random`: any replica, without looking."""

from random import Random

from router.policy.pairs import pair_up
from router.policy.values import Ask, Candidates, Choice


def random_choice(ask: Ask, candidates: Candidates, rng: Random) -> list[Choice]:
    """Choose both sides at random."""
    decoders, readers = list(candidates.decoders), list(candidates.readers())
    rng.shuffle(decoders)
    rng.shuffle(readers)
    return pair_up(ask, decoders, readers, "random")
