"""Reading a prompt remotely: one prefill replica after the other, until its KV is here or nobody is left."""

import contextlib
from collections.abc import AsyncGenerator

from decode_svc.leg import Leg, Reading
from decode_svc.reasons import PREFIX_LOST, UNREACHABLE, LegFailedError
from decode_svc.values import Reply
from kvrelay.decode_events import LegMoved, LegState
from kvrelay.engine.protocol import ReadLocally
from kvrelay.errors import Unavailable


async def read_remotely(read: Reading) -> AsyncGenerator[Reply, None]:
    """Yield replies until the engine has, or will compute, what it needs to go on by itself.

    Raises:
        InvalidArgument: the prefill replica refuses the input.
        Unavailable: every target failed and reading it here is not allowed.
        DeadlineExceeded: the caller's deadline passed.
        KvrelayError: the job failed in the engine.
    """
    reason = ""
    for number, target in enumerate(read.order.targets):
        leg = Leg(read, target, f"{read.channel.job_id}.leg{number}")
        yield LegMoved(LegState.STARTED, target.peer)
        try:
            async with contextlib.aclosing(leg.replies()) as replies:
                async for reply in replies:
                    yield reply
        except LegFailedError as failure:
            reason = failure.reason
            if reason in PREFIX_LOST:
                read.held_tokens = 0
            elif reason == UNREACHABLE:
                await read.peers.lost(target.peer)
        else:
            return
        read.trace.leg_failed(target.peer, reason)
        yield LegMoved(LegState.FAILED, target.peer, reason)
    if read.order.never_local:
        raise Unavailable(f"no prefill replica could read the prompt (the last one: {reason}); try again")
    read.bridge.send(ReadLocally(job_id=read.channel.job_id))
    yield LegMoved(LegState.LOCAL, None, reason)
