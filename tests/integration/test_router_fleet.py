"""A router's picture of the fleet, from a real registry on a real store, through losses of all of them."""

import asyncio

import pytest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.decoders import IDENTITY, FakeReplica, Plan, fake_fleet
from support.registry import until_done

from kvrelay.client import AsyncClient
from kvrelay.errors import Unavailable
from kvrelay.kv.keys import make_identity
from kvrelay.types import Role
from router.worker import Router

PROMPT = "shared prefix of some blocks " * 12
CALL_S = 30.0


@pytest.fixture
async def fleet(valkey_url):
    async with fake_fleet(valkey_url) as made:
        yield made


async def keys_of(client: AsyncClient, text: str) -> list[bytes]:
    return list((await client.tokenize(text, raw=True)).block_keys)


async def decide(client: AsyncClient, text: str = PROMPT):
    return (await client.generate(text, max_tokens=2, deadline_s=CALL_S)).decision


def blocks(router: Router) -> dict[str, int]:
    return {each.peer.replica_id: each.blocks for each in router.core.status().replicas}


async def known(router: Router, *replicas: FakeReplica) -> None:
    await until_done(lambda: len(router.core.status().replicas) == len(replicas), "all replicas are known")


async def test_a_request_goes_where_its_prefix_lies_and_says_so(fleet):
    members = [await fleet.replica("d1"), await fleet.replica("d2")]
    router, client = await fleet.router()
    await known(router, *members)
    keys = await keys_of(client, PROMPT)
    await members[1].member.publish(keys[:8])
    await until_done(lambda: blocks(router)["d2"] == 8, "the blocks are known")
    for _ in range(4):
        decision = await decide(client)
        assert (decision.decode.replica_id, decision.reason) == ("d2", "prefix")
        assert (decision.decode_cached_tokens, decision.available_tokens) == (256, 256)


async def test_over_the_cap_a_request_spills_and_names_the_holder(fleet):
    members = [await fleet.replica("d1"), await fleet.replica("d2")]
    router, client = await fleet.router(disaggregate="never")
    await known(router, *members)
    await members[0].member.publish((await keys_of(client, PROMPT))[:10])
    await until_done(lambda: blocks(router)["d1"] == 10, "the blocks are known")
    for each in members:
        each.decode.plans.extend([Plan(hang_after=0)] * 4)
    hanging = [asyncio.create_task(decide(client)) for _ in range(4)]
    await until_done(lambda: len(members[1].decode.requests) > 0, "one has spilled")
    spilled = members[1].decode.requests[0]
    assert (spilled.holder.peer.replica_id, spilled.holder.blocks) == ("d1", 10)
    for task in hanging:
        task.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)


async def test_a_new_router_knows_warm_prefixes_before_it_is_ready(fleet):
    replica = await fleet.replica("d1")
    _, client = await fleet.router()
    keys = await keys_of(client, PROMPT)
    await replica.member.publish(keys[:9])
    _, second = await fleet.router()
    assert (await decide(second)).decode_cached_tokens == 9 * 32


async def test_a_router_without_a_registry_is_not_ready_and_says_unavailable(fleet, valkey):
    valkey.kill()
    router, client = await fleet.router(wait=False)
    await until_done(lambda: router.core is not None, "the text is loaded")
    assert not router.ready()
    assert (await client.status()).state == "starting"
    with pytest.raises(Unavailable):
        await decide(client)
    valkey.start()
    await until_done(router.ready, "the router is ready")


async def test_requests_go_on_while_the_store_is_away_and_state_converges_when_it_is_back(fleet, valkey):
    replica = await fleet.replica("d1")
    router, client = await fleet.router()
    await known(router, replica)
    keys = await keys_of(client, PROMPT)
    await replica.member.publish(keys[:5])
    await until_done(lambda: blocks(router)["d1"] == 5, "the blocks are known")
    valkey.kill()
    await until_done(lambda: router.core.status().state == "degraded", "the router tells that it is degraded")
    assert router.ready(), "degraded is no reason to refuse requests"
    assert (await decide(client)).decode_cached_tokens == 5 * 32
    valkey.start()
    await until_done(lambda: router.core.status().state == "ready", "the router is ready again")
    # The store came back empty: the replica is kept until it registers again, and so are requests.
    assert (await decide(client)).decode.replica_id == "d1"
    await replica.member.register()
    await replica.member.publish(keys[:7], cleared=True)
    await until_done(lambda: blocks(router)["d1"] == 7, "the blocks are known again")


async def test_a_request_that_lives_through_a_loss_of_the_store_is_booked_again(fleet, valkey):
    replica = await fleet.replica("d1")
    replica.decode.plans.append(Plan(hang_after=1))
    router, client = await fleet.router()
    await known(router, replica)
    task = asyncio.create_task(decide(client))
    await until_done(lambda: replica.decode.requests, "the request is under way")
    valkey.kill()
    await until_done(lambda: router.core.status().state == "degraded", "the router tells that it is degraded")
    valkey.start()
    await replica.member.register()
    await until_done(lambda: valkey.keys("load") or valkey.keys("leg"), "the legs are booked again")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_an_expired_replica_is_gone_and_a_restarted_one_has_no_credit_for_lost_blocks(fleet):
    lost = await fleet.replica("d1", ttl_s=0.3)
    router, client = await fleet.router()
    await until_done(lambda: router.core.status().replicas == (), "the replica without heartbeat is gone")
    with pytest.raises(Unavailable):
        await decide(client)
    again = await fleet.replica("d1", incarnation="i2")
    await known(router, again)
    decision = await decide(client)
    assert decision.decode == again.peer != lost.peer
    assert decision.decode_cached_tokens == 0


async def test_a_replica_with_another_tokenizer_is_not_routed_to_and_shown(fleet):
    identity = make_identity(
        model=IDENTITY.model,
        model_fingerprint="weights",
        tokenizer_fingerprint="another",
        block_tokens=32,
        context_tokens=4096,
    )
    replica = await fleet.replica("d1", identity=identity)
    router, client = await fleet.router()
    await known(router, replica)
    assert (await client.status()).replicas[0].state == "refused: tokenizer_fingerprint"
    with pytest.raises(Unavailable):
        await decide(client)


async def test_the_status_shows_what_each_replica_does(fleet):
    members = [
        await fleet.replica("a", Role.PREFILL, steps=5, pages_free=7, pages_total=9, leases=2),
        await fleet.replica("b", draining=True),
        await fleet.replica("c", ready=False),
    ]
    router, client = await fleet.router(policy="round_robin", disaggregate="always")
    await known(router, *members)
    await until_done(lambda: router.core.status().replicas[2].state == "stalled", "the states are known")
    status = await client.status()
    assert (status.state, status.policy, status.disaggregate, status.block_tokens) == (
        "ready",
        "round_robin",
        "always",
        32,
    )
    assert [(each.peer.replica_id, each.state) for each in status.replicas] == [
        ("a", "ready"),
        ("b", "draining"),
        ("c", "stalled"),
    ]
    first = status.replicas[0]
    assert (first.role, first.steps, first.pages_free, first.pages_total, first.leases) == (Role.PREFILL, 5, 7, 9, 2)
    assert (await client.models())[0].context_tokens == 4096


async def test_the_decision_is_on_the_trace(fleet):
    spans = InMemorySpanExporter()
    replica = await fleet.replica("d1")
    router, client = await fleet.router(told={"spans": spans})
    await known(router, replica)
    await client.generate(PROMPT, max_tokens=5)
    await until_done(lambda: len(spans.get_finished_spans()) >= 3, "the spans are exported")
    by_name = {span.name: span for span in spans.get_finished_spans()}
    route, reserve = by_name["route"], by_name["reserve"]
    assert reserve.parent.span_id == route.context.span_id
    assert route.attributes["kvrelay.decision.decode"] == "d1"
    assert route.attributes["kvrelay.decision.reason"] == "cold"
    assert route.attributes["kvrelay.decision.local_s"] > 0


async def test_times_and_cache_reach_are_counted(fleet):
    metrics = InMemoryMetricReader()
    replica = await fleet.replica("d1")
    router, client = await fleet.router(told={"metrics_reader": metrics})
    await known(router, replica)
    await replica.member.publish((await keys_of(client, PROMPT))[:8])
    await until_done(lambda: blocks(router)["d1"] == 8, "the blocks are known")
    await client.generate(PROMPT, max_tokens=5)
    points = {
        metric.name: metric.data.data_points[0]
        for resource in metrics.get_metrics_data().resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    assert points["gen_ai.server.time_to_first_token"].count == 1
    assert points["gen_ai.server.time_per_output_token"].count == 1
    assert points["kvrelay.tokens.prompt"].value == len(PROMPT)
    assert points["kvrelay.tokens.available"].value == points["kvrelay.tokens.captured"].value == 8 * 32
