"""What `kvrelay status` shows: the fleet as this router sees it. Pure."""

from kvrelay.client.values import FleetStatus, ReplicaStatus
from router.fleet import Fleet
from router.view import Member


def fleet_status(fleet: Fleet, *, state: str, policy: str, disaggregate: str) -> FleetStatus:
    """Return the fleet's state; `state` is that of the watch."""
    identity = fleet.identity
    return FleetStatus(
        state=state,
        policy=policy,
        disaggregate=disaggregate,
        block_tokens=identity.block_tokens if identity else 0,
        replicas=tuple(_replica_status(fleet, member) for member in fleet.members()),
    )


def _replica_status(fleet: Fleet, member: Member) -> ReplicaStatus:
    replica, state = member.replica, member.replica.state
    load = fleet.bookings.load(member.peer)
    return ReplicaStatus(
        peer=member.peer,
        role=replica.role,
        model=replica.identity.model,
        state=fleet.standing(member),
        prefill_load_s=load.prefill_s,
        decode_sequences=load.sequences,
        decode_tokens=load.tokens,
        blocks=len(member.blocks),
        pages_total=state.pages_total or replica.pages,
        pages_free=state.pages_free,
        pages_quarantined=state.pages_quarantined,
        leases=state.leases,
        running=state.running,
        waiting=state.waiting,
        steps=state.steps,
        heartbeat_age_s=fleet.heard_ago_s(member),
    )
