"""What this router knows of the fleet, put together: mirror, pool, booked load, and who failed a moment ago. No I/O."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvrelay.directory import ReplicaBeat, ReplicaGone, ReplicaSeen, Watched
from kvrelay.errors import Mismatch
from kvrelay.logs import Logger
from kvrelay.types import ModelIdentity, Peer, Replica, ReplicaState, Role
from router.booking import Bookings
from router.lifelines import Lifelines
from router.mirror import Mirror
from router.policy.rates import PREFILL_TOKENS_PER_S, STEP_S, predicted
from router.policy.values import Candidate, Candidates, Load
from router.pool import Pool
from router.view import Member

SUSPECT_S: Final = 2.0
"""A replica whose connection failed is passed over for this long, then tried again: shorter than the liveness TTL, so
that a slip of the network costs little, and long enough that a burst does not run into the same dead peer."""

DRAINED: Final = "deregistered"
"""Reason of a replica that left in order: it finishes its streams."""

Name = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Prefixes:
    """How much of a sequence is held where.

    Attributes:
        tokens: tokens of the sequence.
        held: tokens held, by replica id; whole blocks, at most tokens - 1.
    """

    tokens: int
    held: dict[str, int] = field(default_factory=dict)

    def of(self, peer: Peer | None) -> int:
        """Return the tokens that a replica holds."""
        return self.held.get(peer.replica_id, 0) if peer else 0

    @property
    def most(self) -> int:
        """The most that any replica holds."""
        return max(self.held.values(), default=0)


class Fleet:
    """Takes in the watch's events, and answers who may serve a request.

    Attributes:
        bookings: what this router has booked.
        lifelines: streams to cut when a replica is lost.
    """

    def __init__(
        self,
        *,
        model: str,
        tokenizer_fingerprint: str,
        logger: Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.bookings = Bookings()
        self.lifelines = Lifelines()
        self._mirror = Mirror()
        self._pool = Pool(model=model, tokenizer_fingerprint=tokenizer_fingerprint)
        self._refused: dict[str, Mismatch] = {}
        self._suspects: dict[Name, float] = {}
        self._logger = logger
        self._clock = clock

    # ------------------------------------------------------------ what happened

    def take(self, watched: Watched) -> None:
        """Take in one event of the watch."""
        now_s = self._clock()
        before = self._mirror.view
        replaced = self._replaced(watched)
        self._mirror.take(watched, now_s=now_s)
        match watched.event:
            case ReplicaBeat(peer, state):
                self._beat(peer, state)
                return
            case ReplicaGone(peer, reason):
                self._lost(peer, reason)
            case ReplicaSeen():
                if replaced:
                    self._lost(replaced, "replaced")
            case _ if self._mirror.view is before:
                return
        self._sort()

    def broken(self) -> None:
        """The watch broke; the mirror stays."""
        self._mirror.broken()

    def suspect(self, peer: Peer) -> None:
        """A connection to the replica failed: pass it over for a while."""
        self._suspects[_name(peer)] = self._clock() + SUSPECT_S

    def trust(self, peer: Peer) -> None:
        """The replica answered."""
        self._suspects.pop(_name(peer), None)

    # ------------------------------------------------------------ what is known

    @property
    def identity(self) -> ModelIdentity | None:
        """What the pool's replicas have in common; None while nobody is there."""
        return self._pool.identity

    @property
    def position(self) -> str:
        """Where to resume the watch."""
        return self._mirror.position

    @property
    def caught_up(self) -> bool:
        """True once the mirror has been complete."""
        return self._mirror.view.caught_up

    @property
    def damaged(self) -> bool:
        """True when some block set here is not what the directory has."""
        return self._mirror.view.damaged

    @property
    def loading(self) -> bool:
        """True while a reload is under way and the view before it serves."""
        return self._mirror.loading

    def members(self) -> Iterator[Member]:
        """Go through all replicas, by id."""
        return self._mirror.view.members()

    def standing(self, member: Member) -> str:
        """Return "ready", "draining", "stalled", "lost", or "refused: FIELD" for one that differs from the pool."""
        if mismatch := self._refused.get(member.peer.replica_id):
            return f"refused: {mismatch.field}"
        if self._suspects.get(_name(member.peer), 0.0) > self._clock():
            return "lost"
        if member.replica.draining or member.replica.state.draining:
            return "draining"
        return "ready" if member.replica.state.ready else "stalled"

    def heard_ago_s(self, member: Member) -> float:
        """Return the age of a replica's last heartbeat, s."""
        return max(0.0, self._clock() - member.heard_at_s)

    def prefixes(self, keys: Sequence[bytes], tokens: int) -> Prefixes:
        """Return how much of a sequence of `tokens` with these block keys is held where."""
        if self.identity is None:
            return Prefixes(tokens)
        block_tokens = self.identity.block_tokens
        most = (tokens - 1) // block_tokens
        held = self._mirror.view.longest_prefix(keys[:most])
        return Prefixes(tokens, {name: blocks * block_tokens for name, blocks in held.items()})

    def candidates(self, prefixes: Prefixes, *, avoid: frozenset[Peer] = frozenset()) -> Candidates:
        """Return who may serve a request, leaving out `avoid` on the decode side."""
        for peer in self._mirror.view.expire(now_s=self._clock()):
            self._lost(peer, "expired")
            self._sort()
        ready = [member.replica for member in self.members() if self.standing(member) == "ready"]
        rates = predicted([replica.state.prefill_tokens_per_s for replica in ready], PREFILL_TOKENS_PER_S)
        steps = predicted([replica.state.step_s for replica in ready], STEP_S)
        all_ = [
            self._candidate(replica, rate, step_s, prefixes)
            for replica, rate, step_s in zip(ready, rates, steps, strict=True)
        ]
        return Candidates(
            decoders=tuple(c for c in all_ if c.role.decodes and c.peer not in avoid),
            prefills=tuple(c for c in all_ if c.role.prefills),
        )

    # ------------------------------------------------------------ inside

    def _candidate(self, replica: Replica, rate: float, step_s: float, prefixes: Prefixes) -> Candidate:
        return Candidate(
            peer=replica.peer,
            role=replica.role,
            held_tokens=prefixes.of(replica.peer),
            load=self.bookings.load(replica.peer),
            weight=replica.weight,
            max_sequences=max(1, replica.max_sequences),
            prefill_tokens_per_s=rate,
            step_s=step_s,
            kv_bytes_per_token=replica.layout.page_bytes / max(1, replica.layout.page_tokens),
        )

    def _replaced(self, watched: Watched) -> Peer | None:
        """Return the earlier start of a replica that an event replaces."""
        if not isinstance(watched.event, ReplicaSeen):
            return None
        new = watched.event.replica.peer
        old = (member.peer for member in self.members() if member.peer.replica_id == new.replica_id)
        return next((peer for peer in old if peer.incarnation != new.incarnation), None)

    def _beat(self, peer: Peer, state: ReplicaState) -> None:
        member = self._mirror.view.find(peer)
        if member is None:
            return
        self.bookings.told(peer, _reported(member.replica, state))
        if not state.ready:
            self._lost(peer, "stalled")

    def _lost(self, peer: Peer, reason: str) -> None:
        if reason == DRAINED:
            self.bookings.gone(peer)
            return
        if reason != "stalled":
            self.bookings.gone(peer)
        if cut := self.lifelines.cut(peer, f"the decode replica is {reason}; the answer goes on elsewhere"):
            self._logger.warning("fleet.replica_lost", replica_id=peer.replica_id, reason=reason, streams=cut)

    def _sort(self) -> None:
        """Work out anew which replicas fit together."""
        refused = self._pool.sort(member.replica for member in self.members())
        for replica_id, mismatch in refused.items():
            if replica_id not in self._refused:
                self._logger.error(
                    "fleet.replica_refused",
                    replica_id=replica_id,
                    field=mismatch.field,
                    expected=mismatch.expected,
                    got=mismatch.got,
                )
        self._refused = refused
        now_s = self._clock()
        self._suspects = {name: until_s for name, until_s in self._suspects.items() if until_s > now_s}


def _name(peer: Peer) -> Name:
    return peer.replica_id, peer.incarnation


def _reported(replica: Replica, state: ReplicaState) -> Load:
    rate = state.prefill_tokens_per_s or PREFILL_TOKENS_PER_S
    sequences = state.running + state.waiting if replica.role is not Role.PREFILL else 0
    return Load(prefill_s=state.prefill_tokens / rate, tokens=state.decode_tokens, sequences=sequences)
