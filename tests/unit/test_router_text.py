import array
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from kvrelay.errors import InvalidArgument
from kvrelay.model.files import resolve
from kvrelay.model.text import TextModel, load_text
from router.detokenizer import PENDING_TOKENS_MAX, Detokenizer
from router.stops import StopFilter
from router.text import INLINE_CHARACTERS_MAX, RouterText

MARKS = {"bos_token": "<s>", "eos_token": "</s>"}
MOCK = load_text(resolve("mock"))
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=40)
# Every character with its own way to span tokens: one to four bytes, combining, joined, and the replacement itself.
RICH = st.text(st.sampled_from("aé€😀\u200d👩🏽\ufffd\n字 "), max_size=30)


def _byte_letters() -> list[str]:
    """The letter that a byte-level decoder reads as each byte: itself where it prints, else one from U+0100 on."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printing else next(others)) for byte in range(256)]


LETTERS = _byte_letters()


def byte_tokenizer(chunks: list[bytes]) -> tuple[Tokenizer, list[int]]:
    """A byte-level vocabulary whose tokens are exactly `chunks`, and their ids."""
    tokens = ["".join(LETTERS[byte] for byte in chunk) for chunk in chunks]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(BPE(vocab=vocab or {"a": 0}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, [vocab[token] for token in tokens]


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    return [data[start:end] for start, end in pairwise(edges)]


@given(text=TEXTS | RICH, cuts=st.lists(st.integers(0, 120), max_size=60), batch=st.integers(1, 5))
@example(text="\ufffd", cuts=[1, 2], batch=1)
@example(text="a\ufffd\ufffdb", cuts=[1, 2, 3, 4, 5, 6], batch=1)
def test_deltas_add_up_to_the_whole_text_however_it_is_cut_into_tokens(text, cuts, batch):
    tokenizer, ids = byte_tokenizer(split(text.encode(), cuts))
    stream = Detokenizer(tokenizer)
    deltas = [stream.feed(ids[at : at + batch]) for at in range(0, len(ids), batch)]
    assert "".join([*deltas, stream.finish()]) == tokenizer.decode(ids) == text


@given(text=RICH, cuts=st.lists(st.integers(0, 120), max_size=60))
def test_no_delta_holds_a_broken_character(text, cuts):
    text = text.replace("\ufffd", "")
    tokenizer, ids = byte_tokenizer(split(text.encode(), cuts))
    stream = Detokenizer(tokenizer)
    assert all("\ufffd" not in stream.feed([token]) for token in ids)


def test_text_before_half_a_character_is_released_at_once():
    tokenizer, ids = byte_tokenizer([b"abc\xe2", b"\x82", b"\xac"])
    stream = Detokenizer(tokenizer)
    assert [stream.feed([token]) for token in ids] == ["abc", "", "€"]


def test_endless_broken_bytes_are_released_within_a_bounded_window():
    tokenizer, ids = byte_tokenizer([b"\xff", b"ok"])
    stream = Detokenizer(tokenizer)
    fed = [stream.feed([ids[0]]) for _ in range(3 * PENDING_TOKENS_MAX)]
    assert any(fed)
    assert "".join([*fed, stream.feed([ids[1]]), stream.finish()]) == "\ufffd" * (3 * PENDING_TOKENS_MAX) + "ok"


def test_decoders_that_strip_the_first_space_keep_all_later_ones():
    tokenizer = Tokenizer(BPE(vocab={"▁so": 0, "▁it": 1, "s": 2}, merges=[]))
    tokenizer.decoder = decoders.Metaspace()
    stream = Detokenizer(tokenizer)
    assert [stream.feed([token]) for token in (0, 1, 2, 1)] == ["so", " it", "s", " it"]


def test_byte_fallback_characters_come_out_whole():
    bytes_ = {f"<0x{byte:02X}>": byte for byte in range(256)}
    tokenizer = Tokenizer(BPE(vocab={**bytes_, "x": 256}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    ids = [*"€😀".encode(), 256, *"é".encode()]
    stream = Detokenizer(tokenizer)
    deltas = [stream.feed([token]) for token in ids]
    assert "".join([*deltas, stream.finish()]) == "€😀xé"
    assert "\ufffd" not in "".join(deltas)


def test_special_tokens_are_not_shown():
    stream = Detokenizer(MOCK.tokenizer)
    assert stream.feed([0, *MOCK.tokenizer.encode("hi").ids, 0]) == "hi"


# ---------------------------------------------------------------- stop strings


def first_completed(text: str, stops: list[str]) -> tuple[str, str]:
    """The specification: the stop string that is complete first cuts the text before it."""
    found = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, ""
    _, at, stop = min(found)
    return text[:at], stop


@settings(max_examples=300)
@given(
    text=st.text("ab\n", max_size=40),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=3),
    cuts=st.lists(st.integers(0, 40), max_size=20),
)
def test_a_stop_string_over_any_pieces_cuts_the_text_exactly_before_it(text, stops, cuts):
    wanted, hit = first_completed(text, stops)
    stream = StopFilter(stops)
    shown = ""
    for piece in split(text.encode(), cuts):
        shown += stream.feed(piece.decode())
        assert wanted.startswith(shown), "part of a stop string leaked"
    if not stream.hit:
        shown += stream.finish()
    assert (shown, stream.hit) == (wanted, hit)


def test_text_that_cannot_become_a_stop_string_is_not_held_back():
    stream = StopFilter(["</end>"])
    assert stream.feed("a < b") == "a < b"
    assert stream.feed("</en") == ""
    assert stream.feed("try") == "</entry"


# ---------------------------------------------------------------- templates and tokenizing


def text_of(template: str | None, **changes: object) -> RouterText:
    fields = {name: getattr(MOCK, name) for name in TextModel.__dataclass_fields__}
    return RouterText(TextModel(**{**fields, "chat_template": template, **changes}))


def test_a_chat_is_rendered_with_the_models_own_template():
    text = RouterText(MOCK)
    assert text.render([{"role": "user", "content": "hi"}]) == "user: hi\nassistant:"


def test_a_template_gets_the_usual_helpers():
    text = text_of(
        "{{ bos_token }}{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m | tojson }}{% endfor %}"
        "{% if add_generation_prompt %}{{ strftime_now('%Y')[:2] }}{{ eos_token }}{% endif %}",
        **MARKS,
    )
    messages = [{"role": "user", "content": "x"}, {"role": "user", "content": "é<"}]
    assert text.render(messages) == '<s>{"role": "user", "content": "é<"}20</s>'


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0]['content'].__class__.__mro__ }}", "unsafe"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
        (None, "no chat template"),
    ],
)
def test_a_chat_that_the_template_refuses_is_the_clients_error(template, words):
    with pytest.raises(InvalidArgument, match=words) as caught:
        text_of(template).render([{"role": "user", "content": "x"}])
    assert caught.value.field == "chat"


async def test_long_texts_are_tokenized_beside_the_loop_with_the_same_result():
    text = RouterText(MOCK)
    long = "é word " * INLINE_CHARACTERS_MAX
    ids = await text.encode(long)
    text.close()
    assert MOCK.tokenizer.decode(ids) == long
    assert array.array("I", ids).itemsize == 4


async def test_a_text_that_begins_with_the_models_first_token_gets_no_second_one():
    tokenizer = Tokenizer.from_str(MOCK.tokenizer.to_str())
    tokenizer.add_special_tokens(["<s>"])
    start = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    text = text_of(None, tokenizer=tokenizer, **MARKS)
    assert await text.encode("<s>hi") == await text.encode("hi")
    assert (await text.encode("hi")).count(start) == 1
    assert start not in await text.encode("hi", special=False)
