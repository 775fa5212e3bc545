"""`grpc.health.v1` with real checks: a service is healthy when its own check says so, now."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvrelay.logs import Logger

Check: TypeAlias = Callable[[], bool]
Status: TypeAlias = "health_pb2.HealthCheckResponse.ServingStatus"

HEALTH_INTERVAL_S: Final = 0.25
"""Time between evaluations for watchers: a quarter of a second is well inside every liveness bound."""

OVERALL: Final = ""
"""Name of the whole process: healthy when all of its services are."""

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc] # the package is untyped
    """Checks by service name; after `drain()` nothing is healthy any more."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._checks: dict[str, Check] = {}
        self._told: dict[str, bool] = {}
        self._draining = False
        self._changed = asyncio.Condition()

    def set_check(self, service: str, check: Check) -> None:
        """Set the check of a service (full name); it must answer at once and is called often."""
        self._checks[service] = check

    def knows(self, service: str) -> bool:
        """Return whether a service has a check."""
        return service in self._checks

    def healthy(self, service: str = OVERALL) -> bool:
        """Return whether a known service, or the whole process, is healthy now."""
        if self._draining:
            return False
        names = self._checks if service == OVERALL else (service,)
        return all(self._passes(name) for name in names)

    async def drain(self) -> None:
        """Turn everything unhealthy, for good, and tell watchers at once."""
        self._draining = True
        await self._tell()

    async def watch_checks(self) -> None:
        """Evaluate all checks and wake the watchers, for ever; run as a task."""
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            self.healthy()
            await self._tell()

    async def Check(self, request: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> Any:  # noqa: N802
        """Answer for one service; NOT_FOUND for an unknown one."""
        status = self._status(request.service)
        if status == _UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service here")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(  # noqa: N802
        self, request: Any, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[Any]:
        """Tell the status of a service now and whenever it changes."""
        del context
        last = None
        while True:
            status = self._status(request.service)
            if status != last:
                yield health_pb2.HealthCheckResponse(status=status)
                last = status
                continue
            async with self._changed:
                await self._changed.wait()

    def _status(self, service: str) -> Any:
        if service != OVERALL and service not in self._checks:
            return _UNKNOWN
        return _SERVING if self.healthy(service) else _NOT_SERVING

    def _passes(self, service: str) -> bool:
        try:
            passes = bool(self._checks[service]())
        except Exception:
            self._logger.exception("health.check_failed", service=service)
            passes = False
        self._note(service, self._told.get(service), passes)
        self._told[service] = passes
        return passes

    def _note(self, service: str, before: bool | None, now: bool) -> None:  # noqa: FBT001 - two states of one thing
        """Log a change. Falling ill is a warning; not to be well yet at the start, or to get well, is news."""
        if before is now or (before is None and now):
            return
        log = self._logger.warning if before else self._logger.info
        log("health.changed", service=service, healthy=now)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()
