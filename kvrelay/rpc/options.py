"""gRPC settings that both ends of every connection share, with their reasons."""

from typing import Any, Final

MESSAGE_BYTES_MAX: Final = 64 * 1024 * 1024
"""Bound of one message. The largest are snapshots' chunks and prompts of a few hundred thousand tokens, far below."""

KEEPALIVE_TIME_MS: Final = 2_000
"""A connection without traffic is asked for a sign of life this often."""

KEEPALIVE_TIMEOUT_MS: Final = 2_000
"""No answer within this: the connection is dead. With the above, a hanging peer is noticed within 4 s."""

PING_INTERVAL_MIN_MS: Final = 1_000
"""What a server allows; half of what clients do, so that jitter never gets a client thrown out."""

CONNECT_TIMEOUT_MS: Final = 2_000
"""Longest wait for one connection attempt (gRPC's own default is 20 s)."""

RECONNECT_MIN_MS: Final = 100
RECONNECT_MAX_MS: Final = 1_000
"""Backoff between attempts: a restarted peer is found again within about a second."""

DNS_INTERVAL_MIN_MS: Final = 1_000
"""A peer that restarts under the same name may have another address; gRPC would ask again after 30 s only."""

_COMMON: Final[tuple[tuple[str, Any], ...]] = (
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    # The bound of any ping. gRPC does not heed the keepalive's own timeout in every version.
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    # 0: no limit of pings without data; an idle connection is kept alive too.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_channelz", 1),
)

SERVER: Final[tuple[tuple[str, Any], ...]] = (
    *_COMMON,
    ("grpc.http2.min_ping_interval_without_data_ms", PING_INTERVAL_MIN_MS),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", PING_INTERVAL_MIN_MS),
    # Two processes must never share a port unnoticed.
    ("grpc.so_reuseport", 0),
)

CHANNEL: Final[tuple[tuple[str, Any], ...]] = (
    *_COMMON,
    ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
    ("grpc.initial_reconnect_backoff_ms", RECONNECT_MIN_MS),
    ("grpc.max_reconnect_backoff_ms", RECONNECT_MAX_MS),
    ("grpc.dns_min_time_between_resolutions_ms", DNS_INTERVAL_MIN_MS),
    # A new channel to an address starts without the backoff that an earlier one has run up.
    ("grpc.use_local_subchannel_pool", 1),
    # Retries are decided where budgets and alternates are known, never below.
    ("grpc.enable_retries", 0),
    # Connections inside a fleet never go through the environment's web proxy.
    ("grpc.enable_http_proxy", 0),
)
