"""The block directory: one set of keys a replica, with seq, count and XOR. One script a function."""

from dataclasses import dataclass
from typing import Final

from kv_registry.link import RedisLink
from kv_registry.members import KEEP_S, to_ms
from kv_registry.names import Names
from kvrelay.directory import Answer, BlockBatch
from kvrelay.rpc import registry_convert
from kvrelay.types import Peer, Replica, ReplicaState

STAGE_TTL_S: Final = 30.0
"""Life of an upload after its last chunk; an abandoned one goes by itself."""

BATCH_KEYS_MAX: Final = 4096
"""Keys in one batch. A larger change comes as a snapshot, which does not go through the event stream: so an event has
at most 64 KiB, and the script ends within some ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """A snapshot under upload; `name` is unique."""

    peer: Peer
    model: str
    epoch: int
    name: str


@dataclass(frozen=True, slots=True)
class Held:
    """A replica, its state if told, and its block set, as of one moment: after the event with number `event`."""

    replica: Replica
    state: ReplicaState | None
    event: int
    seq: int
    xor: bytes
    keys: list[bytes]


class Blocks:
    """Block sets in Redis."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link

    async def publish(self, peer: Peer, *, model: str, epoch: int, batch: BlockBatch) -> Answer:
        """Change a replica's set by a batch and tell watchers, or change nothing and want a snapshot."""
        if len(batch.added) + len(batch.removed) > BATCH_KEYS_MAX:
            return Answer(snapshot_wanted=True)
        names = Names(model)
        added = dict.fromkeys(batch.added)
        removed = [key for key in dict.fromkeys(batch.removed) if key not in added]
        answer = await self._link.script(
            "publish",
            [
                names.meta,
                names.stream,
                names.replica(peer.replica_id),
                names.blocks(peer.replica_id, peer.incarnation),
            ],
            [
                peer.replica_id,
                peer.incarnation,
                epoch,
                to_ms(KEEP_S),
                batch.seq,
                b"".join(added),
                b"".join(removed),
                int(batch.cleared),
                batch.count,
                batch.xor,
            ],
        )
        return Answer(register_again=answer == b"again", snapshot_wanted=answer == b"snapshot")

    async def stage(self, upload: Upload, packed_keys: bytes) -> bool:
        """Add a chunk to an upload; return False when the registration is not current."""
        peer, names = upload.peer, Names(upload.model)
        staged = await self._link.script(
            "stage",
            [
                names.meta,
                names.replica(peer.replica_id),
                names.staged(peer.replica_id, peer.incarnation, upload.name),
            ],
            [peer.incarnation, upload.epoch, packed_keys, to_ms(STAGE_TTL_S)],
        )
        return bool(staged)

    async def swap(self, upload: Upload, *, seq: int, count: int, xor: bytes) -> bool:
        """Put a complete upload in the place of the set; return False when chunks are missing or it lapsed."""
        peer, names = upload.peer, Names(upload.model)
        swapped = await self._link.script(
            "swap",
            [
                names.meta,
                names.stream,
                names.replica(peer.replica_id),
                names.blocks(peer.replica_id, peer.incarnation),
                names.staged(peer.replica_id, peer.incarnation, upload.name),
            ],
            [peer.replica_id, peer.incarnation, upload.epoch, to_ms(KEEP_S), seq, count, xor],
        )
        return bool(swapped)

    async def read(self, model: str, replica_id: str, incarnation: str) -> Held | None:
        """Return a replica with its set; None when that incarnation is not in."""
        names = Names(model)
        answer = await self._link.script(
            "read_replica",
            [names.replica(replica_id), names.blocks(replica_id, incarnation), names.states],
            [replica_id, incarnation],
        )
        if not answer:
            return None
        entry, epoch, seq, xor, event, beat, keys = answer
        replica = registry_convert.unpack_replica(entry, epoch=int(epoch))
        state = registry_convert.unpack_beat(beat.partition(b":")[2]).state if beat else None
        return Held(replica, state, int(event), int(seq), xor, keys)
