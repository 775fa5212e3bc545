"""Members of the fleet: who lives, until when, and what they had to agree on to enter. One script a function."""

import uuid
from dataclasses import dataclass
from typing import Final

from kv_registry.link import RedisLink
from kv_registry.names import MODELS, Names, split_member
from kvrelay.directory import Answer
from kvrelay.errors import Mismatch, StaleIncarnation, Unavailable
from kvrelay.rpc import registry_convert
from kvrelay.types import ModelIdentity, Peer, Replica, ReplicaState

KEEP_S: Final = 3600.0
"""Life of a model's shared keys after the last sign of any member; watchers may resume that long."""

GRACE_S: Final = 60.0
"""Time that a dead replica's keys outlive it when no registry runs that could take it out."""

EVENTS_MAX: Final = 4096
"""Events kept for watchers that resume (trimmed in whole nodes of the stream, so somewhat more). With batches of some
hundred keys this is tens of MB a model; a watcher that was away for longer loads the sets instead."""

DUE_MAX: Final = 100
"""Members taken out in one sweep."""

REGISTER_TRIES: Final = 3
"""Tries to enter when other incarnations of the same id enter at the same moment."""

IDENTITY_FIELDS: Final = (
    "protocol_major",
    "key_version",
    "model_fingerprint",
    "tokenizer_fingerprint",
    "block_tokens",
    "golden_keys",
)
LAYOUT_FIELDS: Final = (
    "axes",
    "layers",
    "kv_heads",
    "head_dim",
    "dtype",
    "page_tokens",
    "block_tokens",
    "page_bytes",
)


@dataclass(frozen=True, slots=True)
class Registered:
    """Epoch of a registration; incarnation whose place was taken, or empty."""

    epoch: int
    replaced: str = ""


class Members:
    """Membership in Redis."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link

    async def register(self, replica: Replica, *, ttl_s: float) -> Registered:
        """Enter a replica; the first live member of a model sets the contract that others must match.

        Raises:
            Mismatch: the first field that differs from the contract.
            StaleIncarnation: a newer incarnation has taken this one's place.
            Unavailable: the store does not answer, or other incarnations kept coming between.
        """
        names = Names(replica.identity.model)
        for _ in range(REGISTER_TRIES):
            before = await self._incarnation(names, replica.peer.replica_id)
            answer = await self._register(names, replica, before, ttl_s)
            match [part.decode() for part in answer]:
                case ["ok", epoch]:
                    await self.touch(replica.identity.model)
                    return Registered(int(epoch), before if before != replica.peer.incarnation else "")
                case ["mismatch", field, expected, got]:
                    raise Mismatch(field, expected, got)
                case ["void"]:
                    raise StaleIncarnation(
                        f"a newer process has entered as {replica.peer.replica_id!r}: stop one of the two, or rename it"
                    )
        raise Unavailable(f"several processes register as {replica.peer.replica_id!r} at once; try again")

    async def _incarnation(self, names: Names, replica_id: str) -> str:
        held = await self._link.command("HGET", names.replica(replica_id), "incarnation")
        return "" if held is None else str(held.decode())

    async def _register(self, names: Names, replica: Replica, before: str, ttl_s: float) -> list[bytes]:
        peer = replica.peer
        keys = [names.meta, names.contract, names.due, names.stream, names.states, names.replica(peer.replica_id)]
        for incarnation in (peer.incarnation, before):
            keys += [names.blocks(peer.replica_id, incarnation), names.void(peer.replica_id, incarnation)]
        answer: list[bytes] = await self._link.script(
            "register",
            keys,
            [
                peer.replica_id,
                peer.incarnation,
                before,
                to_ms(ttl_s),
                to_ms(GRACE_S),
                to_ms(KEEP_S),
                uuid.uuid4().hex,
                EVENTS_MAX,
                registry_convert.pack_replica(replica),
                registry_convert.pack_peer(peer),
                registry_convert.pack_identity(replica.identity),
                *(part for item in contract_of(replica).items() for part in item),
            ],
        )
        return answer

    async def heartbeat(self, peer: Peer, *, model: str, epoch: int, state: ReplicaState, ttl_s: float) -> Answer:
        """Renew a replica's life and keep its state for watchers."""
        again, wanted = await self._link.script(
            "heartbeat",
            self._keys(Names(model), peer.replica_id, peer.incarnation),
            [
                peer.replica_id,
                peer.incarnation,
                epoch,
                to_ms(ttl_s),
                to_ms(GRACE_S),
                to_ms(KEEP_S),
                registry_convert.pack_beat(peer, state),
                f"draining={state.draining:d} ready={state.ready:d}",
            ],
        )
        return Answer(bool(again), bool(wanted))

    async def remove(self, model: str, replica_id: str, incarnation: str, *, reason: str) -> bool:
        """Take an incarnation out with its blocks; return whether it was in. "expired" spares one that lives again."""
        removed = await self._link.script(
            "remove",
            self._keys(Names(model), replica_id, incarnation),
            [replica_id, incarnation, reason, to_ms(KEEP_S)],
        )
        return bool(removed)

    async def due(self, model: str) -> tuple[int, list[tuple[str, str]]]:
        """Return how many members there are, and (replica id, incarnation) of those whose life is over."""
        members, *over = await self._link.script("due", [Names(model).due], [DUE_MAX])
        return members, [split_member(member) for member in over]

    async def members(self, model: str) -> list[tuple[str, str]]:
        """Return (replica id, incarnation) of all members, by id."""
        held = await self._link.command("ZRANGE", Names(model).due, 0, -1)
        return sorted(split_member(member) for member in held)

    async def identity(self, model: str) -> ModelIdentity | None:
        """Return the identity that a model's members agreed on; None when it has none."""
        held = await self._link.command("HGET", Names(model).contract, "@identity")
        return None if held is None else registry_convert.unpack_identity(held)

    async def touch(self, model: str) -> None:
        """Note that a model has members, so that every registry's sweeper finds it."""
        await self._link.script("touch_model", [MODELS], [model, to_ms(KEEP_S)])

    async def models(self) -> list[str]:
        """Return the models that have or lately had members."""
        return [model.decode() for model in await self._link.command("ZRANGE", MODELS, 0, -1)]

    @staticmethod
    def _keys(names: Names, replica_id: str, incarnation: str) -> list[str]:
        shared = [names.meta, names.contract, names.due, names.stream, names.states]
        return [*shared, names.replica(replica_id), names.blocks(replica_id, incarnation)]


def contract_of(replica: Replica) -> dict[str, str]:
    """Return what all members of a model must agree on, in the order in which differences are told."""
    identity = {name: _text(getattr(replica.identity, name)) for name in IDENTITY_FIELDS}
    layout = {f"layout.{name}": _text(getattr(replica.layout, name)) for name in LAYOUT_FIELDS}
    return identity | layout


def _text(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def to_ms(seconds: float) -> int:
    """Return whole milliseconds, at least 1."""
    return max(1, round(1000 * seconds))
