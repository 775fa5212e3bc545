"""The KV hand-off: rate of a pull against the raw transport, and how much of a transfer is hidden behind prefill.

`pull_share_of_raw` needs nothing but this machine. `hidden_share_shaped` and `second_token_added_ms_*` put replicas
into two network namespaces with a slowed link between them, which needs root and iproute2; where it cannot be had they
are left out, and a note says why.
"""

import asyncio

from bench.kv_hidden import measure_hidden
from bench.kv_pull import measure_pull
from bench.netns import NotPossibleError
from bench.report import Report, main


def measure(quick: bool, report: Report) -> None:  # noqa: FBT001 - the one form of a benchmark
    """Measure both."""
    asyncio.run(measure_pull(report, quick=quick))
    try:
        asyncio.run(measure_hidden(report, quick=quick))
    except NotPossibleError as error:
        report.notes.append(f"hidden_share_shaped was not measured: it {error}")


if __name__ == "__main__":
    main("kv", measure)
