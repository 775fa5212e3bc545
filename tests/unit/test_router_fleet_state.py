from dataclasses import replace

import pytest

from kvrelay.decode_events import Accepted, Finished, LegMoved, LegState
from kvrelay.directory import BlockBatch, BlocksSeen, CaughtUp, ReplicaBeat, ReplicaGone, ReplicaSeen, Reset, Watched
from kvrelay.errors import InvalidArgument, ResourceExhausted
from kvrelay.kv.keys import make_identity, xor_keys
from kvrelay.logs import get_logger
from kvrelay.types import FinishReason, KvLayout, ModelIdentity, Peer, Replica, ReplicaState, Role, Usage
from router.fleet import SUSPECT_S, Fleet, Prefixes
from router.gate import Gate
from router.lifelines import Lifelines
from router.pool import Pool
from router.tally import Tally

LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=8, dtype="float32", page_tokens=4, block_tokens=4, page_bytes=256)


def identity(**changes: object) -> ModelIdentity:
    fields = {
        "model": "m",
        "model_fingerprint": "w",
        "tokenizer_fingerprint": "t",
        "block_tokens": 4,
        "context_tokens": 64,
    }
    return make_identity(**{**fields, **changes})


def replica(name: str, role: Role = Role.BOTH, **changes: object) -> Replica:
    base = Replica(
        peer=Peer(name, "i", f"{name}:1"), role=role, identity=identity(), layout=LAYOUT, pages=9, max_sequences=4
    )
    return replace(base, **changes)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def fleet_of(*replicas: Replica, clock: Clock | None = None) -> Fleet:
    fleet = Fleet(model="m", tokenizer_fingerprint="t", logger=get_logger("test"), clock=clock or Clock())
    for event in (Reset(), *map(ReplicaSeen, replicas), CaughtUp()):
        fleet.take(Watched("", event))
    return fleet


def decoders(fleet: Fleet, **given: object) -> list[str]:
    return [c.peer.replica_id for c in fleet.candidates(Prefixes(1), **given).decoders]


# ---------------------------------------------------------------- the pool


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("tokenizer_fingerprint", identity(tokenizer_fingerprint="x")),
        ("golden_keys", replace(identity(), golden_keys=b"x" * 64)),
        ("key_version", replace(identity(), key_version=9)),
        ("protocol_major", replace(identity(), protocol_major=9)),
    ],
)
def test_a_replica_that_this_router_cannot_serve_is_refused_by_field(field, other):
    pool = Pool(model="m", tokenizer_fingerprint="t")
    assert pool.sort([replica("a", identity=other)])["a"].field == field
    assert pool.identity is None


def test_a_replica_that_differs_from_the_first_is_refused_until_the_first_ones_have_gone():
    pool = Pool(model="m", tokenizer_fingerprint="t")
    old, new = replica("a"), replica("b", identity=identity(model_fingerprint="w2"))
    assert pool.sort([old]) == {}
    assert pool.sort([old, new])["b"].field == "model_fingerprint"
    assert pool.sort([new]) == {}
    assert pool.identity == new.identity


# ---------------------------------------------------------------- who may serve


def test_only_ready_replicas_that_fit_are_candidates():
    fleet = fleet_of(
        replica("a"),
        replica("b", draining=True),
        replica("c", identity=identity(block_tokens=8)),
        replica("d"),
        replica("p", Role.PREFILL),
    )
    fleet.take(Watched("", ReplicaBeat(replica("d").peer, ReplicaState(ready=False))))
    assert decoders(fleet) == ["a"]
    assert [c.peer.replica_id for c in fleet.candidates(Prefixes(1)).prefills] == ["a", "p"]
    assert {m.peer.replica_id: fleet.standing(m) for m in fleet.members()} == {
        "a": "ready",
        "b": "draining",
        "c": "refused: block_tokens",
        "d": "stalled",
        "p": "ready",
    }


def test_a_replica_that_failed_is_passed_over_for_a_while_and_then_tried_again():
    clock = Clock()
    fleet = fleet_of(replica("a"), replica("b"), clock=clock)
    fleet.suspect(replica("a").peer)
    assert decoders(fleet) == ["b"]
    clock.now_s += SUSPECT_S
    assert decoders(fleet) == ["a", "b"]
    fleet.suspect(replica("a").peer)
    fleet.trust(replica("a").peer)
    assert decoders(fleet) == ["a", "b"]


def test_another_start_of_a_replica_is_not_held_to_account_for_the_last_one():
    fleet = fleet_of(replica("a"))
    fleet.suspect(replica("a").peer)
    again = Peer("a", "i2", "a:2")
    fleet.take(Watched("", ReplicaSeen(replica("a", peer=again))))
    assert decoders(fleet, avoid=frozenset({replica("a").peer})) == ["a"]


def test_a_prefix_never_covers_the_last_token():
    fleet = fleet_of(replica("a"))
    keys = [bytes([number]) * 16 for number in range(1, 4)]
    batch = BlockBatch(seq=1, added=tuple(keys), count=3, xor=xor_keys(keys))
    fleet.take(Watched("", BlocksSeen(replica("a").peer, batch)))
    assert fleet.prefixes(keys, 12).held == {"a": 8}
    assert fleet.prefixes(keys, 13).held == {"a": 12}
    assert fleet.prefixes(keys[:0], 3).most == 0


# ---------------------------------------------------------------- lifelines


@pytest.mark.parametrize(
    ("event", "told"),
    [
        (ReplicaGone(replica("a").peer, "expired"), True),
        (ReplicaGone(replica("a").peer, "deregistered"), False),
        (ReplicaSeen(replica("a", peer=Peer("a", "i2", "a:2"))), True),
        (ReplicaSeen(replica("a", draining=True)), False),
        (ReplicaBeat(replica("a").peer, ReplicaState(ready=False)), True),
        (ReplicaBeat(replica("a").peer, ReplicaState(steps=3)), False),
    ],
)
def test_streams_are_cut_when_their_replica_is_lost_and_only_then(event, told):
    fleet = fleet_of(replica("a"), replica("b"))
    heard: list[str] = []
    with fleet.lifelines.hold(replica("a").peer, heard.append), fleet.lifelines.hold(replica("b").peer, heard.append):
        fleet.take(Watched("", event))
    assert len(heard) == told


def test_nobody_is_told_after_letting_go():
    lines = Lifelines()
    heard: list[str] = []
    with lines.hold(replica("a").peer, heard.append):
        pass
    assert lines.cut(replica("a").peer, "expired") == 0
    assert heard == []


# ---------------------------------------------------------------- gate and tally


def test_the_gate_lets_so_many_in_and_each_id_once():
    gate = Gate(2)
    with gate.enter("a"):
        with pytest.raises(InvalidArgument), gate.enter("a"):
            pass
        with gate.enter("b"), pytest.raises(ResourceExhausted), gate.enter("c"):
            pass
        with gate.enter("c"):
            assert len(gate) == 2
    assert len(gate) == 0


def test_times_are_those_of_the_first_and_last_token_over_all_attempts():
    tally = Tally(prompt_tokens=10, began_at_s=5.0)
    assert (tally.ttft_s, tally.tpot_s) == (0.0, 0.0)
    tally.wrote(1, now_s=6.0)
    tally.attempt(remote=False)
    tally.wrote(2, now_s=9.0)
    assert (tally.ttft_s, tally.tpot_s) == (1.0, 1.5)


def test_usage_is_the_replicas_report_with_the_clients_prompt_and_the_whole_output():
    tally = Tally(prompt_tokens=10, began_at_s=0.0)
    tally.attempt(remote=True)
    tally.told(Finished(FinishReason.STOP, Usage(prompt_tokens=14, cached_tokens=12, output_tokens=1, pulled_bytes=5)))
    usage = tally.usage(5)
    assert (usage.prompt_tokens, usage.cached_tokens, usage.output_tokens, usage.pulled_bytes) == (10, 10, 5, 5)


@pytest.mark.parametrize(
    ("events", "pulled", "computed"),
    [
        ([Accepted(4), LegMoved(LegState.PULLED, replica("p").peer)], 6, 0),
        ([Accepted(4), LegMoved(LegState.LOCAL, None, "timeout")], 0, 6),
    ],
)
def test_without_a_report_usage_tells_what_is_known(events, pulled, computed):
    tally = Tally(prompt_tokens=10, began_at_s=0.0)
    tally.attempt(remote=True)
    for event in events:
        tally.told(event)
    usage = tally.usage(3)
    assert (usage.cached_tokens, usage.pulled_tokens, usage.decode_computed_tokens) == (4, pulled, computed)
