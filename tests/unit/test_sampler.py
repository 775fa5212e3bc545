import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.engine.runner import Draw
from kvrelay.engine.sampler import candidates, gumbel, sample
from kvrelay.errors import InternalError
from kvrelay.types import Sampling

VOCAB = 40
DRAWS = 4000
# seed 12345, position 678, ids 0, 1 and 49151, worked out in plain Python integers and math.log
GOLDEN_NUMBERS = [-0.11986733839, 0.33397018374, 0.11259107274]


def logits_of(seed: int = 0, vocab: int = VOCAB, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread


def draw_one(logits: torch.Tensor, sampling: Sampling, position: int = 0, **rest) -> int:
    return sample(logits[None].clone(), [Draw(sampling, position, **rest)])[0].token


def plain_probabilities(logits: list[float], sampling: Sampling) -> dict[int, float]:
    """The filters once more, in the plainest way."""
    weights = {token: math.exp(value / sampling.temperature) for token, value in enumerate(logits)}
    order = sorted(weights, key=lambda token: -weights[token])
    if sampling.top_k:
        order = order[: sampling.top_k]
    total = sum(weights[token] for token in order)
    kept, mass = [], 0.0
    for token in order:
        if sampling.top_p < 1 and mass >= sampling.top_p:
            break
        kept.append(token)
        mass += weights[token] / total
    kept = [token for token in kept if weights[token] >= sampling.min_p * weights[order[0]]]
    total = sum(weights[token] for token in kept)
    return {token: weights[token] / total for token in kept}


def chi_square_999(freedom: int) -> float:
    """99.9th percentile (Wilson and Hilferty's approximation)."""
    part = 2 / (9 * freedom)
    return freedom * (1 - part + 3.09 * math.sqrt(part)) ** 3


def test_temperature_zero_takes_the_likeliest_token():
    logits = logits_of()
    assert draw_one(logits, Sampling()) == int(logits.argmax())


def test_every_row_of_a_batch_is_drawn_as_if_alone():
    rows = torch.stack([logits_of(seed) for seed in range(6)])
    samplings = [
        Sampling(),
        Sampling(temperature=1.0, seed=1),
        Sampling(temperature=0.7, top_k=5, seed=1),
        Sampling(temperature=1.3, top_p=0.8, seed=2**64 - 1),
        Sampling(temperature=1.0, min_p=0.1, seed=0),
        Sampling(logprobs=3),
    ]
    draws = [Draw(sampling, position) for position, sampling in enumerate(samplings)]
    together = sample(rows.clone(), draws)
    alone = [sample(rows[i : i + 1].clone(), draws[i : i + 1])[0] for i in range(6)]
    assert [drawn.token for drawn in together] == [drawn.token for drawn in alone]


def test_a_draw_depends_on_seed_and_position_and_on_nothing_else():
    logits = logits_of()
    sampling = Sampling(temperature=1.0, seed=7)
    first = [draw_one(logits, sampling, position) for position in range(50)]
    again = [draw_one(logits, sampling, position) for position in reversed(range(50))]
    other = [draw_one(logits, Sampling(temperature=1.0, seed=8), position) for position in range(50)]
    assert first == again[::-1]
    assert first != other
    assert len(set(first)) > 5


def test_random_numbers_are_the_same_on_every_machine_and_in_every_version():
    # Changing these would change the answers of requests that are continued across an upgrade.
    numbers = gumbel(12345, 678, torch.tensor([0, 1, 49151]))
    assert numbers.tolist() == pytest.approx(GOLDEN_NUMBERS, rel=1e-5)


def test_a_token_has_the_same_number_whatever_tokens_compete():
    some = torch.tensor([3, 17, 29])
    assert torch.equal(gumbel(5, 9, torch.arange(VOCAB))[some], gumbel(5, 9, some))


def test_random_numbers_follow_the_gumbel_distribution():
    numbers = torch.cat([gumbel(seed, position, torch.arange(1000)) for seed in (0, 1) for position in range(50)])
    ordered = numbers.double().sort().values
    expected = torch.exp(-torch.exp(-ordered))
    reached = (torch.arange(len(ordered), dtype=torch.float64) + 0.5) / len(ordered)
    # Kolmogorov-Smirnov: 1.95 / sqrt(n) is exceeded by chance once in a thousand.
    assert float((expected - reached).abs().max()) < 1.95 / math.sqrt(len(ordered))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.6),
        Sampling(temperature=1.7, top_k=12),
        Sampling(temperature=1.0, top_p=0.9),
        Sampling(temperature=1.5, min_p=0.05),
        Sampling(temperature=1.2, top_k=20, top_p=0.95, min_p=0.01),
    ],
    ids=str,
)
@pytest.mark.parametrize("vary", ["position", "seed"])
def test_tokens_are_drawn_as_often_as_the_reference_says(sampling: Sampling, vary: str):
    logits = logits_of(3, vocab=24, spread=1.0)
    expected = plain_probabilities(logits.tolist(), sampling)
    fields = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    draws = [
        Draw(Sampling(**fields, seed=11 if vary == "position" else i), i if vary == "position" else 4)
        for i in range(DRAWS)
    ]
    seen = Counter(drawn.token for drawn in sample(logits.expand(DRAWS, -1).clone(), draws))
    assert set(seen) <= set(expected)
    chi_square = sum((seen[token] - DRAWS * p) ** 2 / (DRAWS * p) for token, p in expected.items())
    assert chi_square < chi_square_999(len(expected) - 1)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 1000),
    vocab=st.sampled_from([1, 2, 40, 3000]),
    temperature=st.floats(0.05, 2),
    top_k=st.sampled_from([0, 1, 7, 5000]),
    top_p=st.sampled_from([1e-6, 0.3, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
)
def test_filters_keep_what_the_plain_reference_keeps(
    *, seed: int, vocab: int, temperature: float, top_k: int, top_p: float, min_p: float
):
    logits = logits_of(seed, vocab)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = plain_probabilities(logits.double().tolist(), sampling)
    _, ids = candidates(logits, sampling)
    kept = set(ids.tolist())
    assert len(kept) == len(ids)
    probabilities = (logits.double() / temperature).softmax(-1)
    differ = sorted(kept ^ set(expected))
    # float32 rounding may move the border where the mass meets top_p.
    assert float(probabilities[differ].sum()) < (1e-5 if top_p < 1 else 1e-12)
    assert int(logits.argmax()) in kept


def test_top_p_looks_past_its_first_candidates_when_they_lack_mass():
    flat = torch.zeros(5000)
    _, ids = candidates(flat, Sampling(temperature=1.0, top_p=0.9))
    assert len(ids) == pytest.approx(4500, abs=2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_ids_are_not_drawn_before_min_tokens(temperature: float):
    logits = logits_of()
    best = int(logits.argmax())
    sampling = Sampling(temperature=temperature, top_k=1, seed=0)
    stops = frozenset({best, 5})
    assert draw_one(logits, sampling, stop_ids=stops) == best
    assert draw_one(logits, sampling, stop_ids=stops, min_tokens_left=1) not in stops


def test_logprobs_are_those_of_the_model_before_temperature_filters_and_masks():
    logits = logits_of()
    best = int(logits.argmax())
    sampling = Sampling(temperature=0.5, top_k=3, seed=1, logprobs=4)
    (drawn,) = sample(logits[None].clone(), [Draw(sampling, 0, min_tokens_left=1, stop_ids=frozenset({best}))])
    expected = logits.log_softmax(-1)
    assert drawn.logprobs is not None
    assert drawn.token != best
    assert drawn.logprobs.logprob == pytest.approx(float(expected[drawn.token]))
    assert drawn.logprobs.top_ids == tuple(expected.topk(4).indices.tolist())
    assert drawn.logprobs.top_logprobs == pytest.approx(tuple(expected.topk(4).values.tolist()))


def test_logprobs_are_given_only_where_asked():
    rows = torch.stack([logits_of(1), logits_of(2)])
    plain, told = sample(rows, [Draw(Sampling(), 0), Draw(Sampling(logprobs=0), 0)])
    assert plain.logprobs is None
    assert told.logprobs is not None
    assert told.logprobs.top_ids == ()


@pytest.mark.parametrize("damage", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_an_error(damage: float):
    logits = logits_of()
    logits[3] = damage
    with pytest.raises(InternalError, match="not finite"):
        draw_one(logits, Sampling())


def test_no_rows_draw_nothing():
    assert sample(torch.empty(0, VOCAB), []) == []
