"""Sets an engine's memory up: sizes the pool, has it allocated, registers it, and builds what keeps book of it."""

from collections.abc import Callable

from kvrelay.config import EngineConfig
from kvrelay.engine.intake import ModelFacts
from kvrelay.engine.parts import Parts
from kvrelay.engine.pool import PagePool
from kvrelay.engine.prefix_cache import PrefixCache
from kvrelay.engine.protocol import AgentInfo, Event
from kvrelay.engine.pulls import Puller
from kvrelay.engine.runner import KvMemory, Runner
from kvrelay.engine.stock import Stock
from kvrelay.engine.tables import BlockTables
from kvrelay.errors import InvalidArgument
from kvrelay.kv.transfer import Transfer
from kvrelay.types import KvLayout

MIB = 1 << 20


def pages_in(config: EngineConfig, layout: KvLayout) -> int:
    """Return how many pages the configured memory holds.

    Raises:
        InvalidArgument: not even one, or page and block sizes do not fit together.
    """
    if layout.page_tokens % layout.block_tokens:
        raise InvalidArgument("page_tokens", f"{layout.page_tokens} is not a multiple of block_tokens")
    pages = config.kv_mib * MIB // layout.page_bytes
    if pages < 1:
        raise InvalidArgument("kv_mib", f"{config.kv_mib} MiB hold no page of {layout.page_bytes} bytes")
    return pages


def make_parts(
    config: EngineConfig,
    runner: Runner,
    transfer: Transfer,
    *,
    incarnation: str,
    clock: Callable[[], float],
    emit: Callable[[Event], None],
) -> tuple[Parts, KvMemory]:
    """Allocate and register the pool, and build the core's parts over it.

    Raises:
        InvalidArgument: the configured sizes do not work.
        InternalError: the transport refuses the memory.
    """
    layout = runner.layout
    memory = runner.allocate(pages_in(config, layout))
    transfer.register(
        base_address=memory.base_address,
        pages=memory.pages,
        page_bytes=memory.page_bytes,
        memory=memory.memory,
        device_id=memory.device_id,
    )
    pool = PagePool(memory.pages)
    cache = PrefixCache(pool, blocks_per_page=layout.page_tokens // layout.block_tokens)
    parts = Parts(
        facts=ModelFacts(
            context_tokens=min(runner.context_tokens, memory.pages * layout.page_tokens),
            vocab_size=runner.vocab_size,
            eos_ids=runner.eos_ids,
            layout=layout,
        ),
        pool=pool,
        cache=cache,
        tables=BlockTables(pool, cache, page_tokens=layout.page_tokens, block_tokens=layout.block_tokens),
        stock=Stock(pool, cache, layout, share=config.stock_share, incarnation=incarnation, clock=clock),
        puller=Puller(transfer, pool, timeout_s=config.pull_timeout_s, clock=clock),
        clock=clock,
        emit=emit,
        chunk_tokens=config.chunk_tokens,
    )
    return parts, memory


def make_agent(
    transfer: Transfer, memory: KvMemory, layout: KvLayout, *, replica_id: str, incarnation: str
) -> AgentInfo:
    """Describe the pool to those that pull from it."""
    name, metadata = transfer.agent()
    return AgentInfo(
        replica_id=replica_id,
        incarnation=incarnation,
        agent_name=name,
        agent_metadata=metadata,
        base_address=memory.base_address,
        pages=memory.pages,
        layout=layout,
        memory=memory.memory,
        device_id=memory.device_id,
    )
