"""The runner that computes with torch."""

import hashlib

import torch

from kvrelay.config import EngineConfig
from kvrelay.engine.attention import make_attention
from kvrelay.engine.batch_table import batch_table, flat_ids, tails_begun
from kvrelay.engine.kv_tensor import KvTensor, page_bytes
from kvrelay.engine.loader import open_checkpoint
from kvrelay.engine.models import load_model
from kvrelay.engine.runner import Draw, Drawn, KvMemory, Slice
from kvrelay.engine.sampler import sample
from kvrelay.engine.torch_setup import dtype_name, pick_device, pick_dtype, use_threads
from kvrelay.errors import InternalError
from kvrelay.model.files import resolve
from kvrelay.model.text import load_text
from kvrelay.types import KvLayout


class TorchRunner:
    """Computes batches of a real model over a paged KV pool; see `kvrelay.engine.runner.Runner`.

    Raises:
        InvalidArgument: the model, or a field of the configuration, is not supported.
        FailedPrecondition: the device or the attention backend is not there.
        Unavailable: the bundled model could not be fetched.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._device = pick_device(config.device)
        self._dtype = pick_dtype(config.dtype, self._device)
        self._attention = make_attention(config.attention, page_tokens=config.page_tokens)
        use_threads(config.threads)
        files = resolve(config.model)
        text = load_text(files)
        checkpoint = open_checkpoint(files)
        self._model = load_model(checkpoint, self._dtype, self._device)
        self._kv: KvTensor | None = None
        self.layout = self._layout(config)
        self.model_fingerprint = _fingerprint(checkpoint.digest(), dtype_name(self._dtype), self._model.description)
        self.tokenizer_fingerprint = text.fingerprint
        self.context_tokens = self._model.context_tokens
        self.vocab_size = self._model.vocab_size
        self.eos_ids = text.eos_ids

    def allocate(self, pages: int) -> KvMemory:
        """Allocate and prefault the pool; called once, before `run`.

        Raises:
            InternalError: it does not fit in memory.
        """
        assert self._kv is None, "the pool is allocated once"
        self._kv = KvTensor(
            self._model.kv_shape,
            pages=pages,
            page_tokens=self.layout.page_tokens,
            dtype=self._dtype,
            device=self._device,
        )
        return self._kv.memory

    def run(self, batch: list[Slice]) -> list[Drawn | None]:
        """Compute the slices, write their KV, and choose next tokens; see `Runner.run`.

        Raises:
            InternalError: torch failed, or the logits are not finite; nothing of the batch may be used.
        """
        assert self._kv is not None, "allocate the pool before the first batch"
        try:
            with torch.inference_mode():
                return self._run(batch, self._kv)
        except (RuntimeError, IndexError) as error:
            raise InternalError(f"torch failed in a batch of {len(batch)} slices: {error}") from error

    def close(self) -> None:
        """Free the pool and the weights."""
        del self._model
        self._kv = None

    def _run(self, batch: list[Slice], kv: KvTensor) -> list[Drawn | None]:
        kv.clear(tails_begun(batch, kv.page_tokens))
        table = batch_table(batch, kv.page_tokens, self._device)
        attention = self._attention.begin(kv.view, table)
        asked = [(index, part.draw) for index, part in enumerate(batch) if part.draw is not None]
        rows = table.cu_seqlens_q[[index + 1 for index, _ in asked]] - 1
        ids = flat_ids(batch, self.vocab_size, self._device)
        logits = self._model.forward(ids, table.positions, attention, rows)
        return _spread(len(batch), asked, sample(logits, [draw for _, draw in asked]))

    def _layout(self, config: EngineConfig) -> KvLayout:
        shape = self._model.kv_shape
        return KvLayout(
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=dtype_name(self._dtype),
            page_tokens=config.page_tokens,
            block_tokens=config.block_tokens,
            page_bytes=page_bytes(shape, page_tokens=config.page_tokens, dtype=self._dtype),
        )


def _spread(count: int, asked: list[tuple[int, Draw]], drawn: list[Drawn]) -> list[Drawn | None]:
    """Put what was drawn back where it was asked for."""
    results: list[Drawn | None] = [None] * count
    for (index, _), token in zip(asked, drawn, strict=True):
        results[index] = token
    return results


def _fingerprint(weights_digest: str, dtype: str, description: str) -> str:
    """Return the digest of all that makes KV of one replica usable by another: weights, dtypes, RoPE and shape."""
    digest = hashlib.sha256()
    for part in (weights_digest, f"weights {dtype}", f"kv {dtype}", description):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()
