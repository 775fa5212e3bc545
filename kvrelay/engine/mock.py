"""A stand-in for the model: seeded tokens, KV bytes that tell where they belong, timings from a profile.

The KV of a token is derived from a hash of the whole sequence up to it, so that bytes of another sequence, of another
position, or never written are seen when the sequence is continued. Tokens are a function of the same hash: equal
sequences continue equally on every replica.
"""

import array
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvrelay.config import EngineConfig
from kvrelay.engine.runner import Draw, Drawn, KvMemory, Slice
from kvrelay.errors import InternalError, InvalidArgument
from kvrelay.types import KvLayout, TokenLogprobs

Words = npt.NDArray[np.uint64]

WORD_BYTES: Final = 8
LAYERS: Final = 2
FIRST_WORD_TOKEN: Final = 257
"""Ids from here on are whole words of the mock's vocabulary, so that its answers are readable text."""

_BASE: Final = 0x9E3779B97F4A7C15
"""Odd, so that it has an inverse modulo 2^64: what lets a prefix sum compute the whole chain at once."""
_MASK: Final = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MockProfile:
    """Timings and oddities of the mock, as told in `mock_profile`.

    Attributes:
        prefill_ms_per_token: time a prompt token adds to a step, ms.
        step_ms: time of every step, ms.
        step_ms_per_sequence: time that each sequence adds to a step, ms.
        kv_bytes_per_token: KV of a token, a multiple of 32 bytes.
        eos_every: one in this many tokens is the end of the answer; 0: none is.
    """

    prefill_ms_per_token: float = 0.0
    step_ms: float = 0.0
    step_ms_per_sequence: float = 0.0
    kv_bytes_per_token: int = 64
    eos_every: int = 0

    @classmethod
    def parse(cls, text: str) -> "MockProfile":
        """Read "name=number,name=number".

        Raises:
            InvalidArgument: a name is unknown, or a value is no number or out of range.
        """
        kinds: dict[str, Any] = {field.name: field.type for field in fields(cls)}
        values: dict[str, Any] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = part.partition("=")
            if name not in kinds:
                raise InvalidArgument("mock_profile", f"{name!r} is not one of {', '.join(kinds)}")
            values[name] = _number(name, value, kinds[name])
        profile = cls(**values)
        if profile.kv_bytes_per_token % (LAYERS * 2 * WORD_BYTES) or profile.kv_bytes_per_token <= 0:
            raise InvalidArgument("mock_profile", "kv_bytes_per_token must be a positive multiple of 32")
        return profile


def _number(name: str, value: str, kind: type[float]) -> float:
    try:
        number = kind(value)
    except ValueError as error:
        raise InvalidArgument("mock_profile", f"{name}={value!r} is no {kind.__name__}") from error
    if number < 0:
        raise InvalidArgument("mock_profile", f"{name}={value} is negative")
    return number


class MockRunner:
    """The mock model behind the `Runner` protocol. Needs numpy only."""

    def __init__(self, config: EngineConfig, *, sleep: Callable[[float], None] = time.sleep) -> None:
        from kvrelay.model.files import resolve  # noqa: PLC0415 - loads tokenizers, which only this line needs
        from kvrelay.model.text import load_text  # noqa: PLC0415 - the same

        text = load_text(resolve("mock"))
        self._profile = MockProfile.parse(config.mock_profile)
        self._sleep = sleep
        token_bytes = self._profile.kv_bytes_per_token
        self.layout = KvLayout(
            layers=LAYERS,
            kv_heads=1,
            head_dim=token_bytes // (LAYERS * 2 * 4),
            dtype="float32",
            page_tokens=config.page_tokens,
            block_tokens=config.block_tokens,
            page_bytes=config.page_tokens * token_bytes,
        )
        self.model_fingerprint = hashlib.sha256(b"kvrelay mock model 1, %d" % token_bytes).hexdigest()
        self.tokenizer_fingerprint = text.fingerprint
        self.context_tokens = text.context_tokens
        self.vocab_size = text.vocab_size
        self.eos_ids = text.eos_ids
        self._chain = _Chain(text.context_tokens)
        self._kv: Words = np.zeros((0, 0, 0), np.uint64)

    def allocate(self, pages: int) -> KvMemory:
        """Allocate the pool. It is left to the system to map it: benches start many mocks with large pools."""
        words = self._profile.kv_bytes_per_token // WORD_BYTES
        self._kv = np.zeros((pages, self.layout.page_tokens, words), np.uint64)
        return KvMemory(base_address=self._kv.ctypes.data, pages=pages, page_bytes=self.layout.page_bytes)

    def run(self, batch: list[Slice]) -> list[Drawn | None]:
        """Verify the KV before each slice, write that of the slice, and choose tokens.

        Raises:
            InternalError: bytes in the pool are not those of the sequence.
        """
        self._sleep(self._step_s(batch))
        return [self._run_one(part) for part in batch]

    def close(self) -> None:
        """Free the pool."""
        self._kv = np.zeros((0, 0, 0), np.uint64)

    def _step_s(self, batch: list[Slice]) -> float:
        profile = self._profile
        prompt_tokens = sum(part.length for part in batch if part.length > 1)
        prefill_ms = profile.prefill_ms_per_token * prompt_tokens
        return (profile.step_ms + profile.step_ms_per_sequence * len(batch) + prefill_ms) / 1000

    def _run_one(self, part: Slice) -> Drawn | None:
        end = part.start + part.length
        hashes = self._chain.of(part.ids[:end])
        pages = np.array(part.pages)
        self._verify(hashes, pages, part.start)
        rows = np.arange(part.start, end)
        self._kv[self._place(pages, rows)] = self._content(hashes[rows])
        return None if part.draw is None else self._choose(int(hashes[-1]), part.draw)

    def _verify(self, hashes: Words, pages: npt.NDArray[Any], start: int) -> None:
        """Check the first, the last and one more token of every page before `start`."""
        if not start:
            return
        size = self.layout.page_tokens
        first = np.arange(0, start, size)
        last = np.minimum(first + size, start) - 1
        other = np.minimum(first + start % size, last)
        rows = np.concatenate((first, other, last))
        wrong = (self._kv[self._place(pages, rows)] != self._content(hashes[rows])).any(axis=1)
        if wrong.any():
            raise InternalError(f"KV at position {rows[wrong].min()} is not that of its sequence")

    def _place(self, pages: npt.NDArray[Any], rows: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        return pages[rows // self.layout.page_tokens], rows % self.layout.page_tokens

    def _content(self, hashes: Words) -> Words:
        words = np.arange(1, self._kv.shape[2] + 1, dtype=np.uint64) * np.uint64(_BASE)
        return _scramble(_scramble(hashes)[:, None] ^ words[None, :])

    def _choose(self, state: int, draw: Draw) -> Drawn:
        if draw.sampling.temperature > 0:
            state ^= (draw.sampling.seed or 0) * _BASE + draw.position & _MASK
        number = int(_scramble(_scramble(np.array([state], np.uint64)))[0])
        token = self._token(number, draw)
        if draw.sampling.logprobs is None:
            return Drawn(token)
        top = [token, *(i for i in range(FIRST_WORD_TOKEN, self.vocab_size) if i != token)][: draw.sampling.logprobs]
        logprobs = tuple(-0.5 - rank for rank in range(len(top)))
        return Drawn(token, TokenLogprobs(-0.5, tuple(top), logprobs))

    def _token(self, number: int, draw: Draw) -> int:
        every = self._profile.eos_every
        if every and number % every == 0 and not draw.min_tokens_left:
            return self.eos_ids[0]
        span = self.vocab_size - FIRST_WORD_TOKEN
        masked = draw.stop_ids if draw.min_tokens_left else frozenset()
        for step in range(span):
            token = FIRST_WORD_TOKEN + (number // 7 + step) % span
            if token not in masked:
                return token
        raise InternalError("every word of the mock's vocabulary is a masked stop id")


class _Chain:
    """Hashes of all prefixes of a sequence: h_i = h_{i-1} * B + id_i + 1 modulo 2^64; to be scrambled before use."""

    def __init__(self, most_tokens: int) -> None:
        base = np.full(most_tokens, _BASE, np.uint64)
        inverse = np.full(most_tokens, pow(_BASE, -1, 2**64), np.uint64)
        base[0] = inverse[0] = 1
        self._powers: Words = np.cumprod(base, dtype=np.uint64)
        self._inverses: Words = np.cumprod(inverse, dtype=np.uint64)

    def of(self, ids: "array.array[int]") -> Words:
        """Return one hash a token: h_i = B^i * sum of (id_j + 1) / B^j over j <= i."""
        count = len(ids)
        terms = (np.frombuffer(ids, np.uint32).astype(np.uint64) + np.uint64(1)) * self._inverses[:count]
        hashes: Words = np.cumsum(terms, dtype=np.uint64) * self._powers[:count]
        return hashes


def _scramble(words: Words) -> Words:
    """Mix the bits of each word (the finaliser of splitmix64: Steele, Lea, Flood, OOPSLA 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
