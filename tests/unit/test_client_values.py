import math

import pytest

from kvrelay.client import Decision, Delta, Finish, FinishReason, Message, Sampling, Slo, Usage, wire
from kvrelay.client.answer import AnswerBuilder
from kvrelay.client.requests import chat_request, raw_request, tokenize_request
from kvrelay.errors import InternalError, InvalidArgument, Unavailable
from kvrelay.types import Peer, TokenLogprobs, pack_ids
from kvrelay.v1 import common_pb2, router_pb2


def decision(**fields):
    return wire.part_from_pb(router_pb2.GenerateResponse(decision=router_pb2.Decision(**fields)))


def test_a_text_is_a_user_message_of_a_chat():
    request = chat_request("Hi", {})
    assert [(message.role, message.content) for message in request.chat.messages] == [("user", "Hi")]


def test_messages_may_be_values_or_mappings():
    request = chat_request([Message("system", "Be brief."), {"role": "user", "content": "Hi"}], {})
    assert [message.role for message in request.chat.messages] == ["system", "user"]


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ([], "chat.messages"),
        (["Hi"], "chat.messages[0]"),
        ([Message("user", "x"), {"role": "user"}], "chat.messages[1]"),
    ],
)
def test_what_is_no_chat_is_refused_by_name(prompt, field):
    with pytest.raises(InvalidArgument) as caught:
        chat_request(prompt, {})
    assert caught.value.field == field


def test_raw_prompts_are_text_or_ids_as_they_are():
    assert raw_request("Hi", {}).text == "Hi"
    assert raw_request([1, 2, 70000], {}).prompt_ids == pack_ids([1, 2, 70000])


@pytest.mark.parametrize("ids", [[-1], [2**32], ["a"]])
def test_ids_that_no_vocabulary_has_are_refused(ids):
    with pytest.raises(InvalidArgument, match="prompt_ids"):
        raw_request(ids, {})


def test_options_land_in_their_fields():
    request = chat_request(
        "Hi",
        {
            "max_tokens": 5,
            "temperature": 0.5,
            "stop_strings": ("\n",),
            "stop_ids": (3,),
            "session": "s",
            "tenant": "t",
            "priority": -3,
            "slo": Slo(ttft_ms=200.0),
            "model": "m",
            "return_ids": True,
            "cache_salt": "c",
            "request_id": "r",
        },
    )
    assert (request.sampling.max_tokens, request.sampling.temperature) == (5, 0.5)
    assert list(request.sampling.stop_strings) == ["\n"]
    assert request.sampling.stop_ids == pack_ids([3])
    assert (request.session, request.tenant, request.priority, request.model) == ("s", "t", -3, "m")
    assert (request.return_ids, request.cache_salt, request.request_id) == (True, "c", "r")
    assert request.slo.ttft_ms == 200.0
    assert not request.slo.HasField("tpot_ms")


def test_what_is_not_given_stays_absent():
    sampling = chat_request("Hi", {}).sampling
    assert not sampling.HasField("max_tokens")
    assert not sampling.HasField("seed")
    assert not sampling.HasField("logprobs")


def test_sampling_may_be_given_whole_but_not_twice():
    assert chat_request("Hi", {"sampling": Sampling(top_k=7)}).sampling.top_k == 7
    with pytest.raises(TypeError, match="top_k"):
        chat_request("Hi", {"sampling": Sampling(), "top_k": 7})


def test_a_misspelt_option_is_refused():
    with pytest.raises(TypeError, match="max_token"):
        chat_request("Hi", {"max_token": 7})


@pytest.mark.parametrize(("name", "value"), [("temperature", math.nan), ("top_k", -1), ("max_tokens", 0)])
def test_sampling_out_of_range_is_refused_before_it_is_sent(name, value):
    with pytest.raises(InvalidArgument) as caught:
        raw_request("Hi", {name: value})
    assert caught.value.field == f"sampling.{name}"


def test_messages_cannot_be_tokenized_raw():
    assert tokenize_request("Hi", raw=True, model="").text == "Hi"
    with pytest.raises(InvalidArgument):
        tokenize_request([Message("user", "Hi")], raw=True, model="")


def test_a_local_prefill_has_no_prefill_replica():
    part = decision(decode=common_pb2.Peer(replica_id="decode-0", incarnation="a", address="h:1"))
    assert isinstance(part, Decision)
    assert part.prefill is None
    assert part.decode == Peer("decode-0", "a", "h:1")


def test_an_event_of_a_newer_router_is_skipped():
    assert wire.part_from_pb(router_pb2.GenerateResponse()) is None


def test_a_finish_without_reason_is_an_error():
    with pytest.raises(InternalError):
        wire.part_from_pb(router_pb2.GenerateResponse(finish=router_pb2.Finish()))


def test_usage_comes_over_field_by_field():
    usage = common_pb2.Usage(prompt_tokens=9, pulled_bytes=2**40, pull_s=0.5, decode_computed_tokens=1)
    finish = router_pb2.Finish(reason=common_pb2.FINISH_REASON_LENGTH, usage=usage)
    part = wire.part_from_pb(router_pb2.GenerateResponse(finish=finish))
    assert isinstance(part, Finish)
    assert part.usage == Usage(prompt_tokens=9, pulled_bytes=2**40, pull_s=0.5, decode_computed_tokens=1)


def test_an_answer_is_the_sum_of_its_deltas_with_the_last_decision():
    builder = AnswerBuilder()
    builder.add(decision(attempt=0))
    builder.add(Delta(text="The ", ids=(1,), logprobs=(TokenLogprobs(-0.5),)))
    builder.add(decision(attempt=1))
    builder.add(Delta(text="sky", ids=(2, 3)))
    builder.add(Finish(reason=FinishReason.STOP, usage=Usage(output_tokens=3), attempts=2))
    answer = builder.answer()
    assert (answer.text, answer.ids, answer.decision.attempt) == ("The sky", (1, 2, 3), 1)
    assert answer.logprobs == (TokenLogprobs(-0.5),)
    assert answer.usage.output_tokens == 3


def test_an_answer_without_end_is_no_answer():
    builder = AnswerBuilder()
    builder.add(decision())
    builder.add(Delta(text="The "))
    with pytest.raises(Unavailable):
        builder.answer()


def test_the_texts_of_all_parts_make_the_answer():
    parts = [decision(), Delta(text="a"), Delta(text="b"), Finish(reason=FinishReason.STOP, usage=Usage())]
    assert "".join(part.text for part in parts) == "ab"
