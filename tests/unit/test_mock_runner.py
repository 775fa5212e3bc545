import array

import pytest

from kvrelay.config import EngineConfig
from kvrelay.engine.mock import MockProfile, MockRunner
from kvrelay.engine.runner import Draw, Slice
from kvrelay.errors import InternalError, InvalidArgument
from kvrelay.model.files import resolve
from kvrelay.model.text import load_text
from kvrelay.types import Sampling

PAGE = 4
IDS = array.array("I", range(1, 11))


def runner(profile="", **options):
    made = MockRunner(EngineConfig(engine="mock", block_tokens=PAGE, page_tokens=PAGE, mock_profile=profile), **options)
    made.allocate(16)
    return made


def pages(*numbers):
    return array.array("i", numbers)


def compute(made, *, start=0, end=10, table=(3, 1, 2), sampling=None, ids=IDS):
    draw = Draw(sampling or Sampling(seed=0), position=end)
    [drawn] = made.run([Slice(ids, start, end - start, pages(*table), draw)])
    return drawn.token


def test_it_says_who_it_is():
    made = runner("kv_bytes_per_token=128")
    text = load_text(resolve("mock"))
    assert made.tokenizer_fingerprint == text.fingerprint
    assert (made.vocab_size, made.eos_ids, made.context_tokens) == (512, (0,), 131072)
    assert made.layout.page_bytes == PAGE * 128
    layout = made.layout
    assert layout.page_bytes == layout.layers * 2 * layout.kv_heads * layout.page_tokens * layout.head_dim * 4
    assert made.model_fingerprint != runner().model_fingerprint


def test_tokens_depend_on_the_whole_sequence_and_on_nothing_else():
    whole = compute(runner())
    pieces = runner()
    for start, end in ((0, 3), (3, 7), (7, 10)):
        last = compute(pieces, start=start, end=end, table=(5, 9, 0))
    assert last == whole
    other = IDS[:]
    other[0] += 1
    assert compute(runner(), ids=other) != whole


def test_every_position_gets_other_bytes():
    made = runner()
    compute(made, ids=array.array("I", [7] * 10))
    rows = made._kv[[3, 1, 2]].reshape(-1, made._kv.shape[2])[:10]
    assert len({row.tobytes() for row in rows}) == 10


@pytest.mark.parametrize("where", ["first page", "last page", "never written"])
def test_wrong_bytes_before_a_slice_are_seen(where):
    made = runner()
    compute(made, end=9)
    table = [3, 1, 2]
    if where == "first page":
        made._kv[3, 0, 0] += 1
    elif where == "last page":
        made._kv[2, 0, 1] += 1
    else:
        table[1] = 8
    with pytest.raises(InternalError):
        compute(made, start=9, table=table)


def test_the_bytes_of_another_sequence_are_seen():
    made = runner()
    compute(made, end=9)
    other = IDS[:]
    other[1] += 1
    with pytest.raises(InternalError):
        compute(made, start=9, ids=other)


def test_it_never_ends_an_answer_unless_the_profile_says_so():
    def drawn(profile, count=200, **draw):
        made = runner(profile)
        slices = [
            Slice(array.array("I", [i]), 0, 1, pages(0), Draw(Sampling(seed=0), 1, **draw)) for i in range(1, count)
        ]
        return [answer.token for answer in made.run(slices)]

    assert 0 not in drawn("")
    assert drawn("eos_every=10").count(0) > 5
    assert 0 not in drawn("eos_every=1", min_tokens_left=1, stop_ids=frozenset({0}))


def test_log_probabilities_come_when_asked_for():
    made = runner()
    draw = Draw(Sampling(seed=0, logprobs=3), 10)
    [drawn] = made.run([Slice(IDS, 0, 10, pages(3, 1, 2), draw)])
    assert len(drawn.logprobs.top_ids) == len(drawn.logprobs.top_logprobs) == 3
    assert drawn.logprobs.top_ids[0] == drawn.token


def test_a_step_takes_the_profiles_time():
    slept = []
    made = runner("prefill_ms_per_token=0.5,step_ms=5,step_ms_per_sequence=0.25", sleep=slept.append)
    compute(made)
    compute(made, start=9)
    assert slept == pytest.approx([0.005 + 0.00025 + 0.005, 0.005 + 0.00025])


@pytest.mark.parametrize("text", ["speed=1", "step_ms=fast", "step_ms=-1", "kv_bytes_per_token=33"])
def test_a_bad_profile_is_refused(text):
    with pytest.raises(InvalidArgument, match="mock_profile"):
        MockProfile.parse(text)
