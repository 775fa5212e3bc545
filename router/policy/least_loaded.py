"""Policy `least_loaded`: the replica with the least booked work, wherever the prefix lies."""

from random import Random

from router.policy.cap import decode_measure, prefill_measure
from router.policy.pairs import pair_up
from router.policy.values import Ask, Candidate, Candidates, Choice


def least_loaded(ask: Ask, candidates: Candidates, rng: Random) -> list[Choice]:
    """Choose the least loaded of each side; equals at random."""
    decoders = sorted(candidates.decoders, key=lambda c: (_decoder_load(c), rng.random()))
    readers = sorted(candidates.readers(), key=lambda c: (prefill_measure(c), rng.random()))
    return pair_up(ask, decoders, readers, "least_loaded")


def _decoder_load(candidate: Candidate) -> tuple[float, float]:
    return decode_measure(candidate), prefill_measure(candidate)
