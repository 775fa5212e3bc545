"""A router's mirror of the directory: who serves, in what state, and who holds which block. Pure, no I/O."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from kvrelay.directory import BlockBatch, BlocksSeen, CaughtUp, ReplicaBeat, ReplicaGone, ReplicaSeen, Reset, WatchEvent
from kvrelay.kv.keys import xor_keys
from kvrelay.types import KEY_BYTES, Peer, Replica, ReplicaState

NO_KEYS: Final = bytes(KEY_BYTES)
"""XOR of no keys."""


@dataclass(slots=True)
class Member:
    """A replica as the directory tells it.

    Attributes:
        replica: its entry.
        slot: its bit in the index's holder masks.
        heard_at_s: when its last heartbeat was seen, on the caller's clock.
        seq: number of the last batch of its block set.
        blocks: keys it holds.
        xor: XOR of those keys.
        loading: parts of a snapshot are coming, all with the same seq.
        damaged: its block set here is not what the directory has; a reload mends it.
        kept_until_s: set when a reload did not bring it back: it is dropped then unless it is seen again.
    """

    replica: Replica
    slot: int
    heard_at_s: float
    seq: int = 0
    blocks: set[bytes] = field(default_factory=set)
    xor: bytes = NO_KEYS
    loading: bool = False
    damaged: bool = False
    kept_until_s: float = float("inf")

    @property
    def peer(self) -> Peer:
        """Who it is."""
        return self.replica.peer


class FleetView:
    """The mirror. Memory per (block, holder) is one set entry and one bit."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._holders: dict[bytes, int] = {}
        self._free_slots: list[int] = []
        self.caught_up = False

    def members(self) -> Iterator[Member]:
        """Go through all replicas, by id."""
        return (self._members[name] for name in sorted(self._members))

    def find(self, peer: Peer) -> Member | None:
        """Return the member that is this very start of the replica, if it is known."""
        member = self._members.get(peer.replica_id)
        return member if member and member.peer.incarnation == peer.incarnation else None

    @property
    def damaged(self) -> bool:
        """True when some block set needs a reload."""
        return any(member.damaged for member in self._members.values())

    @property
    def blocks(self) -> int:
        """Distinct blocks that are held somewhere."""
        return len(self._holders)

    def apply(self, event: WatchEvent, *, now_s: float) -> None:
        """Take in one event of the watch. Events about replicas that are not known are ignored."""
        match event:
            case ReplicaSeen(replica):
                self._seen(replica, now_s)
            case ReplicaGone(peer):
                if self.find(peer):
                    self._drop(peer.replica_id)
            case ReplicaBeat(peer, state):
                self._beat(peer, state, now_s)
            case BlocksSeen(peer, batch):
                if member := self.find(peer):
                    self._change(member, batch)
            case Reset():
                for replica_id in list(self._members):
                    self._drop(replica_id)
                self.caught_up = False
            case CaughtUp():
                self.caught_up = True

    def keep(self, member: Member, *, until_s: float) -> None:
        """Take over a replica from an older view for a while, without its blocks: the store may have lost it."""
        if member.peer.replica_id not in self._members:
            kept = self._enter(member.replica, member.heard_at_s)
            kept.kept_until_s = min(until_s, member.kept_until_s)

    def expire(self, *, now_s: float) -> list[Peer]:
        """Drop replicas that were kept and did not come back; return them."""
        over = [member.peer for member in self._members.values() if member.kept_until_s <= now_s]
        for peer in over:
            self._drop(peer.replica_id)
        return over

    def longest_prefix(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Return how many of `keys`, from the first on, each replica holds; replicas that hold none are left out."""
        holders = sum(1 << member.slot for member in self._members.values())
        ended: list[tuple[int, int]] = []
        depth = 0
        for depth, key in enumerate(keys):
            left = holders & self._holders.get(key, 0)
            if left != holders:
                ended.append((holders ^ left, depth))
                holders = left
            if not holders:
                break
        else:
            ended.append((holders, len(keys)))
        return {
            member.peer.replica_id: blocks
            for mask, blocks in ended
            if blocks
            for member in self._members.values()
            if mask >> member.slot & 1
        }

    # ------------------------------------------------------------ members

    def _seen(self, replica: Replica, now_s: float) -> None:
        known = self.find(replica.peer)
        if known and known.replica.epoch == replica.epoch:
            known.replica = replica
            known.heard_at_s = now_s
            known.kept_until_s = float("inf")
            return
        # Another incarnation, or a new epoch of this one: the block set starts empty.
        self._drop(replica.peer.replica_id)
        self._enter(replica, now_s)

    def _enter(self, replica: Replica, now_s: float) -> Member:
        slot = self._free_slots.pop() if self._free_slots else len(self._members)
        member = Member(replica=replica, slot=slot, heard_at_s=now_s)
        self._members[replica.peer.replica_id] = member
        return member

    def _drop(self, replica_id: str) -> None:
        member = self._members.get(replica_id)
        if member:
            self._clear(member)
            del self._members[replica_id]
            self._free_slots.append(member.slot)

    def _beat(self, peer: Peer, state: ReplicaState, now_s: float) -> None:
        if member := self.find(peer):
            member.replica = replace(member.replica, state=state)
            member.heard_at_s = now_s

    # ------------------------------------------------------------ blocks

    def _change(self, member: Member, batch: BlockBatch) -> None:
        if batch.cleared:
            self._clear(member)
            member.damaged = False
            member.loading = True
        elif batch.seq < member.seq or (batch.seq == member.seq and not member.loading):
            return  # a replay of what the snapshot had already
        elif batch.seq > member.seq + 1:
            member.damaged = True
        member.seq = batch.seq
        self._add(member, batch.added)
        self._remove(member, batch.removed)
        if batch.xor:  # absent in the parts of a snapshot before its last
            member.loading = False
            if (batch.count, batch.xor) != (len(member.blocks), member.xor):
                member.damaged = True

    def _add(self, member: Member, keys: Sequence[bytes]) -> None:
        bit = 1 << member.slot
        new = [key for key in dict.fromkeys(keys) if key not in member.blocks]
        for key in new:
            self._holders[key] = self._holders.get(key, 0) | bit
        member.blocks.update(new)
        member.xor = xor_keys(new, member.xor)

    def _remove(self, member: Member, keys: Sequence[bytes]) -> None:
        gone = [key for key in dict.fromkeys(keys) if key in member.blocks]
        for key in gone:
            self._forget(key, member.slot)
        member.blocks.difference_update(gone)
        member.xor = xor_keys(gone, member.xor)

    def _clear(self, member: Member) -> None:
        for key in member.blocks:
            self._forget(key, member.slot)
        member.blocks.clear()
        member.xor = NO_KEYS

    def _forget(self, key: bytes, slot: int) -> None:
        left = self._holders[key] & ~(1 << slot)
        if left:
            self._holders[key] = left
        else:
            del self._holders[key]
