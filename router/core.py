"""A router without its gRPC: everything that serves one model, wired together."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from random import Random
from typing import Protocol

from kvrelay.client.values import FleetStatus, ModelInfo, Part, Tokenized
from kvrelay.config import RouterConfig
from kvrelay.kv.keys import block_keys, root_key
from kvrelay.rpc.context import bind_request_id
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.router_convert import GenerateAsk
from kvrelay.telemetry import Telemetry
from kvrelay.types import TokenArray, pack_ids, split_keys
from router.dispatch import Dispatcher
from router.fleet import Fleet
from router.gate import Gate
from router.intake import Intake, request_id_of
from router.metrics import RouterMetrics
from router.request import Means, Request, StartDecode
from router.reservations import RegistryBooking, Reservations
from router.status import fleet_status
from router.text import RouterText
from router.watcher import RegistryWatch, Watcher


class Registry(RegistryBooking, RegistryWatch, Protocol):
    """The parts of the registry's client that a router needs."""


class RouterCore:
    """Serves one model.

    Args:
        config: of the process.
        model: alias that clients ask for.
        text: its text side.
        registry: client of the registry.
        start_decode: starts attempts at decode replicas.
        telemetry: of the process.
        rng: decides between equals.
    """

    def __init__(
        self,
        config: RouterConfig,
        *,
        model: str,
        text: RouterText,
        registry: Registry,
        start_decode: StartDecode,
        telemetry: Telemetry,
        rng: Random,
    ) -> None:
        logger = telemetry.logger
        self._config = config
        self._model = model
        self._gate = Gate(config.queue_requests)
        self._intake = Intake(text, model=model)
        self.fleet = Fleet(model=model, tokenizer_fingerprint=text.model.fingerprint, logger=logger)
        self._watcher = Watcher(registry, self.fleet, model=model, logger=logger, rng=rng)
        self._reservations = Reservations(registry, self.fleet.bookings, model=model, logger=logger)
        self._dispatcher = Dispatcher(
            self.fleet,
            self._reservations,
            policy=config.policy,
            disaggregate=config.disaggregate,
            epsilon=config.load_cap_epsilon,
            rng=rng,
            telemetry=telemetry,
        )
        self._means = Means(
            fleet=self.fleet,
            dispatcher=self._dispatcher,
            reservations=self._reservations,
            start_decode=start_decode,
            metrics=RouterMetrics(telemetry, model=model),
            logger=logger,
            policy=config.policy,
        )

    async def run(self) -> None:
        """Follow the registry and keep bookings alive; for ever, as a task."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watcher.run())
            tasks.create_task(self._reservations.run())

    def ready(self) -> bool:
        """True once the mirror has caught up; it then serves without the registry too."""
        return self.fleet.caught_up

    @property
    def serving(self) -> int:
        """Requests being served."""
        return len(self._gate)

    async def generate(self, ask: GenerateAsk, deadline: Deadline) -> AsyncGenerator[Part, None]:
        """Serve a request; yields its decision, text and finish.

        Raises:
            KvrelayError: see `Request.parts`; and `InvalidArgument` for bad input.
        """
        request_id = request_id_of(ask)
        bind_request_id(request_id)
        with self._gate.enter(request_id):
            identity = self.fleet.identity
            context_tokens = identity.context_tokens if identity else None
            order, answer = await self._intake.admit(ask, request_id=request_id, context_tokens=context_tokens)
            async with aclosing(Request(order, answer, self._means, deadline).parts()) as parts:
                async for part in parts:
                    yield part

    async def tokenize(self, model: str, prompt: "str | tuple[tuple[str, str], ...] | TokenArray") -> Tokenized:
        """Return token ids and block keys of a prompt; no keys while no replica has told the block size.

        Raises:
            InvalidArgument: names the field.
        """
        self._intake.check_model(model)
        ids = await self._intake.prompt_ids(prompt)
        identity = self.fleet.identity
        if identity is None:
            return Tokenized(ids=tuple(ids), block_keys=())
        root = root_key(
            model_fingerprint=identity.model_fingerprint,
            tokenizer_fingerprint=identity.tokenizer_fingerprint,
            block_tokens=identity.block_tokens,
        )
        keys = split_keys(block_keys(root, pack_ids(ids), identity.block_tokens))
        return Tokenized(ids=tuple(ids), block_keys=tuple(keys))

    def models(self) -> tuple[ModelInfo, ...]:
        """Return the models served; nothing of a model's shape is known while no replica is there."""
        identity = self.fleet.identity
        return (
            ModelInfo(
                model=self._model,
                context_tokens=identity.context_tokens if identity else 0,
                model_fingerprint=identity.model_fingerprint if identity else "",
            ),
        )

    def status(self) -> FleetStatus:
        """Return what this router knows of the fleet."""
        return fleet_status(
            self.fleet,
            state=self._watcher.state,
            policy=self._config.policy,
            disaggregate=self._config.disaggregate,
        )
