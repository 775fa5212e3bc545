"""Load or recompute where one side is far faster than the other: the measured choice finds it."""

from statistics import fmean

from bench.load_choice import load_choice_right_share
from bench.slow_transfer import Slowness


async def test_the_faster_side_is_picked_on_either_end_of_the_sweep():
    # Computing takes 6 ms and 0.2 s; the second source takes 0.5 s for whatever it is asked for.
    right = await load_choice_right_share((64, 2048), (Slowness(), Slowness(latency_s=0.5)), choices=5, measurements=1)
    print(f"{fmean(right):.0%} of {len(right)} choices were right")
    assert fmean(right) >= 0.9
