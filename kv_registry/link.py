"""The connection to Redis: bounded, with a deadline on every wait, and one place where its errors get our names."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from hashlib import sha1
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    ConnectionError as RedisConnectionError,
)
from redis.exceptions import (
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import (
    TimeoutError as RedisTimeoutError,
)

from kvrelay.errors import InternalError, InvalidArgument, Unavailable

ANSWER_TIMEOUT_S: Final = 2.0
"""Longest wait for one answer, connecting included; a healthy store answers our longest script within some ms."""

CONNECT_TIMEOUT_S: Final = 1.0
"""Longest wait for a connection."""

CONNECTIONS_MAX: Final = 32
"""Connections of one registry process. Scripts take well under a ms, so this is far more than the store can use."""

Argument: TypeAlias = str | bytes | int | float


class RedisLink:
    """Commands and scripts on one Redis or Valkey.

    Args:
        url: redis://, rediss:// or unix://.
        connections: most connections; more callers wait for one, at most `ANSWER_TIMEOUT_S`.

    Raises:
        InvalidArgument: the URL is not one.
    """

    def __init__(self, url: str, *, connections: int = CONNECTIONS_MAX) -> None:
        self._redis = Redis.from_pool(_pool(url, connections))
        self._execute = cast("Callable[..., Awaitable[Any]]", self._redis.execute_command)
        self._answered_at_s = -float("inf")

    def answered_within(self, seconds: float) -> bool:
        """Return whether the store has answered anything in the last `seconds`."""
        return time.monotonic() - self._answered_at_s <= seconds

    async def command(self, *arguments: Argument) -> Any:
        """Run one command.

        Raises:
            Unavailable: the store does not answer, or takes no writes now.
        """
        with _own_errors():
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                answer = await self._execute(*arguments)
        self._answered_at_s = time.monotonic()
        return answer

    async def script(self, name: str, keys: Sequence[str], arguments: Sequence[Argument] = ()) -> Any:
        """Run a script of `lua/`.

        Raises:
            Unavailable: the store does not answer, or takes no writes now.
        """
        source, digest = _source(name)
        try:
            return await self.command("EVALSHA", digest, len(keys), *keys, *arguments)
        except _ScriptMissing:
            return await self.command("EVAL", source, len(keys), *keys, *arguments)

    async def close(self) -> None:
        """Close all connections."""
        await self._redis.aclose(close_connection_pool=True)


def _pool(url: str, connections: int) -> BlockingConnectionPool:
    try:
        return BlockingConnectionPool.from_url(
            url,
            max_connections=connections,
            timeout=ANSWER_TIMEOUT_S,
            # Our own deadline is around each command. The client's would now and then swallow a cancellation: it uses
            # `asyncio.wait_for`, which in Python 3.11 loses one that comes just as the wait ends.
            socket_timeout=None,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            # Once, at once, for connections that died with a restarted store. All scripts may run twice.
            retry=Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
            protocol=2,
        )
    except ValueError as error:
        raise InvalidArgument("redis_url", f"{url!r} is not a redis://, rediss:// or unix:// URL") from error


class _ScriptMissing(Exception):
    """The store does not know the script: it was restarted, or the script never ran there."""


_SCRIPTS: Final = Path(__file__).with_name("lua")

_USES: Final = re.compile(r"^-- uses: (.+)$", re.MULTILINE)


@lru_cache(maxsize=64)
def _source(name: str) -> tuple[str, str]:
    """Return a script after the libraries that its head names, in that order, and the digest of the whole."""
    body = _read(name)
    uses = _USES.search(body)
    libraries = uses.group(1).split(", ") if uses else []
    source = "\n".join([*map(_read, libraries), body])
    return source, sha1(source.encode(), usedforsecurity=False).hexdigest()


def _read(name: str) -> str:
    return (_SCRIPTS / f"{name}.lua").read_text(encoding="utf-8")


@contextmanager
def _own_errors() -> Iterator[None]:
    try:
        yield
    except (RedisConnectionError, RedisTimeoutError, ReadOnlyError, OutOfMemoryError, OSError) as error:
        raise Unavailable(
            f"the registry's store gave no answer ({type(error).__name__}): check that Redis runs and has memory"
        ) from error
    except NoScriptError as error:
        raise _ScriptMissing from error
    except ResponseError as error:
        raise InternalError(f"the registry's store refused a command: {error}") from error
    except RedisError as error:
        raise Unavailable(f"the registry's store failed ({type(error).__name__})") from error
