"""Prompts that are pulled piece by piece while they are computed."""

import pytest
from engine_fakes import BLOCK, Fleet, answer_of

from kvrelay.engine.protocol import ClearCache, FirstToken, PiecesFinal, Pulled, PullFailed
from kvrelay.engine.pulls import SLOWEST_BYTES_PER_S, TIMEOUT
from kvrelay.kv.transfer import ReadState

CHUNKS = 12
LONG = [1 + (7 * at) % 250 for at in range(CHUNKS * BLOCK - 1)]
TOKEN_BYTES = 1024
PAGE_KIB = BLOCK * TOKEN_BYTES // 1024


def fleet(**prefill):
    profile = f"kv_bytes_per_token={TOKEN_BYTES},prefill_ms_per_token=1"
    return Fleet(
        decode={"mock_profile": profile},
        prefill={"mock_profile": profile, "chunk_tokens": BLOCK} | prefill,
    )


def announced(replica):
    return [event.pages for event in replica.of(PiecesFinal)]


def test_the_first_pages_are_read_before_the_last_ones_are_computed():
    """The order that hides a transfer: READ done, then the rest computed, then the first token, then the pull's end."""
    each = fleet()
    each.ask("a", LONG)
    each.run(until=lambda: each.network.reads and each.network.reads[0].now is ReadState.DONE)
    told = announced(each.prefill)[-1]
    assert told < CHUNKS // 2
    assert not each.prefill.of(FirstToken)
    each.run(until=lambda: each.prefill.of(FirstToken))
    assert sum(read.now is ReadState.DONE for read in each.network.reads) >= CHUNKS - 3, "most is here by then"
    assert not each.decode.of(Pulled)
    each.run()
    assert each.answers["a"] == answer_of(LONG)
    each.at_rest()


@pytest.mark.parametrize(
    ("piece_kib", "pieces"),
    [
        (0, list(range(1, CHUNKS + 1))),
        (PAGE_KIB, list(range(1, CHUNKS + 1))),
        (5 * PAGE_KIB, [5, 10, 12]),
        (CHUNKS * PAGE_KIB, [12]),
        (1 << 30, [12]),
    ],
)
def test_the_answer_is_the_same_whatever_the_pieces(piece_kib, pieces):
    each = fleet(piece_kib=piece_kib)
    each.ask("a", LONG)
    each.run()
    assert announced(each.prefill) == pieces
    assert len(each.network.reads) == len(pieces)
    assert each.answers["a"] == answer_of(LONG)
    usage = each.ended["a"].usage
    assert usage.pulled_bytes == CHUNKS * BLOCK * TOKEN_BYTES
    each.at_rest()


def test_what_the_prefill_replica_has_cached_comes_in_one_piece_at_once():
    each = fleet()
    each.ask("first", LONG)
    each.run()
    each.decode.core.handle(ClearCache())
    each.ask("again", LONG)
    each.run()
    pieces = [event.pages for event in each.prefill.of(PiecesFinal, "again")]
    assert pieces == [CHUNKS - 1, CHUNKS]
    each.at_rest()


def test_the_rate_of_a_pull_counts_only_time_with_reads_under_way():
    each = fleet(piece_kib=5 * PAGE_KIB)
    each.ask("a", LONG)
    each.run()
    stats = each.decode.one(Pulled).stats
    assert 0 < stats.busy_s < stats.elapsed_s
    assert each.ended["a"].usage.pull_s == stats.busy_s


def test_patience_with_a_pull_grows_with_the_bytes_under_way():
    """READs beside each other end together on a slow link: nothing ending for a while is no sign that it is dead."""
    each = fleet(piece_kib=CHUNKS * PAGE_KIB)
    each.network.held = True
    each.ask("a", LONG)
    each.run(until=lambda: each.network.reads)
    page_bytes = each.decode.agent.layout.page_bytes
    transfer_s = len(each.network.reads[0].copies) * page_bytes / SLOWEST_BYTES_PER_S
    assert transfer_s > 0.004
    each.clock.sleep(each.decode.config.pull_timeout_s + transfer_s / 2)
    each.pump()
    assert not each.decode.of(PullFailed)
    each.clock.sleep(transfer_s)
    each.pump()
    assert each.decode.one(PullFailed).reason == TIMEOUT
