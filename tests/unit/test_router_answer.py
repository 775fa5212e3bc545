import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.client.values import Delta
from kvrelay.errors import PeerLost
from kvrelay.model.files import resolve
from kvrelay.model.text import load_text
from kvrelay.rpc.convert import TokenSpan
from kvrelay.types import FinishReason, Sampling, TokenLogprobs
from router.answer import Answer

MOCK = load_text(resolve("mock"))
PROMPT = 10
EOS = MOCK.eos_ids[0]


def answer(*, tell_ids: bool = False, **sampling: object) -> Answer:
    return Answer(
        prompt_tokens=PROMPT,
        sampling=Sampling(**{"max_tokens": 100, **sampling}),
        eos_ids=MOCK.eos_ids,
        tokenizer=MOCK.tokenizer,
        tell_ids=tell_ids,
    )


def ids(text: str) -> tuple[int, ...]:
    return tuple(MOCK.tokenizer.encode(text).ids)


def span(at: int, tokens: tuple[int, ...], attempt: int = 0, **rest: object) -> TokenSpan:
    return TokenSpan(attempt=attempt, position=PROMPT + at, ids=tokens, **rest)


def text_of(delta: Delta | None) -> str:
    return delta.text if delta else ""


def test_tokens_that_are_there_already_are_dropped():
    got = answer()
    deltas = [got.take(span(at, tokens), attempt=0) for at, tokens in ((0, ids("ab")), (0, ids("ab")), (1, ids("bcd")))]
    assert [text_of(delta) for delta in deltas] == ["ab", "", "cd"]
    assert tuple(got.output) == ids("abcd")


def test_a_gap_ends_the_attempt():
    got = answer()
    got.take(span(0, ids("ab")), attempt=0)
    with pytest.raises(PeerLost, match="from position 13 came where 12 was next"):
        got.take(span(3, ids("d")), attempt=0)


def test_tokens_of_an_earlier_attempt_are_ignored():
    got = answer()
    assert got.take(span(0, ids("zz"), attempt=0), attempt=1) is None
    assert text_of(got.take(span(0, ids("ab"), attempt=1), attempt=1)) == "ab"


@given(
    text=st.text("abé", min_size=1, max_size=20),
    spans=st.lists(st.tuples(st.integers(0, 25), st.integers(1, 8)), max_size=30),
)
def test_however_spans_overlap_each_token_is_told_once(text, spans):
    whole = ids(text)
    got = answer(tell_ids=True)
    told: list[int] = []
    for back, length in spans:
        at = max(0, len(got.output) - back)
        delta = got.take(span(at, whole[at : at + length]), attempt=0)
        if delta and delta.ids:
            assert delta.position == PROMPT + len(told)
            told += delta.ids
    assert tuple(told) == whole[: len(told)]


def test_an_end_token_has_no_text_and_counts():
    got = answer()
    assert text_of(got.take(span(0, (*ids("ab"), EOS, *ids("zz"))), attempt=0)) == "ab"
    assert got.reason is FinishReason.STOP
    assert tuple(got.output) == (*ids("ab"), EOS)


def test_end_tokens_do_not_count_before_min_tokens_or_when_ignored():
    early = answer(min_tokens=3)
    early.take(span(0, (*ids("ab"), EOS)), attempt=0)
    assert early.reason is None
    ignoring = answer(ignore_eos=True, stop_ids=ids("c"))
    ignoring.take(span(0, (EOS, *ids("c"))), attempt=0)
    assert ignoring.reason is FinishReason.STOP
    assert len(ignoring.output) == 2


def test_the_answer_ends_at_max_tokens_with_all_text_released():
    got = answer(max_tokens=3, stop_strings=("bcX",))
    assert text_of(got.take(span(0, ids("abcd")), attempt=0)) == "abc"
    assert got.reason is FinishReason.LENGTH


def test_a_stop_string_over_several_spans_is_cut_off_and_counted_up_to_its_last_token():
    got = answer(stop_strings=("END",), tell_ids=True)
    deltas = [got.take(span(at, ids(part)), attempt=0) for at, part in ((0, "heE"), (3, "N"), (4, "Dxx"))]
    assert [text_of(delta) for delta in deltas] == ["he", "", ""]
    assert (got.stop_string, got.reason, len(got.output)) == ("END", FinishReason.STOP, 5)
    assert deltas[2] is not None
    assert deltas[2].ids == ids("D")


def test_half_a_character_at_the_end_is_told_as_it_is():
    got = answer()
    first = got.take(span(0, ids("é")[:1]), attempt=0)
    assert first is None
    assert got.flush() == "\ufffd"
    assert got.flush() == ""


def test_a_continued_answer_goes_on_without_telling_its_beginning_again():
    got = answer(stop_strings=("cd",))
    got.prime(array.array("I", [*ids("ab"), *ids("é")[:1]]))
    assert text_of(got.take(span(3, (*ids("é")[1:], *ids("c"))), attempt=0)) == "é"
    assert text_of(got.take(span(5, ids("d")), attempt=0)) == ""
    assert got.stop_string == "cd"


def test_log_probabilities_travel_with_their_tokens():
    got = answer(tell_ids=True, logprobs=1)
    many = tuple(TokenLogprobs(-float(at)) for at in range(3))
    got.take(span(0, ids("a"), logprobs=many[:1]), attempt=0)
    delta = got.take(span(0, ids("abc"), logprobs=many), attempt=0)
    assert delta == Delta(text="bc", position=PROMPT + 1, ids=ids("bc"), logprobs=many[1:])
