"""What the runner asks of a model."""

from dataclasses import dataclass
from typing import Protocol

import torch

from kvrelay.engine.attention import BatchAttention


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one token leaves in the KV pool: `layers` x (k, v) x `kv_heads` x `head_dim` numbers."""

    layers: int
    kv_heads: int
    head_dim: int


class Model(Protocol):
    """Weights and forward pass.

    Attributes:
        kv_shape: what a token leaves in the KV pool.
        context_tokens: longest sequence.
        vocab_size: ids are below it; width of the logits.
        description: every parameter that changes what is computed, RoPE among them; part of the fingerprint.
    """

    kv_shape: KvShape
    context_tokens: int
    vocab_size: int
    description: str

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, attention: BatchAttention, rows: torch.Tensor
    ) -> torch.Tensor:
        """Compute a flat batch and write its KV.

        Args:
            ids: (T,) tokens, int64.
            positions: (T,) their absolute positions, int64.
            attention: of this batch.
            rows: (m,) rows of the batch whose logits are wanted.

        Returns:
            (m, vocab_size) logits, float32.
        """
        ...
