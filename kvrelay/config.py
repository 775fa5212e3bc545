"""Every default of kvrelay, in one place, and the command-line flags made from them.

Each process has a frozen dataclass here. A field becomes the flag `--field-name` and the environment variable
`KVRELAY_FIELD_NAME` (flag wins); `docs/operating.md` is checked against this file by a test.
"""

import argparse
import dataclasses
import os
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from kvrelay.errors import InvalidArgument

ROUTER_PORT = 50050
ROUTER_HTTP_PORT = 8000
ROUTER_METRICS_PORT = 9100
REGISTRY_PORT = 50051
PREFILL_PORT = 50060
DECODE_PORT = 50080

HEARTBEAT_INTERVAL_S = 0.5
LIVENESS_TTL_S = 5.0
LEASE_TTL_S = 30.0
LEASE_EXTENSION_INTERVAL_S = 5.0
VERDICT_KEPT_S = 30.0
REQUEST_DEADLINE_S = 600.0
CONTROL_DEADLINE_S = 10.0
RESERVATION_PENDING_TTL_S = 3.0
RESERVE_DEADLINE_S = 0.05
DRAIN_TIMEOUT_S = 30.0
LOAD_CAP_EPSILON = 0.25
STOCK_SHARE = 0.5
QUARANTINE_SHARE_MAX = 0.05
BLOCK_TOKENS = 32
PAGE_TOKENS_CPU = 32
DISK_TIER_MIB = 4096
PIECE_KIB = 4096
"""A piece costs both sides together 0.5 ms of processor time (event, gRPC message, command, READ; measured between two
mock replicas on one machine) and hides its own transfer, which takes as long for 4 MiB at 8 GB/s. So it pays on every
slower link, and one step over a small model (256 tokens, 6 MB in bf16) is a piece by itself."""

DEFAULT_MODEL = "smollm2-135m"

C = TypeVar("C")


def option(default: Any, help: str, *, choices: tuple[str, ...] | None = None) -> Any:  # noqa: A002 - argparse's word
    """Declare a configuration field with its help text."""
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices})


@dataclasses.dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """What every process tells of itself."""

    log_level: str = option("info", "least severe log level", choices=("debug", "info", "warning", "error"))
    otlp_endpoint: str = option("", "OTLP/gRPC endpoint for traces and metrics, such as http://host:4317; empty: none")
    metrics_port: int = option(0, "port of the Prometheus endpoint; 0: none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig(TelemetryConfig):
    """How a gRPC server is reached."""

    bind: str = option("127.0.0.1", "address to listen on")
    advertise: str = option("", "host that others reach this process under; empty: the bind address")
    port: int = option(0, "gRPC port; 0: any free one")
    drain_timeout_s: float = option(DRAIN_TIMEOUT_S, "longest wait for running requests after SIGTERM, s")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegistryConfig(ServerConfig):
    """The registry process."""

    port: int = option(REGISTRY_PORT, "gRPC port; 0: any free one")
    redis_url: str = option("redis://127.0.0.1:6379/0", "Redis or Valkey; redis://, rediss:// or unix:// URL")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterConfig(ServerConfig):
    """A router process."""

    port: int = option(ROUTER_PORT, "gRPC port; 0: any free one")
    registry: str = option(f"127.0.0.1:{REGISTRY_PORT}", "registry address, host:port")
    model: str = option(DEFAULT_MODEL, "model: the bundled name, a Hugging Face directory, or a GGUF file")
    model_alias: str = option("", "name clients ask for; empty: taken from the model")
    policy: str = option(
        "prefix_aware",
        "how replicas are chosen",
        choices=("prefix_aware", "round_robin", "random", "least_loaded"),
    )
    disaggregate: str = option(
        "auto", "prefill remotely: by the decider, always, or never", choices=("auto", "always", "never")
    )
    load_cap_epsilon: float = option(LOAD_CAP_EPSILON, "load cap over the mean load of the pool, as a share of it")
    request_deadline_s: float = option(REQUEST_DEADLINE_S, "deadline of requests that bring none, s")
    queue_requests: int = option(1024, "requests that may wait in the router")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The engine side of a replica."""

    engine: str = option("torch", "what computes: the real engine or the mock", choices=("torch", "mock"))
    model: str = option(DEFAULT_MODEL, "model: the bundled name, a Hugging Face directory, or a GGUF file")
    model_alias: str = option("", "name clients ask for; empty: taken from the model")
    dtype: str = option("auto", "dtype of weights and KV", choices=("auto", "float32", "bfloat16"))
    device: str = option("cpu", "torch device")
    attention: str = option("auto", "attention backend", choices=("auto", "cpu", "flash_attn"))
    threads: int = option(0, "compute threads; 0: one per core divided among local replicas, at least one")
    block_tokens: int = option(BLOCK_TOKENS, "tokens in a block; equal in the whole fleet")
    page_tokens: int = option(PAGE_TOKENS_CPU, "tokens in a page, a multiple of block_tokens")
    kv_mib: int = option(1024, "memory of the KV pool, MiB")
    chunk_tokens: int = option(256, "most prompt tokens computed in one step")
    piece_kib: int = option(PIECE_KIB, "least KV to announce before a prompt is complete, KiB; 0: each step's")
    max_sequences: int = option(32, "most sequences decoded at once")
    queue_jobs: int = option(256, "jobs that may wait in the engine")
    stock_share: float = option(STOCK_SHARE, "share of the pool's pages that may lie under lease")
    pull_timeout_s: float = option(10.0, "longest time without progress in a pull, s")
    mock_profile: str = option("", "mock timings: 'prefill_ms_per_token=0.1,step_ms=5,...'; empty: instant")
    disk_tier_dir: str = option("", "directory for KV pages that outlive pool and process; empty: none")
    disk_tier_mib: int = option(DISK_TIER_MIB, "most that the pages in disk_tier_dir may take, MiB")
    engine_side: str = option("thread", "where the engine side runs", choices=("thread", "process"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaConfig(ServerConfig, EngineConfig):
    """A replica process."""

    role: str = option("both", "what the replica does", choices=("prefill", "decode", "both"))
    replica_id: str = option("", "stable name; empty: role and port")
    registry: str = option(f"127.0.0.1:{REGISTRY_PORT}", "registry address, host:port; empty: stands alone")
    heartbeat_interval_s: float = option(HEARTBEAT_INTERVAL_S, "time between heartbeats, s")
    liveness_ttl_s: float = option(LIVENESS_TTL_S, "time without heartbeat after which a replica counts as dead, s")
    lease_ttl_s: float = option(LEASE_TTL_S, "life of a lease without extension, s")


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpConfig:
    """A fleet on this machine, as `kvrelay up` starts it."""

    prefill: int = option(1, "replicas that only prefill")
    decode: int = option(1, "replicas that only decode")
    both: int = option(0, "replicas that do both")
    redis_url: str = option("", "Redis or Valkey to use; empty: an embedded Valkey, gone with the fleet")
    ports: str = option("default", "the documented ports, or any free ones", choices=("default", "free"))
    on_exit: str = option(
        "restart", "when a process dies: start it again, or end the fleet", choices=("restart", "fail")
    )
    log_format: str = option(
        "text", "how the log lines of the processes are shown: for people, or as written", choices=("text", "json")
    )
    start_timeout_s: float = option(180.0, "longest wait until every process is ready, s")
    state_dir: str = option(".kvrelay", "directory of fleet.json, which tells addresses and process ids")


def env_name(field: str) -> str:
    """Return the environment variable of a configuration field."""
    return f"KVRELAY_{field.upper()}"


def flag_name(field: str) -> str:
    """Return the command-line flag of a configuration field."""
    return f"--{field.replace('_', '-')}"


def add_flags(parser: argparse.ArgumentParser, config: type[Any], *, skip: frozenset[str] = frozenset()) -> None:
    """Add one flag a field of a configuration class."""
    for field in dataclasses.fields(config):
        if field.name in skip:
            continue
        parser.add_argument(
            flag_name(field.name),
            default=None,
            type=_field_type(config, field.name),
            choices=field.metadata.get("choices"),
            help=f"{field.metadata['help']} (default: {field.default!r})",
        )


def build(config: type[C], given: Mapping[str, Any], env: Mapping[str, str] | None = None) -> C:
    """Build a configuration from flags (None: not given), then the environment, then defaults.

    Raises:
        InvalidArgument: an environment variable does not parse, or is not one of the choices.
    """
    env = os.environ if env is None else env
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        if given.get(field.name) is not None:
            values[field.name] = given[field.name]
        elif env_name(field.name) in env:
            values[field.name] = _from_env(config, field, env[env_name(field.name)])
    return config(**values)


def _from_env(config: type[Any], field: "dataclasses.Field[Any]", text: str) -> Any:
    kind = _field_type(config, field.name)
    try:
        value = kind(text)
    except ValueError as error:
        raise InvalidArgument(env_name(field.name), f"{text!r} is not {kind.__name__}") from error
    choices = field.metadata.get("choices")
    if choices and value not in choices:
        raise InvalidArgument(env_name(field.name), f"{text!r} is not one of {', '.join(choices)}")
    return value


def _field_type(config: type[Any], name: str) -> Any:
    kind = typing.get_type_hints(config)[name]
    assert not isinstance(kind, types.UnionType), name
    return kind
