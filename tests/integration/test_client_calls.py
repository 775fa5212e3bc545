"""The client against a router of which only the text is false: real servicer, real gRPC, both clients."""

import asyncio
import contextlib
import threading

import pytest
from support.fake_router import FakeRouter, routing
from support.rpc import WAIT_S, serving, until

from kvrelay.client import AsyncClient, Client, Decision, Delta, Finish, FinishReason, Message
from kvrelay.errors import (
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    Mismatch,
    PeerLost,
    ResourceExhausted,
    Unavailable,
)
from kvrelay.types import Peer, Role

DEADLINE_S = 20.0
NOBODY = "127.0.0.1:1"
"""A privileged port on which nothing listens."""


@contextlib.asynccontextmanager
async def asking(router, **options):
    async with routing(router) as address, AsyncClient(address, **options) as client:
        yield client


async def test_parts_come_typed_and_in_order():
    async with asking(FakeRouter()) as client, client.stream_chat("Why?") as stream:
        parts = [part async for part in stream]
        answer = stream.answer
    assert [type(part) for part in parts] == [Decision, Delta, Delta, Finish]
    assert parts[0].decode == Peer("decode-0", "i", "h:1")
    assert parts[-1].reason is FinishReason.STOP
    assert (answer.text, answer.ids, answer.usage.output_tokens) == ("The sky", (0, 1), 2)
    assert (answer.decision.seed, answer.finish.ttft_s) == (7, 0.25)


async def test_chat_sends_messages_and_generate_sends_what_it_is_given():
    router = FakeRouter()
    async with asking(router) as client:
        await client.chat([Message("user", "Why?")], max_tokens=3)
        await client.generate("Why?", session="s")
        await client.generate([1, 2])
    assert [request.WhichOneof("prompt") for request in router.asked] == ["chat", "text", "prompt_ids"]
    assert router.asked[0].sampling.max_tokens == 3
    assert router.asked[1].session == "s"


async def test_every_request_has_a_deadline():
    router = FakeRouter()
    async with asking(router, deadline_s=50.0) as client:
        await client.chat("Why?")
        await client.chat("Why?", deadline_s=7.0)
    assert router.deadlines_s[0] == pytest.approx(50.0, abs=DEADLINE_S)
    assert router.deadlines_s[1] == pytest.approx(7.0, abs=3.0)


@pytest.mark.parametrize(
    ("error", "field", "value"),
    [
        (InvalidArgument("sampling.temperature", "nan is not in [0, 2]"), "field", "sampling.temperature"),
        (ResourceExhausted("full", retry_after_s=2.5), "retry_after_s", 2.5),
        (Mismatch("block_tokens", 32, 64), "got", "64"),
    ],
)
async def test_errors_come_back_as_they_were_raised(error, field, value):
    async with asking(FakeRouter(error=error)) as client:
        with pytest.raises(type(error)) as caught:
            await client.chat("Why?")
    assert getattr(caught.value, field) == value


async def test_a_passed_deadline_is_told_and_ends_the_request():
    router = FakeRouter(endless=True)
    async with asking(router) as client:
        with pytest.raises(DeadlineExceeded):
            await client.chat("Why?", deadline_s=0.2)
        await until(lambda: router.ended, "the router learns of the deadline")
    assert router.ended == ["cancelled"]


async def test_leaving_a_stream_early_cancels_the_request():
    router = FakeRouter(endless=True)
    async with asking(router) as client:
        async with client.stream_chat("Why?") as stream:
            async for part in stream:
                if part.text:
                    break
        assert [part async for part in stream] == []
        await until(lambda: router.ended, "the router learns of the cancel")
    assert router.ended == ["cancelled"]


async def test_cancelling_the_task_that_reads_cancels_the_request():
    router = FakeRouter(endless=True)
    async with asking(router) as client:
        task = asyncio.create_task(client.chat("Why?"))
        await until(lambda: router.asked, "the request arrives")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: router.ended, "the router learns of the cancel")
    assert router.ended == ["cancelled"]


async def test_an_answer_that_ends_without_finish_is_an_error():
    async with asking(FakeRouter(cut=True)) as client:
        with pytest.raises(Unavailable, match="before its finish"):
            await client.chat("Why?")


async def test_a_router_that_is_away_is_named():
    async with AsyncClient(NOBODY) as client:
        with pytest.raises(PeerLost, match=NOBODY):
            await client.chat("Why?", deadline_s=DEADLINE_S)
        with pytest.raises(PeerLost, match=NOBODY):
            await client.status()


async def test_another_router_answers_when_the_first_is_away_and_is_kept():
    router = FakeRouter()
    async with routing(router) as address, AsyncClient([NOBODY, address]) as client:
        assert (await client.chat("Why?")).text == "The sky"
        assert (await client.status()).state == "ready"
        assert (await client.chat("Why?")).text == "The sky"
    assert len(router.asked) == 2


async def test_a_request_that_is_refused_is_not_offered_to_another_router():
    refusing, other = FakeRouter(error=InvalidArgument("prompt", "empty")), FakeRouter()
    async with routing(refusing) as first, routing(other) as second, AsyncClient([first, second]) as client:
        with pytest.raises(InvalidArgument):
            await client.chat("")
    assert other.asked == []


async def test_an_answer_that_breaks_off_is_not_begun_again_elsewhere():
    class Breaking(FakeRouter):
        async def _answer(self):
            async for response in super()._answer():
                yield response
                if response.WhichOneof("event") == "delta":
                    raise PeerLost("decode-0 died")

    other = FakeRouter()
    async with routing(Breaking()) as first, routing(other) as second, AsyncClient([first, second]) as client:
        with pytest.raises(PeerLost, match="decode-0 died"):
            await client.chat("Why?")
    assert other.asked == []


async def test_questions_about_the_fleet_are_answered_in_values():
    async with asking(FakeRouter()) as client:
        status = await client.status()
        models = await client.models()
        tokens = await client.tokenize("ab", raw=True)
        chat_tokens = await client.tokenize("abc")
    assert (status.policy, status.replicas[0].role, status.replicas[0].pages_total) == ("random", Role.PREFILL, 9)
    assert models[0].context_tokens == 8192
    assert (tokens.ids, tokens.block_keys) == ((97, 98), (bytes(16), bytes(16)))
    assert len(chat_tokens.ids) == 3


async def test_a_router_without_the_method_says_so():
    async with serving(lambda _server: None) as (_, channel), AsyncClient(channel.address) as client:
        with pytest.raises(FailedPrecondition, match="UNIMPLEMENTED"):
            await client.status()


async def blocking(work):
    """Run blocking client code beside the server's event loop."""
    return await asyncio.wait_for(asyncio.to_thread(work), WAIT_S)


async def test_the_blocking_client_streams_and_answers():
    router = FakeRouter()
    async with routing(router) as address:

        def work():
            with Client(address) as client:
                texts = "".join(part.text for part in client.stream_chat("Why?"))
                whole = client.chat("Why?").text
                raw = [client.generate("x").text, client.generate([1]).text]
                return texts, whole, raw, client.status().state, client.models()[0].model, client.tokenize("a").ids

        assert await blocking(work) == ("The sky", "The sky", ["The sky"] * 2, "ready", "m", (97,))


async def test_breaking_out_of_a_blocking_stream_cancels_the_request():
    router = FakeRouter(endless=True)
    async with routing(router) as address:

        def work():
            with Client(address) as client:
                for part in client.stream_generate("Why?"):
                    if part.text:
                        break

        await blocking(work)
        await until(lambda: router.ended, "the router learns of the cancel")
    assert router.ended == ["cancelled"]


async def test_the_blocking_client_raises_typed_errors_and_goes_on():
    router = FakeRouter(error=InvalidArgument("prompt", "empty"))
    async with routing(router) as address:

        def work():
            with Client(address) as client:
                with pytest.raises(InvalidArgument, match="prompt"):
                    client.chat("")
                router.error = None
                return client.chat("Why?").text

        assert await blocking(work) == "The sky"


async def test_a_closed_blocking_client_leaves_no_thread_and_says_that_it_is_closed():
    router = FakeRouter(endless=True)
    async with routing(router) as address:

        def work():
            client = Client(address)
            stream = iter(client.stream_chat("Why?"))
            next(stream)
            client.close()
            client.close()
            with pytest.raises(RuntimeError, match="closed"):
                client.chat("Why?")
            return [thread.name for thread in threading.enumerate()]

        assert "kvrelay-client" not in await blocking(work)
        await until(lambda: router.ended, "the router learns that the client has gone")


async def test_closing_the_blocking_client_ends_what_other_threads_wait_for():
    router = FakeRouter(endless=True)
    async with routing(router) as address:
        client = Client(address)
        asked = asyncio.create_task(asyncio.to_thread(client.chat, "Why?"))
        await until(lambda: router.asked, "the request arrives")
        await blocking(client.close)
        with pytest.raises((Cancelled, asyncio.CancelledError)):
            await asyncio.wait_for(asked, WAIT_S)


def test_the_client_s_address_must_be_one():
    for address in ("", []):
        with pytest.raises(InvalidArgument, match="address"):
            AsyncClient(address)
