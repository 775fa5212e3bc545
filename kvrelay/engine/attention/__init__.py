"""Attention backends, by name."""

from kvrelay.engine.attention.cpu import CpuAttention
from kvrelay.engine.attention.interface import AttentionBackend, BatchAttention, BatchTable
from kvrelay.errors import FailedPrecondition, InvalidArgument

__all__ = ["AttentionBackend", "BatchAttention", "BatchTable", "make_attention"]


def make_attention(name: str, *, page_tokens: int) -> AttentionBackend:
    """Make a backend; "auto" takes the one that is there.

    Raises:
        FailedPrecondition: the backend cannot run here.
        InvalidArgument: the backend does not take pages of this size.
    """
    if name == "flash_attn":
        raise FailedPrecondition("attention backend flash_attn is not built into this version: use --attention cpu")
    backend = CpuAttention()
    if page_tokens % backend.page_multiple:
        multiple = backend.page_multiple
        raise InvalidArgument("page_tokens", f"{page_tokens} is not a multiple of {multiple}, as {backend.name} asks")
    return backend
