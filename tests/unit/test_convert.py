"""Every value that crosses the wire comes out as it went in, and nonsense is refused by name."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.engine.protocol import AgentInfo, LeasedPage, LeaseGrant
from kvrelay.errors import InvalidArgument
from kvrelay.rpc import convert, lease_convert
from kvrelay.types import (
    LOGPROBS_MAX,
    STOP_STRINGS_MAX,
    FinishReason,
    KvLayout,
    ModelIdentity,
    Peer,
    Replica,
    ReplicaState,
    Role,
    Sampling,
    TokenLogprobs,
    Usage,
)
from kvrelay.v1 import common_pb2, kv_registry_pb2, kv_source_pb2

u31 = st.integers(0, 2**31 - 1)
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
finite = st.floats(allow_nan=False, allow_infinity=False)
float32 = st.floats(width=32, allow_nan=False)
text = st.text(max_size=20)
name = st.text(min_size=1, max_size=20)
ids = st.lists(u32, max_size=8).map(tuple)

peers = st.builds(Peer, replica_id=name, incarnation=name, address=text)
layouts = st.builds(
    KvLayout,
    layers=u32,
    kv_heads=u32,
    head_dim=u32,
    dtype=text,
    page_tokens=u32,
    block_tokens=u32,
    page_bytes=u64,
    axes=text,
)
identities = st.builds(
    ModelIdentity,
    model=text,
    model_fingerprint=text,
    tokenizer_fingerprint=text,
    block_tokens=u32,
    context_tokens=u32,
    golden_keys=st.binary(max_size=32),
    key_version=u32,
    protocol_major=u32,
    protocol_minor=u32,
)
states = st.builds(
    ReplicaState,
    steps=u64,
    running=u32,
    waiting=u32,
    pages_free=u32,
    pages_total=u32,
    pages_quarantined=u32,
    leases=u32,
    prefill_tokens=u64,
    decode_tokens=u64,
    prefill_tokens_per_s=finite,
    step_s=finite,
    draining=st.booleans(),
    ready=st.booleans(),
)
usages = st.builds(
    Usage,
    prompt_tokens=u32,
    cached_tokens=u32,
    pulled_tokens=u32,
    computed_tokens=u32,
    prefill_cached_tokens=u32,
    output_tokens=u32,
    pulled_bytes=u64,
    pull_s=finite,
    pull_descriptors=u32,
    decode_computed_tokens=u32,
)
pages = st.lists(st.builds(LeasedPage, page=u32, generation=u64, valid_tokens=u32), max_size=4).map(tuple)
logprobs = ids.flatmap(
    lambda top: st.builds(
        TokenLogprobs,
        logprob=float32,
        top_ids=st.just(top),
        top_logprobs=st.tuples(*[float32 for _ in top]),
    )
)


@st.composite
def samplings(draw):
    max_tokens = draw(st.none() | st.integers(1, 2**31 - 1))
    return Sampling(
        temperature=draw(st.floats(0, 2)),
        top_k=draw(u31),
        top_p=draw(st.floats(0, 1, exclude_min=True)),
        min_p=draw(st.floats(0, 1)),
        seed=draw(st.none() | u64),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens or 2**31 - 1)),
        stop_ids=draw(ids),
        stop_strings=draw(st.lists(name, max_size=STOP_STRINGS_MAX).map(tuple)),
        ignore_eos=draw(st.booleans()),
        logprobs=draw(st.none() | st.integers(0, LOGPROBS_MAX)),
    )


def through(message):
    """Return the message as the other side reads it."""
    return type(message).FromString(message.SerializeToString())


@given(samplings())
def test_sampling_survives(sampling):
    assert convert.sampling_from_pb(through(convert.sampling_to_pb(sampling))) == sampling


@given(logprobs)
def test_logprobs_survive(value):
    assert convert.logprobs_from_pb(through(convert.logprobs_to_pb(value))) == value


@given(st.data(), u32, u32, u32, ids)
def test_token_spans_survive(data, attempt, choice, position, tokens):
    told = data.draw(st.just(()) | st.tuples(*[logprobs for _ in tokens]))
    span = convert.TokenSpan(attempt=attempt, choice=choice, position=position, ids=tokens, logprobs=told)
    assert convert.span_from_pb(through(convert.span_to_pb(span))) == span


@given(identities)
def test_identity_survives(identity):
    assert convert.identity_from_pb(through(convert.identity_to_pb(identity))) == identity


@given(layouts)
def test_layout_survives(layout):
    assert convert.layout_from_pb(through(convert.layout_to_pb(layout))) == layout


@given(peers)
def test_peer_survives(peer):
    assert convert.peer_from_pb(through(convert.peer_to_pb(peer))) == peer


@given(usages)
def test_usage_survives(usage):
    assert convert.usage_from_pb(through(convert.usage_to_pb(usage))) == usage


@given(states)
def test_replica_state_survives(state):
    assert convert.replica_state_from_pb(through(convert.replica_state_to_pb(state))) == state


@given(
    st.builds(
        Replica,
        peer=peers,
        role=st.sampled_from(Role),
        identity=identities,
        layout=layouts,
        pages=u32,
        max_sequences=u32,
        weight=st.floats(0, 1e6, exclude_min=True),
        epoch=u64,
        draining=st.booleans(),
        state=st.just(ReplicaState()),
    )
)
def test_replica_survives(replica):
    assert convert.replica_from_pb(through(convert.replica_to_pb(replica))) == replica


@given(name, pages, u32, st.floats(0, 1e6), peers)
def test_lease_and_its_owner_survive(lease_id, granted, first_position, ttl_s, owner):
    lease = LeaseGrant(lease_id=lease_id, pages=granted, first_position=first_position, ttl_s=ttl_s)
    pb = through(lease_convert.lease_to_pb(lease, owner))
    assert lease_convert.lease_from_pb(pb) == lease
    assert convert.peer_from_pb(pb.owner) == owner


@given(peers, st.binary(max_size=8), u64, u32, layouts, u32, text)
def test_agent_survives(owner, metadata, base, count, layout, device_id, memory):
    agent = AgentInfo(
        replica_id=owner.replica_id,
        incarnation=owner.incarnation,
        agent_name="agent",
        agent_metadata=metadata,
        base_address=base,
        pages=count,
        layout=layout,
        memory=memory,
        device_id=device_id,
    )
    pb = through(lease_convert.agent_to_pb(agent, owner))
    assert lease_convert.agent_from_pb(pb) == agent
    assert convert.peer_from_pb(pb.owner) == owner


@pytest.mark.parametrize("role", Role)
def test_roles_survive(role):
    assert convert.role_from_pb(convert.role_to_pb(role)) is role


@pytest.mark.parametrize("reason", [*FinishReason, None])
def test_finish_reasons_survive_and_unspecified_means_not_ended(reason):
    assert convert.finish_reason_from_pb(convert.finish_reason_to_pb(reason)) is reason


def test_an_empty_sampling_has_the_protocols_defaults():
    assert convert.sampling_from_pb(common_pb2.Sampling()) == Sampling()


@pytest.mark.parametrize(
    ("given_fields", "field"),
    [
        ({"temperature": math.nan}, "sampling.temperature"),
        ({"temperature": 2.5}, "sampling.temperature"),
        ({"temperature": math.inf}, "sampling.temperature"),
        ({"top_p": 0.0}, "sampling.top_p"),
        ({"top_p": math.nan}, "sampling.top_p"),
        ({"min_p": -0.1}, "sampling.min_p"),
        ({"top_k": 2**32 - 1}, "sampling.top_k"),
        ({"max_tokens": 0}, "sampling.max_tokens"),
        ({"max_tokens": 4, "min_tokens": 5}, "sampling.min_tokens"),
        ({"logprobs": LOGPROBS_MAX + 1}, "sampling.logprobs"),
        ({"stop_ids": b"123"}, "sampling.stop_ids"),
        ({"stop_strings": [""]}, "sampling.stop_strings"),
        ({"stop_strings": ["x"] * (STOP_STRINGS_MAX + 1)}, "sampling.stop_strings"),
        ({"n": 0}, "sampling.n"),
        ({"n": 2}, "sampling.n"),
        ({"prompt_logprobs": 0}, "sampling.prompt_logprobs"),
        ({"repetition_penalty": 1.1}, "sampling.repetition_penalty"),
        ({"repetition_penalty": math.nan}, "sampling.repetition_penalty"),
        ({"presence_penalty": 0.1}, "sampling.presence_penalty"),
        ({"frequency_penalty": math.nan}, "sampling.frequency_penalty"),
        ({"logit_bias": {1: 1.0}}, "sampling.logit_bias"),
        ({"grammar": common_pb2.Grammar(regex="a")}, "sampling.grammar"),
    ],
)
def test_sampling_that_is_wrong_or_not_served_is_refused_by_field(given_fields, field):
    with pytest.raises(InvalidArgument) as refused:
        convert.sampling_from_pb(common_pb2.Sampling(**given_fields))
    assert refused.value.field == field


def test_values_that_change_nothing_are_served():
    pb = common_pb2.Sampling(n=1, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
    assert convert.sampling_from_pb(pb) == Sampling()


@pytest.mark.parametrize(
    ("read", "field"),
    [
        (lambda: convert.role_from_pb(common_pb2.ROLE_UNSPECIFIED), "role"),
        (lambda: convert.role_from_pb(77), "role"),
        (lambda: convert.finish_reason_from_pb(77), "finish_reason"),
        (lambda: convert.peer_from_pb(common_pb2.Peer(incarnation="i"), name="puller"), "puller.replica_id"),
        (lambda: convert.peer_from_pb(common_pb2.Peer(replica_id="r"), name="puller"), "puller.incarnation"),
        (lambda: lease_convert.lease_from_pb(kv_source_pb2.Lease(ttl_s=1)), "lease.lease_id"),
        (lambda: lease_convert.lease_from_pb(kv_source_pb2.Lease(lease_id="l", ttl_s=math.nan)), "lease.ttl_s"),
        (lambda: lease_convert.agent_from_pb(kv_source_pb2.HandshakeResponse()), "owner.replica_id"),
        (lambda: convert.replica_from_pb(kv_registry_pb2.Replica(weight=math.nan)), "replica.weight"),
        (lambda: convert.replica_from_pb(kv_registry_pb2.Replica()), "replica.weight"),
        (lambda: convert.span_from_pb(common_pb2.TokenSpan(ids=b"123")), "tokens.ids"),
        (
            lambda: convert.span_from_pb(common_pb2.TokenSpan(ids=b"1234" * 2, logprobs=[common_pb2.TokenLogprobs()])),
            "tokens.logprobs",
        ),
        (
            lambda: convert.logprobs_from_pb(common_pb2.TokenLogprobs(top_ids=b"1234")),
            "logprobs.top_logprobs",
        ),
    ],
)
def test_nonsense_is_refused_by_field(read, field):
    with pytest.raises(InvalidArgument) as refused:
        read()
    assert refused.value.field == field
