"""Which address a server listens on and which one it tells others. Pure."""

import ipaddress

from kvrelay.errors import InvalidArgument

_WILDCARDS = ("", "*")


def advertised_host(bind: str, advertise: str) -> str:
    """Return the host that others are told, given the bind address and the configured host (empty: none).

    Raises:
        InvalidArgument: nothing usable to advertise follows from the two; says what to set.
    """
    host = advertise or bind
    if advertise and _has_port(advertise):
        raise InvalidArgument("advertise", f"{advertise!r} carries a port; give the host alone, the port is --port")
    if is_wildcard(host):
        raise InvalidArgument(
            "advertise",
            f"{host!r} is no address others can reach; set --advertise to this machine's host name or IP address",
        )
    if is_loopback(host) and not is_loopback(bind):
        raise InvalidArgument(
            "advertise",
            f"{host!r} reaches nobody but this machine while the server listens on {bind!r}; "
            "set --advertise to a host name or IP address that other machines reach",
        )
    return _bare(host)


def join(host: str, port: int) -> str:
    """Return "host:port", with brackets around an IPv6 address."""
    host = _bare(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_wildcard(host: str) -> bool:
    """True for addresses that mean every interface."""
    address = _address(host)
    return host in _WILDCARDS or (address is not None and address.is_unspecified)


def is_loopback(host: str) -> bool:
    """True for addresses and names that mean this machine alone."""
    address = _address(host)
    if address is None:
        name = host.lower().rstrip(".")
        return name == "localhost" or name.endswith(".localhost")
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return address.is_loopback or (mapped is not None and mapped.is_loopback)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(_bare(host))
    except ValueError:
        return None


def _bare(host: str) -> str:
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _has_port(host: str) -> bool:
    return ":" in host and _address(host) is None
