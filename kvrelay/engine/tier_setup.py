"""Opens the tiers that the configuration asks for."""

import logging
from pathlib import Path
from urllib.parse import quote

from kvrelay.config import EngineConfig
from kvrelay.engine.parts import Parts
from kvrelay.engine.runner import KvMemory, Runner
from kvrelay.engine.tiering import Tiering
from kvrelay.errors import InvalidArgument
from kvrelay.kv.keys import golden_keys
from kvrelay.kv.tiers.disk import DiskTier
from kvrelay.kv.tiers.page_file import header_bytes, identity_of
from kvrelay.kv.tiers.tier import TierError
from kvrelay.kv.tiers.worker import TierWorker

log = logging.getLogger(__name__)

MIB = 1 << 20


def open_tiering(
    config: EngineConfig, runner: Runner, memory: KvMemory, parts: Parts, *, replica_id: str
) -> Tiering | None:
    """Open the disk tier; None when there is to be none, or when its directory cannot be used, which is logged.

    Raises:
        InvalidArgument: the pool is not in host memory, or the tier is too small for a page.
    """
    if not config.disk_tier_dir:
        return None
    if memory.memory != "DRAM":
        raise InvalidArgument("disk_tier_dir", f"the KV pool lies in {memory.memory}; only host memory has a disk tier")
    try:
        tier = _open_disk(config, runner, replica_id)
    except TierError as error:
        log.error("tier_off", extra={"tier": DiskTier.name, "reason": str(error)})  # noqa: TRY400 - it names the cause
        return None
    return Tiering(TierWorker(tier), parts, memory, file_bytes=tier.file_bytes)


def _open_disk(config: EngineConfig, runner: Runner, replica_id: str) -> DiskTier:
    layout = runner.layout
    blocks_per_page = layout.page_tokens // layout.block_tokens
    if config.disk_tier_mib * MIB < header_bytes(blocks_per_page) + layout.page_bytes:
        raise InvalidArgument("disk_tier_mib", f"{config.disk_tier_mib} MiB hold no page of {layout.page_bytes} bytes")
    golden = golden_keys(
        model_fingerprint=runner.model_fingerprint,
        tokenizer_fingerprint=runner.tokenizer_fingerprint,
        block_tokens=layout.block_tokens,
    )
    identity = identity_of(
        model_fingerprint=runner.model_fingerprint,
        tokenizer_fingerprint=runner.tokenizer_fingerprint,
        golden_keys=golden,
        layout=layout,
    )
    return DiskTier(
        Path(config.disk_tier_dir) / f"replica-{quote(replica_id, safe='')}",
        identity=identity,
        page_bytes=layout.page_bytes,
        blocks_per_page=blocks_per_page,
        bytes_max=config.disk_tier_mib * MIB,
    )
