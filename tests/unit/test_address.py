"""Bind address and advertised address differ; localhost is never advertised to another host."""

import pytest

from kvrelay.errors import InvalidArgument
from kvrelay.rpc.address import advertised_host, is_loopback, join

ANY = "0.0.0.0"  # noqa: S104 - the case under test


@pytest.mark.parametrize(
    ("bind", "advertise", "told"),
    [
        ("127.0.0.1", "", "127.0.0.1"),
        ("localhost", "", "localhost"),
        ("127.0.0.1", "localhost", "localhost"),
        ("10.0.0.5", "", "10.0.0.5"),
        (ANY, "10.0.0.5", "10.0.0.5"),
        (ANY, "prefill-1", "prefill-1"),
        ("[::]", "fd00::5", "fd00::5"),
        ("::1", "", "::1"),
        ("[::1]", "", "::1"),
    ],
)
def test_what_is_advertised(bind, advertise, told):
    assert advertised_host(bind, advertise) == told


@pytest.mark.parametrize("bind", [ANY, "::", "[::]", "", "0:0:0:0:0:0:0:0"])
def test_a_wildcard_needs_an_address_to_advertise(bind):
    with pytest.raises(InvalidArgument, match="set --advertise") as refused:
        advertised_host(bind, "")
    assert refused.value.field == "advertise"


@pytest.mark.parametrize("bind", [ANY, "::", "10.0.0.5", "prefill-1"])
@pytest.mark.parametrize("advertise", ["localhost", "127.0.0.1", "127.1.2.3", "::1", "[::1]", "::ffff:127.0.0.1"])
def test_localhost_is_not_advertised_when_other_hosts_can_connect(bind, advertise):
    with pytest.raises(InvalidArgument, match="set --advertise"):
        advertised_host(bind, advertise)


@pytest.mark.parametrize("advertise", [ANY, "::", "[::]"])
def test_a_wildcard_cannot_be_advertised(advertise):
    with pytest.raises(InvalidArgument, match="set --advertise"):
        advertised_host(ANY, advertise)


@pytest.mark.parametrize("advertise", ["10.0.0.5:50060", "prefill-1:50060"])
def test_a_port_does_not_belong_into_the_advertised_host(advertise):
    with pytest.raises(InvalidArgument, match="host alone"):
        advertised_host(ANY, advertise)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("LOCALHOST", True), ("localhost.", True), ("a.localhost", True), ("localhost.example.com", False)],
)
def test_names_of_this_machine(host, loopback):
    assert is_loopback(host) is loopback


@pytest.mark.parametrize(
    ("host", "joined"), [("host", "host:1"), ("10.0.0.1", "10.0.0.1:1"), ("::1", "[::1]:1"), ("[::1]", "[::1]:1")]
)
def test_host_and_port_are_joined(host, joined):
    assert join(host, 1) == joined
