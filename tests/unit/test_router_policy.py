from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import router.policy
from kvrelay.types import Peer, Role
from router.legs import pairs_of, with_last_resort
from router.policy.cap import decode_cap, decode_measure, prefill_cap_s, prefill_measure
from router.policy.policies import POLICIES
from router.policy.prefix_aware import prefix_aware
from router.policy.rates import SPREAD_MAX, predicted
from router.policy.values import Ask, Candidate, Candidates, Choice, Disaggregate, Load

README = (Path(router.policy.__file__).parent / "README.md").read_text()
RATE = 400.0
DRAWS = 1200


def one(name: str, role: Role, **changes: object) -> Candidate:
    fields = {"prefill_tokens_per_s": RATE, "step_s": 0.05, "kv_bytes_per_token": 23040.0}
    return Candidate(peer=Peer(name, "i", f"{name}:1"), role=role, **{**fields, **changes})


def fleet(*candidates: Candidate) -> Candidates:
    return Candidates(
        tuple(c for c in candidates if c.role.decodes),
        tuple(c for c in candidates if c.role.prefills),
    )


def ask(prompt_tokens: int = 1000, rule: str = "auto", **changes: object) -> Ask:
    return Ask(prompt_tokens=prompt_tokens, output_tokens=64, disaggregate=Disaggregate(rule), **changes)


def choose(asked: Ask, candidates: Candidates, seed: int = 1) -> Choice:
    return prefix_aware(asked, candidates, Random(seed))[0]


def names(choice: Choice) -> tuple[str, str]:
    return choice.decode.peer.replica_id, choice.prefill.peer.replica_id if choice.prefill else ""


def even(counts: Counter[str], among: int) -> bool:
    """Within five standard deviations of an even share."""
    total = sum(counts.values())
    share = total / among
    slack = 5 * (total * (1 / among) * (1 - 1 / among)) ** 0.5
    return len(counts) == among and all(abs(count - share) <= slack for count in counts.values())


P2D2 = fleet(one("p1", Role.PREFILL), one("p2", Role.PREFILL), one("d1", Role.DECODE), one("d2", Role.DECODE))

# ---------------------------------------------------------------- the load cap


def candidates_of(role: Role) -> st.SearchStrategy[list[Candidate]]:
    made = st.builds(
        Candidate,
        peer=st.just(Peer("", "", "")),
        role=st.just(role),
        held_tokens=st.integers(0, 31).map(lambda blocks: 32 * blocks),
        load=st.builds(
            Load,
            prefill_s=st.floats(0, 20),
            tokens=st.integers(0, 50_000),
            sequences=st.integers(0, 40),
        ),
        weight=st.sampled_from([0.5, 1.0, 2.0]),
        prefill_tokens_per_s=st.floats(200, 800),
        step_s=st.floats(0.01, 0.1),
        kv_bytes_per_token=st.just(23040.0),
    )
    return st.lists(made, min_size=1, max_size=6).map(
        lambda many: [replace(c, peer=Peer(f"{role}{at}", "i", "a:1")) for at, c in enumerate(many)]
    )


FLEETS = st.builds(lambda *pools: fleet(*pools[0], *pools[1]), candidates_of(Role.DECODE), candidates_of(Role.PREFILL))


@settings(max_examples=300)
@given(candidates=FLEETS, rule=st.sampled_from(["auto", "always"]), seed=st.integers(0, 9))
def test_the_cap_is_never_passed_while_a_feasible_replica_exists(candidates, rule, seed):
    asked = ask(rule=rule)
    decode_most = decode_cap(candidates.decoders, asked)
    remote_most_s = prefill_cap_s(candidates.prefills, asked.epsilon)
    local_most_s = prefill_cap_s(candidates.decoders, asked.epsilon)
    # The least loaded is never above the mean: on both sides of a remote pair somebody is feasible.
    assert min(map(decode_measure, candidates.decoders)) <= decode_most
    assert min(map(prefill_measure, candidates.prefills)) <= remote_most_s
    choice = choose(asked, candidates, seed)
    assert choice.reason != "overloaded"
    assert decode_measure(choice.decode) <= decode_most
    assert prefill_measure(choice.reader) <= (remote_most_s if choice.prefill else local_most_s)


@settings(max_examples=100)
@given(candidates=FLEETS, rule=st.sampled_from(list(Disaggregate)), name=st.sampled_from(list(POLICIES)))
def test_every_policy_gives_distinct_pairs_that_the_rule_allows(candidates, rule, name):
    choices = POLICIES[name](ask(rule=rule), candidates, Random(3))
    assert choices
    assert len({names(choice) for choice in choices}) == len(choices)
    for choice in choices:
        assert f"`{choice.reason}`" in README, "every reason word is explained"
        assert f"`{choice.decider_reason}`" in README
    if rule is not Disaggregate.AUTO:
        assert {choice.prefill is not None for choice in choices} == {rule is Disaggregate.ALWAYS}


def test_a_hot_prefix_spreads_over_a_pool_within_the_cap():
    loads: Counter[str] = Counter()
    holders = {"b0"}
    rng = Random(5)
    for _ in range(512):
        pool = fleet(
            *(
                one(
                    name,
                    Role.BOTH,
                    held_tokens=992 if name in holders else 0,
                    load=Load(sequences=loads[name], tokens=1064 * loads[name]),
                    max_sequences=512,
                )
                for name in (f"b{index}" for index in range(8))
            )
        )
        choice = prefix_aware(ask(rule="never"), pool, rng)[0]
        loads[choice.decode.peer.replica_id] += 1
        holders.add(choice.decode.peer.replica_id)
    mean = 512 / 8
    assert max(loads.values()) <= 1.25 * mean + 1
    assert len(holders) > 1, "the prefix was replicated"


# ---------------------------------------------------------------- equals


@pytest.mark.parametrize("name", list(POLICIES))
@pytest.mark.parametrize("rule", ["auto", "always", "never"])
def test_equal_cold_replicas_share_evenly(name, rule):
    pool = fleet(*(one(f"d{i}", Role.DECODE) for i in range(4)), *(one(f"p{i}", Role.PREFILL) for i in range(4)))
    rng = Random(11)
    chosen = [POLICIES[name](ask(rule=rule, turn=turn), pool, rng)[0] for turn in range(DRAWS)]
    assert even(Counter(names(choice)[0] for choice in chosen), 4)
    if rule == "always":
        assert even(Counter(names(choice)[1] for choice in chosen), 4)


def test_equals_share_evenly_in_a_pool_larger_than_what_is_scored():
    pool = fleet(*(one(f"b{i}", Role.BOTH) for i in range(24)))
    rng = Random(2)
    chosen = Counter(names(prefix_aware(ask(rule="never"), pool, rng)[0])[0] for _ in range(24 * 200))
    assert even(chosen, 24)


def test_slightly_different_measured_speeds_do_not_send_everything_to_the_fastest():
    speeds = predicted([380.0, 400.0, 0.0, 430.0], 1.0)
    pool = fleet(*(one(f"b{i}", Role.BOTH, prefill_tokens_per_s=speed) for i, speed in enumerate(speeds)))
    rng = Random(4)
    assert even(Counter(names(prefix_aware(ask(rule="never"), pool, rng)[0])[0] for _ in range(DRAWS)), 4)


def test_the_idle_one_of_two_cold_replicas_is_chosen():
    busy = one("d1", Role.DECODE, load=Load(sequences=1, tokens=100))
    choice = choose(ask(rule="never"), fleet(busy, one("d2", Role.DECODE)))
    assert (names(choice), choice.reason) == (("d2", ""), "cold")


# ---------------------------------------------------------------- prefixes


def held(candidates: Candidates, **tokens: int) -> Candidates:
    return fleet(*(replace(c, held_tokens=tokens.get(c.peer.replica_id, c.held_tokens)) for c in candidates.everyone()))


def loaded(candidates: Candidates, **loads: Load) -> Candidates:
    return fleet(*(replace(c, load=loads.get(c.peer.replica_id, c.load)) for c in candidates.everyone()))


@pytest.mark.parametrize("rule", ["auto", "always"])
def test_requests_with_one_prefix_meet_at_its_holders(rule):
    choice = choose(ask(rule=rule), held(P2D2, p2=960, d1=960))
    assert choice.decode.peer.replica_id == "d1"
    assert choice.reason == "prefix"
    assert names(choice)[1] == ("p2" if rule == "always" else "")


def test_a_loaded_holder_under_the_cap_is_preferred():
    one_more = Load(sequences=1, tokens=900)
    choice = choose(ask(rule="never"), loaded(held(P2D2, d1=960), d1=one_more))
    assert (names(choice)[0], choice.reason) == ("d1", "prefix")


def test_a_holder_over_the_cap_spills_and_is_named_as_a_source():
    crowd = Load(sequences=4, tokens=4 * 1064)
    choice = choose(ask(rule="never"), loaded(held(P2D2, d1=960), d1=crowd))
    assert (names(choice)[0], choice.reason) == ("d2", "spill")
    assert choice.holder is not None
    assert choice.holder.peer.replica_id == "d1"


def test_over_the_cap_the_next_best_holder_comes_before_the_least_loaded():
    pool = fleet(*(one(f"d{i}", Role.DECODE) for i in range(1, 5)))
    crowd = Load(sequences=9, tokens=9 * 1064)
    choice = choose(ask(rule="never"), loaded(held(pool, d1=960, d2=640), d1=crowd, d2=Load(sequences=1, tokens=900)))
    assert (names(choice)[0], choice.reason) == ("d2", "spill")
    assert choice.holder is not None
    assert choice.holder.peer.replica_id == "d1"


def test_a_prefill_replica_over_the_cap_is_passed_over():
    choice = choose(ask(rule="always"), loaded(held(P2D2, p1=960), p1=Load(prefill_s=30.0)))
    assert (names(choice)[1], choice.reason) == ("p2", "spill")
    assert choice.holder is not None
    assert choice.holder.peer.replica_id == "p1"


def test_an_idle_replica_wins_over_a_holder_whose_queue_is_longer_than_what_it_saves():
    pool = fleet(*(one(f"p{i}", Role.PREFILL) for i in range(1, 4)), one("d1", Role.DECODE))
    choice = choose(ask(rule="always"), loaded(held(pool, p1=32), p1=Load(prefill_s=0.6)))
    assert choice.reason == "sooner"
    assert names(choice)[1] in {"p2", "p3"}


def test_the_reader_that_holds_the_most_needs_no_holder():
    assert choose(ask(rule="never"), held(P2D2, d1=960, p1=640)).holder is None


def test_a_decode_replica_that_holds_more_than_the_prefill_replica_is_its_holder():
    for seed in range(20):
        choice = choose(ask(rule="always"), held(P2D2, d1=960, p1=640, p2=640), seed)
        assert names(choice)[0] == "d1"
        assert choice.holder is not None
        assert choice.holder.peer.replica_id == "d1"


def test_of_several_holders_the_pairs_own_decode_replica_is_named():
    for seed in range(20):
        choice = choose(ask(rule="always"), held(P2D2, d1=960, d2=960), seed)
        assert choice.holder is not None
        assert choice.holder.peer.replica_id == names(choice)[0]


# ---------------------------------------------------------------- the decider


def test_auto_reads_a_short_prompt_locally_on_an_idle_fleet_and_says_why():
    choice = choose(ask(prompt_tokens=40), P2D2)
    assert (choice.prefill, choice.decider_reason) == (None, "short_prompt")
    assert choice.rival is not None
    assert choice.cost.total_s < choice.rival.total_s


def test_auto_reads_what_is_mostly_cached_where_it_is():
    choice = choose(ask(prompt_tokens=4000), held(P2D2, d2=3968))
    assert (names(choice), choice.decider_reason) == (("d2", ""), "cached_here")


def test_auto_spares_running_streams_a_long_prefill():
    streams = Load(sequences=6, tokens=3000)
    choice = choose(ask(prompt_tokens=2000), loaded(P2D2, d1=streams, d2=streams))
    assert choice.prefill is not None
    assert choice.decider_reason == "spares_streams"
    assert choice.rival is not None
    assert choice.rival.alone_s <= choice.cost.alone_s


def test_auto_goes_remote_when_the_prefix_lies_there():
    choice = choose(ask(prompt_tokens=2000), held(P2D2, p1=1984))
    assert (names(choice)[1], choice.decider_reason, choice.reason) == ("p1", "remote_sooner", "prefix")


def test_always_without_a_prefill_replica_reads_locally_and_says_why():
    choice = choose(ask(rule="always"), fleet(one("d1", Role.DECODE)))
    assert (choice.prefill, choice.decider_reason) == (None, "no_prefill")


def test_an_aggregated_replica_prefills_for_another_only_when_no_dedicated_one_is_there():
    both = fleet(one("b1", Role.BOTH), one("b2", Role.BOTH))
    decode, prefill = names(choose(ask(rule="always"), both))
    assert {decode, prefill} == {"b1", "b2"}
    mixed = fleet(one("b1", Role.BOTH), one("b2", Role.BOTH), one("p1", Role.PREFILL))
    assert names(choose(ask(rule="always"), mixed))[1] == "p1"


def test_never_reads_every_prompt_where_it_is_decoded():
    choice = choose(ask(rule="never"), held(P2D2, p1=960))
    assert (choice.prefill, choice.decider_reason) == (None, "never")


# ---------------------------------------------------------------- rates and legs


def test_a_replica_that_has_not_measured_has_its_pools_median():
    assert predicted([0.0, 100.0, 300.0, 200.0], 7.0)[0] == 200.0
    assert predicted([0.0, 0.0], 7.0) == [7.0, 7.0]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=9))
def test_predicted_rates_stay_near_the_median(measured):
    known = sorted(rate for rate in measured if rate > 0)
    middle = (known[(len(known) - 1) // 2] + known[len(known) // 2]) / 2 if known else 7.0
    for rate in predicted(measured, 7.0):
        assert middle / SPREAD_MAX * 0.999 <= rate <= middle * SPREAD_MAX * 1.001


def test_legs_carry_prices_and_the_cap_with_the_own_price_on_top():
    asked = ask(rule="always")
    choices = prefix_aware(asked, P2D2, Random(1))
    pair = pairs_of(choices, asked, P2D2)[0]
    assert (pair.decode.sequences, pair.decode.tokens, pair.decode.prefill_s) == (1, 1064, 0.0)
    assert pair.prefill is not None
    assert pair.prefill.prefill_s == pytest.approx(1000 / RATE)
    assert pair.prefill.cap_prefill_s == pytest.approx(256 / RATE + 1000 / RATE)
    assert pair.decode.cap_tokens >= 2 * 1064
    local = pairs_of(prefix_aware(ask(rule="never"), P2D2, Random(1)), asked, P2D2)[0]
    assert local.prefill is None
    assert local.decode.prefill_s == pytest.approx(1000 / RATE)


def test_the_last_pair_to_book_has_no_cap():
    asked = ask(rule="always")
    choices = with_last_resort(prefix_aware(asked, P2D2, Random(1)))
    last = pairs_of(choices, asked, P2D2)[-1]
    assert choices[-1].reason == "overloaded"
    assert last.prefill is not None
    assert (last.decode.cap_sequences, last.decode.cap_tokens, last.prefill.cap_prefill_s) == (0, 0, 0.0)
