"""What the parts of the engine core share. Everything here belongs to the engine thread."""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvrelay.engine.intake import ModelFacts
from kvrelay.engine.jobs import Job
from kvrelay.engine.pool import PagePool
from kvrelay.engine.prefix_cache import PrefixCache
from kvrelay.engine.protocol import Event
from kvrelay.engine.pulls import Puller
from kvrelay.engine.speed import Speed
from kvrelay.engine.stock import Stock
from kvrelay.engine.tables import BlockTables


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The core's parts.

    Attributes:
        facts: what model and pool can take.
        pool: pages.
        cache: names of pages.
        tables: block tables.
        stock: leases granted.
        puller: READs posted.
        clock: monotonic seconds.
        emit: takes events, in order.
        chunk_tokens: most prompt tokens computed in one step.
        speed: how fast this engine is.
        jobs: every job that has not ended, in order of arrival.
    """

    facts: ModelFacts
    pool: PagePool
    cache: PrefixCache
    tables: BlockTables
    stock: Stock
    puller: Puller
    clock: Callable[[], float]
    emit: Callable[[Event], None]
    chunk_tokens: int
    speed: Speed = field(default_factory=Speed)
    jobs: dict[str, Job] = field(default_factory=dict)
