from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.config import LIVENESS_TTL_S
from kvrelay.directory import BlockBatch, BlocksSeen, CaughtUp, ReplicaBeat, ReplicaGone, ReplicaSeen, Reset, Watched
from kvrelay.kv.keys import make_identity, xor_keys
from kvrelay.types import KvLayout, Peer, Replica, ReplicaState, Role
from router.mirror import Mirror
from router.view import FleetView

IDENTITY = make_identity(
    model="m", model_fingerprint="w", tokenizer_fingerprint="t", block_tokens=4, context_tokens=1024
)
LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=8, dtype="float32", page_tokens=4, block_tokens=4, page_bytes=256)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def peer(replica_id: str, incarnation: str = "one") -> Peer:
    return Peer(replica_id, incarnation, f"{replica_id}:1")


def replica(replica_id: str, incarnation: str = "one", epoch: int = 1) -> Replica:
    return Replica(
        peer=peer(replica_id, incarnation),
        role=Role.BOTH,
        identity=IDENTITY,
        layout=LAYOUT,
        pages=64,
        max_sequences=4,
        epoch=epoch,
    )


class Source:
    """A replica's true block set, and the batches that lead to it."""

    def __init__(self, replica_id: str, incarnation: str = "one") -> None:
        self.peer = peer(replica_id, incarnation)
        self.keys: set[bytes] = set()
        self.seq = 0

    def batch(self, added: set[int], removed: set[int], *, cleared: bool = False) -> BlockBatch:
        self.seq += 1
        if cleared:
            self.keys = set()
        self.keys |= {key(number) for number in added}
        self.keys -= {key(number) for number in removed}
        return BlockBatch(
            seq=self.seq,
            added=tuple(key(number) for number in sorted(added)),
            removed=tuple(key(number) for number in sorted(removed)),
            cleared=cleared,
            count=len(self.keys),
            xor=xor_keys(self.keys),
        )

    def snapshot(self, part_keys: int) -> list[BlockBatch]:
        keys = sorted(self.keys)
        parts = [tuple(keys[at : at + part_keys]) for at in range(0, len(keys), part_keys)] or [()]
        return [
            BlockBatch(
                seq=self.seq,
                added=part,
                cleared=index == 0,
                count=len(keys) if index == len(parts) - 1 else 0,
                xor=xor_keys(keys) if index == len(parts) - 1 else b"",
            )
            for index, part in enumerate(parts)
        ]


def apply(view: FleetView, *events: object) -> FleetView:
    for event in events:
        view.apply(event, now_s=0.0)
    return view


def seen(source: Source, batch: BlockBatch) -> BlocksSeen:
    return BlocksSeen(source.peer, batch)


def two_holders() -> tuple[FleetView, Source, Source]:
    a, b = Source("a"), Source("b")
    view = apply(FleetView(), ReplicaSeen(replica("a")), ReplicaSeen(replica("b")))
    apply(view, seen(a, a.batch({1, 2, 3}, set())), seen(b, b.batch({1}, set())), CaughtUp())
    return view, a, b


NUMBERS = st.sets(st.integers(1, 8), max_size=4)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("batch"), st.sampled_from("abc"), NUMBERS, NUMBERS, st.booleans()),
        st.tuples(st.just("gone"), st.sampled_from("abc")),
        st.tuples(st.just("restart"), st.sampled_from("abc")),
        st.tuples(st.just("epoch"), st.sampled_from("abc")),
        st.tuples(st.just("snapshot"), st.sampled_from("abc"), st.integers(1, 3)),
        st.tuples(st.just("again"), st.sampled_from("abc")),
    ),
    max_size=30,
)


@settings(max_examples=200, deadline=None)
@given(steps=STEPS, wanted=st.lists(st.integers(1, 8), max_size=6))
def test_any_sequence_of_events_leaves_what_a_dict_of_sets_would_hold(steps, wanted):
    view = FleetView()
    model: dict[str, Source] = {}
    starts = 0
    last: dict[str, BlockBatch] = {}
    for kind, name, *rest in steps:
        if name not in model or kind in {"restart", "epoch"}:
            starts += 1
            again = kind == "epoch" and name in model
            model[name] = Source(name, model[name].peer.incarnation if again else f"s{starts}")
            last.pop(name, None)
            apply(view, ReplicaSeen(replica(name, model[name].peer.incarnation, epoch=starts)))
        source = model[name]
        match kind, rest:
            case "batch", [added, removed, cleared]:
                last[name] = source.batch(added, removed - added, cleared=cleared)
                apply(view, seen(source, last[name]))
            case "snapshot", [part_keys]:
                apply(view, *(seen(source, part) for part in source.snapshot(part_keys)))
            case "again", [] if name in last and not last[name].cleared:
                apply(view, seen(source, last[name]))  # a replay of what is known
            case "gone", []:
                apply(view, ReplicaGone(source.peer, "expired"))
                del model[name]
    assert not view.damaged
    assert {member.peer.replica_id: member.blocks for member in view.members()} == {n: s.keys for n, s in model.items()}
    assert view.blocks == len(set().union(*(source.keys for source in model.values())))
    assert view.longest_prefix([key(number) for number in wanted]) == expected_prefix(model, wanted)


def expected_prefix(model: dict[str, Source], wanted: list[int]) -> dict[str, int]:
    held = {}
    for name, source in model.items():
        depth = next((at for at, number in enumerate(wanted) if key(number) not in source.keys), len(wanted))
        if depth:
            held[name] = depth
    return held


def test_the_longest_prefix_stops_at_the_first_key_that_a_replica_lacks():
    view, _, _ = two_holders()
    assert view.longest_prefix([key(1), key(2), key(9), key(3)]) == {"a": 2, "b": 1}
    assert view.longest_prefix([key(9), key(1)]) == {}
    assert view.longest_prefix([]) == {}


def test_a_gap_in_seq_is_noticed_and_mended_by_a_snapshot():
    view, a, _ = two_holders()
    a.batch({7}, set())  # lost on the way
    apply(view, seen(a, a.batch({8}, set())))
    assert view.damaged
    apply(view, *(seen(a, part) for part in a.snapshot(2)))
    assert not view.damaged
    assert view.longest_prefix([key(7)]) == {"a": 1}


@pytest.mark.parametrize("wrong", [{"count": 9}, {"xor": key(77)}])
def test_a_set_that_differs_in_count_or_xor_is_noticed(wrong):
    view, a, _ = two_holders()
    apply(view, seen(a, replace(a.batch({4}, set()), **wrong)))
    assert view.damaged


def test_removing_an_unknown_block_does_not_lose_the_rest_of_the_batch():
    view, a, _ = two_holders()
    batch = a.batch({4}, {99, 2})
    apply(view, seen(a, batch))
    assert not view.damaged
    assert view.longest_prefix([key(1), key(2)]) == {"a": 1, "b": 1}
    assert view.longest_prefix([key(4)]) == {"a": 1}


def test_clearing_all_blocks_is_honoured():
    view, a, _ = two_holders()
    apply(view, seen(a, a.batch(set(), set(), cleared=True)))
    assert view.longest_prefix([key(1)]) == {"b": 1}


def test_memory_of_a_replica_that_went_is_dropped_and_its_slot_reused():
    view, _, _ = two_holders()
    apply(view, ReplicaGone(peer("a"), "expired"), ReplicaGone(peer("b"), "expired"))
    assert view.blocks == 0
    assert list(view.members()) == []
    assert apply(view, ReplicaSeen(replica("c")), ReplicaSeen(replica("d"))).longest_prefix([key(1)]) == {}
    assert sorted(member.slot for member in view.members()) == [0, 1]


def test_a_restarted_replica_gets_no_credit_for_blocks_it_lost():
    view, _, _ = two_holders()
    apply(view, ReplicaSeen(replica("a", "two")))
    assert view.longest_prefix([key(1)]) == {"b": 1}


def test_events_of_an_earlier_incarnation_change_nothing():
    view, a, _ = two_holders()
    apply(view, ReplicaSeen(replica("a", "two")))
    late = seen(a, a.batch({5}, set()))
    apply(view, late, ReplicaGone(a.peer, "expired"), ReplicaBeat(a.peer, ReplicaState(steps=9)))
    assert view.find(peer("a", "two")) is not None
    assert view.longest_prefix([key(5)]) == {}


# ---------------------------------------------------------------- reloads


def watched(event: object, position: str = "") -> Watched:
    return Watched(position, event)


def mirror_of_two() -> Mirror:
    mirror = Mirror()
    for event in (Reset(), ReplicaSeen(replica("a")), ReplicaSeen(replica("b"))):
        mirror.take(watched(event), now_s=0.0)
    mirror.take(watched(CaughtUp(), "p1"), now_s=0.0)
    return mirror


def ids(mirror: Mirror) -> list[str]:
    return [member.peer.replica_id for member in mirror.view.members()]


def test_the_old_view_serves_until_the_new_one_has_caught_up():
    mirror = mirror_of_two()
    mirror.take(watched(Reset()), now_s=1.0)
    mirror.take(watched(ReplicaSeen(replica("c"))), now_s=1.0)
    assert ids(mirror) == ["a", "b"]
    mirror.take(watched(CaughtUp(), "p2"), now_s=1.0)
    assert ids(mirror) == ["a", "b", "c"]
    assert mirror.position == "p2"


def test_a_watch_that_breaks_half_way_through_a_reload_changes_nothing():
    mirror = mirror_of_two()
    mirror.take(watched(Reset()), now_s=1.0)
    mirror.broken()
    assert (ids(mirror), mirror.position, mirror.loading) == (["a", "b"], "p1", False)


def test_replicas_that_an_empty_store_forgot_are_kept_until_their_time_to_live_is_over():
    mirror = mirror_of_two()
    mirror.take(watched(Reset()), now_s=10.0)
    mirror.take(watched(CaughtUp(), "p2"), now_s=10.0)
    assert ids(mirror) == ["a", "b"]
    mirror.take(watched(ReplicaSeen(replica("a", epoch=2))), now_s=11.0)
    assert mirror.view.expire(now_s=10.0 + LIVENESS_TTL_S - 0.1) == []
    assert mirror.view.expire(now_s=10.0 + LIVENESS_TTL_S) == [peer("b")]
    assert ids(mirror) == ["a"]


def test_a_replica_that_goes_during_a_reload_goes_from_the_view_in_use_too():
    mirror = mirror_of_two()
    mirror.take(watched(Reset()), now_s=1.0)
    mirror.take(watched(ReplicaGone(peer("a"), "expired")), now_s=1.0)
    assert ids(mirror) == ["b"]
