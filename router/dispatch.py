"""Decides where an attempt goes, books it, and says why."""

from dataclasses import dataclass
from itertools import count
from random import Random

from kvrelay.errors import Unavailable
from kvrelay.kv.keys import block_keys, root_key
from kvrelay.telemetry import Telemetry
from kvrelay.types import ModelIdentity, Peer, TokenArray, pack_ids, split_keys
from router.booking import BookingKey
from router.fleet import Fleet, Prefixes
from router.legs import pairs_of, with_last_resort
from router.policy.policies import POLICIES
from router.policy.values import Ask, Candidates, Choice, Disaggregate
from router.reservations import Reservations

OUTPUT_TOKENS_EXPECTED = 256
"""Output that a decision counts on: few answers are longer, whatever their max_tokens allows."""

TARGETS_MAX = 3
"""Prefill replicas named to the decode replica: the chosen one and alternates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trip:
    """What must be known to send one attempt on its way.

    Attributes:
        key: request id and attempt.
        prompt_ids, output_ids: the sequence so far.
        max_tokens: most output tokens, those of before included.
        salt: of the blocks' keys.
        avoid: decode replicas that have refused it or failed in it.
    """

    key: BookingKey
    prompt_ids: TokenArray
    output_ids: TokenArray
    max_tokens: int
    salt: str = ""
    avoid: frozenset[Peer] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where an attempt goes; its load is booked.

    Attributes:
        choice: the pair taken.
        targets: prefill replicas to ask, best first; empty: read the prompt at the decode replica.
        holder_blocks: blocks that the named holder has.
        prefixes: how much of the sequence is held where.
        root, keys: of the sequence's blocks.
        inputs: numbers the decision rests on, by name with unit.
    """

    choice: Choice
    targets: tuple[Peer, ...]
    holder_blocks: int
    prefixes: Prefixes
    root: bytes
    keys: bytes
    inputs: dict[str, float]


class Dispatcher:
    """Places attempts by one policy."""

    def __init__(
        self,
        fleet: Fleet,
        reservations: Reservations,
        *,
        policy: str,
        disaggregate: str,
        epsilon: float,
        rng: Random,
        telemetry: Telemetry,
    ) -> None:
        self._fleet = fleet
        self._reservations = reservations
        self._policy = POLICIES[policy]
        self._disaggregate = Disaggregate(disaggregate)
        self._epsilon = epsilon
        self._rng = rng
        self._tracer = telemetry.tracer
        self._turns = count()

    def identity(self) -> ModelIdentity:
        """Return what the pool has in common.

        Raises:
            Unavailable: nobody is there.
        """
        identity = self._fleet.identity
        if identity is None:
            raise Unavailable("no replica of this model is up; start one, or wait until it has loaded")
        return identity

    def possible(self, trip: Trip) -> bool:
        """Tell whether anyone could take the attempt now."""
        return bool(self._fleet.candidates(Prefixes(0), avoid=trip.avoid).decoders)

    async def place(self, trip: Trip) -> Placed:
        """Choose and book; the caller ends the booking of `trip.key`.

        Raises:
            Unavailable: no replica can take it.
        """
        with self._tracer.start_as_current_span("route") as span:
            identity = self.identity()
            sequence = trip.prompt_ids + trip.output_ids
            root = _root(identity, trip.salt)
            keys = block_keys(root, pack_ids(sequence), identity.block_tokens)
            prefixes = self._fleet.prefixes(split_keys(keys), len(sequence))
            candidates = self._fleet.candidates(prefixes, avoid=trip.avoid)
            ask = self._ask(trip, len(sequence))
            choices = with_last_resort(self._policy(ask, candidates, self._rng) if candidates.decoders else [])
            if not choices:
                raise Unavailable("no decode replica is ready; start one, or wait until one has recovered")
            choice = choices[await self._reserve(trip.key, choices, ask, candidates)]
            placed = Placed(
                choice=choice,
                targets=_targets(choice, choices),
                holder_blocks=prefixes.of(choice.holder.peer) // identity.block_tokens if choice.holder else 0,
                prefixes=prefixes,
                root=root,
                keys=keys,
                inputs=_inputs(choice),
            )
            span.set_attributes(_attributes(placed))
            return placed

    def _ask(self, trip: Trip, tokens: int) -> Ask:
        left = trip.max_tokens - len(trip.output_ids)
        return Ask(
            prompt_tokens=tokens,
            output_tokens=min(left, OUTPUT_TOKENS_EXPECTED),
            disaggregate=self._disaggregate,
            epsilon=self._epsilon,
            turn=next(self._turns),
        )

    async def _reserve(self, key: BookingKey, choices: list[Choice], ask: Ask, candidates: Candidates) -> int:
        with self._tracer.start_as_current_span("reserve") as span:
            taken = await self._reservations.reserve(key, pairs_of(choices, ask, candidates))
            span.set_attributes({"kvrelay.reserve.pairs": len(choices), "kvrelay.reserve.taken": taken})
            return taken


def _root(identity: ModelIdentity, salt: str) -> bytes:
    return root_key(
        model_fingerprint=identity.model_fingerprint,
        tokenizer_fingerprint=identity.tokenizer_fingerprint,
        block_tokens=identity.block_tokens,
        salt=salt,
    )


def _targets(choice: Choice, choices: list[Choice]) -> tuple[Peer, ...]:
    """Return the chosen prefill replica, then others that were ranked with the same decode replica."""
    if choice.prefill is None:
        return ()
    others = [other.prefill.peer for other in choices if other.prefill and other.decode.peer == choice.decode.peer]
    return tuple(dict.fromkeys((choice.prefill.peer, *others)))[:TARGETS_MAX]


def _inputs(choice: Choice) -> dict[str, float]:
    cost = choice.cost
    inputs = {
        "cost_s": cost.total_s,
        "queue_s": cost.queue_s,
        "compute_s": cost.compute_s,
        "pull_s": cost.pull_s,
        "harm_s": cost.harm_s,
        "decode_s": cost.decode_s,
        "prefill_load_s": choice.reader.load.prefill_s,
        "decode_load_sequences": float(choice.decode.load.sequences),
        "decode_load_tokens": float(choice.decode.load.tokens),
        "prefill_tokens_per_s": choice.reader.prefill_tokens_per_s,
        "step_s": choice.decode.step_s,
    }
    local, remote = (cost, choice.rival) if choice.prefill is None else (choice.rival, cost)
    if local is not None:
        inputs["local_s"] = local.total_s
    if remote is not None:
        inputs["remote_s"] = remote.total_s
    return inputs


def _attributes(placed: Placed) -> dict[str, str | int | float]:
    choice = placed.choice
    named: dict[str, str | int | float] = {
        "kvrelay.decision.decode": choice.decode.peer.replica_id,
        "kvrelay.decision.prefill": choice.prefill.peer.replica_id if choice.prefill else "",
        "kvrelay.decision.holder": choice.holder.peer.replica_id if choice.holder else "",
        "kvrelay.decision.reason": choice.reason,
        "kvrelay.decision.decider_reason": choice.decider_reason,
        "kvrelay.tokens.available": placed.prefixes.most,
    }
    return named | {f"kvrelay.decision.{name}": value for name, value in placed.inputs.items()}
