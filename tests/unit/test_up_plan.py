import argparse
import itertools

import pytest

from kvrelay import config
from kvrelay.config import RegistryConfig, ReplicaConfig, RouterConfig, UpConfig
from kvrelay.errors import InvalidArgument
from kvrelay.up.plan import DRAIN_STAGES, START_STAGES, Kind, Surroundings, make_plan

CONFIGS = {"registry": RegistryConfig, "router": RouterConfig, "replica": ReplicaConfig}


def plan(*, passed=None, cores=8, metrics_port=0, **wishes):
    ports = itertools.count(21000)
    around = Surroundings(
        redis_url="unix:///tmp/x",
        passed=passed or {},
        cores=cores,
        metrics_port=metrics_port,
        free_port=lambda: next(ports),
    )
    return make_plan(UpConfig(**wishes), around)


def parsed(spec):
    """What the child itself reads from its command line."""
    command = next(word for word in spec.command if word in CONFIGS)
    parser = argparse.ArgumentParser()
    config.add_flags(parser, CONFIGS[command])
    args = parser.parse_args(spec.command[spec.command.index(command) + 1 :])
    return config.build(CONFIGS[command], vars(args), env={})


def test_the_default_fleet_has_the_documented_ports_and_names():
    made = plan()
    assert [(spec.name, spec.address) for spec in made.children] == [
        ("registry", "127.0.0.1:50051"),
        ("router", "127.0.0.1:50050"),
        ("prefill-0", "127.0.0.1:50060"),
        ("decode-0", "127.0.0.1:50080"),
    ]


def test_children_parse_their_command_lines_into_what_was_planned():
    made = plan(prefill=1, decode=1, both=1, passed={"kv_mib": 64, "policy": "random", "log_level": "warning"})
    registry, router, *replicas = [parsed(spec) for spec in made.children]
    assert registry.redis_url == "unix:///tmp/x"
    assert router.registry == made.registry.address
    assert router.policy == "random"
    assert [(replica.role, replica.replica_id) for replica in replicas] == [
        ("prefill", "prefill-0"),
        ("decode", "decode-0"),
        ("both", "both-0"),
    ]
    assert {replica.kv_mib for replica in replicas} == {64}
    assert {child.log_level for child in (registry, router, *replicas)} == {"warning"}


def test_all_addresses_differ():
    for ports in ("default", "free"):
        addresses = [spec.address for spec in plan(prefill=3, decode=4, both=2, ports=ports).children]
        assert len(set(addresses)) == len(addresses)


def test_replicas_find_the_registry_on_a_free_port():
    made = plan(ports="free")
    assert {parsed(replica).registry for replica in made.replicas} == {made.registry.address}
    assert parsed(made.router).registry == made.registry.address


@pytest.mark.parametrize(("cores", "replicas", "threads"), [(8, 2, 4), (2, 4, 1), (7, 3, 2)])
def test_replicas_share_the_cores_and_have_one_at_least(cores, replicas, threads):
    made = plan(cores=cores, prefill=1, decode=replicas - 1)
    assert {parsed(replica).threads for replica in made.replicas} == {threads}


def test_given_threads_are_kept():
    assert {parsed(replica).threads for replica in plan(passed={"threads": 3}).replicas} == {3}


def test_metrics_ports_follow_the_router_s():
    made = plan(metrics_port=9100)
    assert parsed(made.router).metrics_port == 9100
    assert sorted(parsed(spec).metrics_port for spec in made.children) == [9100, 9101, 9102, 9103]


def test_without_metrics_port_there_is_none():
    assert {parsed(spec).metrics_port for spec in plan().children} == {0}


def test_a_fleet_that_listens_everywhere_is_reached_over_loopback_from_here():
    everywhere = "0.0.0.0"  # noqa: S104 - planned, never bound
    made = plan(passed={"bind": everywhere, "advertise": "10.0.0.7"})
    assert made.router.address == "127.0.0.1:50050"
    assert parsed(made.router).bind == everywhere
    assert parsed(made.replicas[0]).advertise == "10.0.0.7"


@pytest.mark.parametrize(
    ("wishes", "field"),
    [
        ({"prefill": 0}, "prefill"),
        ({"decode": 0}, "decode"),
        ({"both": -1}, "both"),
        ({"prefill": 21}, "ports"),
    ],
)
def test_a_fleet_that_cannot_serve_is_refused_with_the_flag_named(wishes, field):
    with pytest.raises(InvalidArgument) as caught:
        plan(**wishes)
    assert caught.value.field == field


def test_aggregated_replicas_alone_are_a_fleet():
    assert [spec.kind for spec in plan(prefill=0, decode=0, both=2).replicas] == [Kind.BOTH, Kind.BOTH]


def test_every_kind_is_started_and_drained_once():
    for stages in (START_STAGES, DRAIN_STAGES):
        assert sorted(kind for stage in stages for kind in stage) == sorted(Kind)
