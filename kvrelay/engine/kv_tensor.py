"""Memory of the KV pool as a tensor."""

import torch

from kvrelay.engine.models import KvShape
from kvrelay.engine.runner import KvMemory
from kvrelay.errors import InternalError

ALIGNMENT_BYTES = 4096
"""Pages of the operating system: what memory registration and direct I/O work in."""


class KvTensor:
    """`pages` pages laid out (layer, k|v, kv_head, token, dim), contiguous, one after another, zeroed.

    Attributes:
        view: (pages, layers, 2, kv_heads, page_tokens, head_dim).
        memory: the same for those who know no tensors.
    """

    def __init__(
        self, shape: KvShape, *, pages: int, page_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.page_tokens = page_tokens
        size = page_bytes(shape, page_tokens=page_tokens, dtype=dtype)
        try:
            self._buffer = torch.empty(pages * size + ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            raise InternalError(
                f"a KV pool of {pages * size >> 20} MiB does not fit in memory: lower --kv-mib"
            ) from error
        start = -self._buffer.data_ptr() % ALIGNMENT_BYTES
        used = self._buffer[start : start + pages * size].zero_()  # touches every page: the first pulls meet no faults
        axes = (pages, shape.layers, 2, shape.kv_heads, page_tokens, shape.head_dim)
        self.view = used.view(dtype).view(axes)
        self.memory = KvMemory(
            base_address=used.data_ptr(),
            pages=pages,
            page_bytes=size,
            memory="VRAM" if device.type == "cuda" else "DRAM",
            device_id=device.index or 0,
        )

    def clear(self, pages: list[int]) -> None:
        """Zero pages before their first token is written.

        A page that stays partly filled then shows nothing of its last owner: not to attention, which multiplies what
        lies past the end by zero (and zero times NaN is NaN), and not to a replica that pulls it.
        """
        for page in pages:
            self.view[page].zero_()


def page_bytes(shape: KvShape, *, page_tokens: int, dtype: torch.dtype) -> int:
    """Return the size of a page in bytes."""
    return shape.layers * 2 * shape.kv_heads * page_tokens * shape.head_dim * dtype.itemsize
