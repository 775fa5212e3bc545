"""One attempt of a request, from the engine's taking it in to the last token."""

import contextlib
from collections.abc import AsyncGenerator

from decode_svc.leg import Reading
from decode_svc.remote import read_remotely
from decode_svc.trace import Trace
from decode_svc.values import Order, Reply, Wrote
from kvrelay.decode_events import Accepted, Finished
from kvrelay.engine.protocol import Ended, Event, Generate, Held, Tokens
from kvrelay.errors import DeadlineExceeded
from kvrelay.replica.bridge import EngineBridge
from kvrelay.replica.channel import JobChannel
from kvrelay.replica.peers import Peers
from kvrelay.replica.prefix_pull import PrefixPull
from kvrelay.rpc.deadline import Deadline
from kvrelay.types import Usage


class Attempt:
    """Runs one order on the engine; whatever way it ends, the job is over then."""

    def __init__(
        self,
        order: Order,
        *,
        bridge: EngineBridge,
        peers: Peers,
        prefix_pull: PrefixPull,
        deadline: Deadline,
        lease_ttl_s: float,
        trace: Trace,
    ) -> None:
        self._order = order
        self._bridge = bridge
        self._peers = peers
        self._prefix_pull = prefix_pull
        self._deadline = deadline
        self._lease_ttl_s = lease_ttl_s
        self._trace = trace
        self._usage = Usage(prompt_tokens=len(order.prompt.prompt_ids) // 4)

    async def replies(self) -> AsyncGenerator[Reply, None]:
        """Yield what happens; the last reply is `Finished`.

        Raises:
            KvrelayError: the attempt failed.
        """
        try:
            async with self._bridge.job(self._command()) as channel, contextlib.aclosing(self._run(channel)) as replies:
                async for reply in replies:
                    if isinstance(reply, Finished):
                        self._usage = reply.usage
                        self._trace.finished(reply)
                    yield reply
        finally:
            # Many answers are cut off by their reader, as at a stop string: they count too.
            if self._usage.output_tokens:
                self._trace.spent(self._usage)

    async def _run(self, channel: JobChannel) -> AsyncGenerator[Reply, None]:
        held = await self._held(channel)
        self._trace.held(held.tokens)
        self._usage.cached_tokens = min(held.tokens, self._usage.prompt_tokens)
        yield Accepted(held.tokens)
        if self._order.targets:
            read = self._reading(channel, held)
            async with contextlib.aclosing(read_remotely(read)) as replies:
                async for reply in replies:
                    yield reply
            if read.finished:
                return
        else:
            await self._bring_prefix(channel, held)
        self._trace.prompt_ready()
        async with contextlib.aclosing(self._written(channel)) as replies:
            async for reply in replies:
                yield reply

    async def _held(self, channel: JobChannel) -> Held:
        event = await self._next(channel)
        assert isinstance(event, Held), event
        return event

    async def _bring_prefix(self, channel: JobChannel, held: Held) -> None:
        """Load what another replica holds of a prompt that is read here, if somebody does and it pays."""
        order = self._order
        stats = await self._prefix_pull.bring(channel, held, order.holder, order.prompt.block_keys, self._deadline)
        if stats is not None:
            lacking = self._usage.prompt_tokens - self._usage.cached_tokens
            self._usage.pulled_tokens, self._usage.pulled_bytes = min(stats.tokens, lacking), stats.bytes

    async def _written(self, channel: JobChannel) -> AsyncGenerator[Reply, None]:
        while True:
            match await self._next(channel):
                case Tokens() as event:
                    self._note_written(len(event.ids))
                    yield Wrote(event.position, event.ids, event.logprobs)
                case Ended() as event:
                    yield Finished(event.reason, event.usage, event.stop_id)
                    return
                case _:
                    pass  # the rest of a lost leg

    def _note_written(self, tokens: int) -> None:
        self._usage.output_tokens += tokens
        if not self._order.targets or not self._usage.pulled_tokens:
            come = self._usage.cached_tokens + self._usage.pulled_tokens
            self._usage.computed_tokens = self._usage.prompt_tokens - come

    async def _next(self, channel: JobChannel) -> Event:
        try:
            return await channel.get(timeout_s=self._deadline.left_s())
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed before the answer was complete") from None

    def _command(self) -> Generate:
        order = self._order
        return Generate(
            job_id=self._bridge.job_id(order.request_id, order.attempt),
            prompt=order.prompt,
            sampling=order.sampling,
            forced_next=order.forced_next,
            remote=bool(order.targets),
            prefix_tokens=0 if order.targets else self._prefix_pull.tokens(order.holder),
            priority=order.priority,
            deadline_at_s=self._deadline.at_s,
        )

    def _reading(self, channel: JobChannel, held: Held) -> Reading:
        return Reading(
            order=self._order,
            held_tokens=held.tokens,
            usage=self._usage,
            channel=channel,
            bridge=self._bridge,
            peers=self._peers,
            deadline=self._deadline,
            lease_ttl_s=self._lease_ttl_s,
            trace=self._trace,
            first=self._order.forced_next,
        )
