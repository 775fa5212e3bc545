"""The torch engine answers as `transformers` does, however the work is cut into chunks and batches."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.prompts import CHATS, chat_ids, encode, load, long_ids, varied_prompts
from support.reference import reference_logprobs, reference_tokens
from support.run_engine import WHOLE, Pages, Sequence, step, write
from support.tiny import VOCAB_SIZE, make_tiny

from kvrelay.config import PAGE_TOKENS_CPU, EngineConfig
from kvrelay.engine.torch_runner import TorchRunner
from kvrelay.types import Sampling

TINY_POOL_PAGES = 256
BUNDLED_POOL_PAGES = 211
"""A little over what 6,064 tokens take."""

BF16_CHOSEN_ERROR_MAX = 0.4
BF16_TOP_ERROR_RMS_MAX = 0.15
"""Tolerances of log-probabilities in bfloat16 against float32, natural logarithm. Measured with this model: over
1,216 tokens the chosen ones differ by at most 0.21, the five likeliest by 0.06 (root of the mean square); transformers'
own bfloat16 by 0.07 to 0.12."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tiny_runner(tiny) -> Iterator[TorchRunner]:
    yield from runner(str(tiny), TINY_POOL_PAGES)


@pytest.fixture(scope="module")
def bundled_runner() -> Iterator[TorchRunner]:
    yield from runner(EngineConfig().model, BUNDLED_POOL_PAGES)


@pytest.fixture(scope="module")
def bundled_bf16_runner() -> Iterator[TorchRunner]:
    yield from runner(EngineConfig().model, BUNDLED_POOL_PAGES, dtype="bfloat16")


def runner(model: str, pages: int, dtype: str = "float32") -> Iterator[TorchRunner]:
    made = TorchRunner(EngineConfig(model=model, dtype=dtype, threads=1))
    made.allocate(pages)
    yield made
    made.close()


def tiny_prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 10_000 + length)
    return torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()


def tiny_pages() -> Pages:
    return Pages(TINY_POOL_PAGES, PAGE_TOKENS_CPU)


def bundled_pages() -> Pages:
    return Pages(BUNDLED_POOL_PAGES, PAGE_TOKENS_CPU)


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 64, 100, 255, 300, 1100])
def test_tiny_model_writes_the_reference_tokens(tiny, tiny_runner, length: int):
    prompt = tiny_prompt(length)
    (written,) = write(tiny_runner, [tiny_pages().sequence(prompt, 40)], 40)
    assert written == reference_tokens(prompt, 40, model=tiny)


@pytest.mark.parametrize("chunk", [1, 7, 32, 33, 256, 700])
def test_chunked_prompts_give_the_same_answer_as_whole_ones(tiny_runner, chunk: int):
    prompt = tiny_prompt(700)
    pages = tiny_pages()
    (whole,) = write(tiny_runner, [pages.sequence(prompt, 20)], 20)
    (chunked,) = write(tiny_runner, [pages.sequence(prompt, 20)], 20, chunk=chunk)
    assert chunked == whole


@pytest.mark.parametrize("chunk", [5, 64, WHOLE])
def test_sequences_in_one_batch_answer_as_if_alone(tiny_runner, chunk: int):
    # Prompts of very different lengths: for most of the run, some are still in their prompt while others decode.
    prompts = [tiny_prompt(length, seed=1) for length in (1, 3, 30, 64, 65, 200, 900)]
    alone = [write(tiny_runner, [tiny_pages().sequence(prompt, 24)], 24)[0] for prompt in prompts]
    pages = tiny_pages()
    together = write(tiny_runner, [pages.sequence(prompt, 24) for prompt in prompts], 24, chunk=chunk)
    assert together == alone


@pytest.mark.parametrize("cached_pages", [1, 2, 3])
def test_a_cached_prefix_gives_the_same_answer_as_computing_it(tiny_runner, cached_pages: int):
    prompt = tiny_prompt(130)
    pages = tiny_pages()
    first = pages.sequence(prompt, 20)
    (expected,) = write(tiny_runner, [first], 20)
    again = share_prefix(pages, first, prompt, cached_pages)
    assert write(tiny_runner, [again], 20) == [expected]


def share_prefix(pages: Pages, first: Sequence, prompt: list[int], cached_pages: int) -> Sequence:
    """A sequence whose first pages are those of another that began with the same tokens."""
    again = pages.sequence(prompt, 20)
    again.pages[:cached_pages] = first.pages[:cached_pages]
    again.computed = cached_pages * PAGE_TOKENS_CPU
    return again


def test_seeded_draws_do_not_depend_on_chunks_or_batches(tiny_runner):
    sampling = Sampling(temperature=1.5, top_p=0.95, seed=99)
    prompt = tiny_prompt(90)
    pages = tiny_pages()
    (alone,) = write(tiny_runner, [pages.sequence(prompt, 30, sampling)], 30)
    crowd = [pages.sequence(tiny_prompt(50, seed=i), 30) for i in range(4)]
    together = write(tiny_runner, [*crowd, pages.sequence(prompt, 30, sampling)], 30, chunk=16)
    assert together[-1] == alone
    assert alone != write(tiny_runner, [pages.sequence(prompt, 30)], 30)[0]


@pytest.mark.parametrize("which", range(4))
def test_bundled_model_writes_the_reference_tokens(bundled_runner, which: int):
    text = load()
    prompts = [
        chat_ids(text, CHATS[0]),
        encode(text, "def fibonacci(n):\n    "),
        encode(text, "今日は天気がいいですね。散歩に"),
        long_ids(text, 97, seed=3),
    ]
    (written,) = write(bundled_runner, [bundled_pages().sequence(prompts[which], 32)], 32, chunk=64)
    assert written == reference_tokens(prompts[which], 32)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("which", range(20))
def test_bundled_model_writes_the_reference_tokens_on_varied_prompts(bundled_runner, which: int):
    prompt = varied_prompts(load())[which]
    (written,) = write(bundled_runner, [bundled_pages().sequence(prompt, 64)], 64, chunk=256)
    assert written == reference_tokens(prompt, 64)


def test_bfloat16_log_probabilities_lie_near_those_of_float32(bundled_bf16_runner):
    text = load()
    check_bf16(bundled_bf16_runner, [chat_ids(text, CHATS[1]), encode(text, "def fibonacci(n):\n    ")], tokens=24)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_bfloat16_log_probabilities_lie_near_those_of_float32_on_varied_prompts(bundled_bf16_runner):
    check_bf16(bundled_bf16_runner, varied_prompts(load())[:19], tokens=64)


def check_bf16(bf16_runner: TorchRunner, prompts: list[list[int]], tokens: int) -> None:
    """Teacher-forced: every token of the float32 reference is put in whatever bfloat16 would have chosen."""
    sampling = Sampling(logprobs=20)
    chosen, top = [], []
    for prompt in prompts:
        answer = reference_tokens(prompt, tokens)
        expected = reference_logprobs(prompt + answer)[len(prompt) - 1 : -1]
        sequence = bundled_pages().sequence(prompt, tokens, sampling)
        for token, row in zip(answer, expected, strict=True):
            told = force(bf16_runner, sequence, token)
            likeliest = row.topk(5).indices.tolist()
            assert {token, *likeliest} <= set(told)
            chosen.append(told[token] - float(row[token]))
            top += [told[other] - float(row[other]) for other in likeliest]
    rms = float(torch.tensor(top).square().mean().sqrt())
    print(f"largest error of a chosen token {max(map(abs, chosen)):.3f}, RMS of the five likeliest {rms:.3f}")
    assert max(map(abs, chosen)) <= BF16_CHOSEN_ERROR_MAX
    assert rms <= BF16_TOP_ERROR_RMS_MAX


def force(bf16_runner: TorchRunner, sequence: Sequence, token: int) -> dict[int, float]:
    """Compute one step, put `token` in the place of what was drawn, and return the log-probabilities told."""
    step(bf16_runner, [sequence])
    sequence.ids[-1] = token
    told = sequence.drawn[-1].logprobs
    assert told is not None
    return dict(zip(told.top_ids, told.top_logprobs, strict=True))
