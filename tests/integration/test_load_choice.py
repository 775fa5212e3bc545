"""The sweep behind `bench.load_choice`, at two points far apart: it runs to its end and judges every choice.

How often the faster side is picked is a matter of time taken, so that figure is the bench's and not asserted here.
"""

from statistics import fmean

from bench.load_choice import load_choice_right_share
from bench.slow_transfer import Slowness

CHOICES = 2


async def test_every_choice_of_the_sweep_is_judged():
    lengths, sources = (64, 2048), (Slowness(), Slowness(latency_s=0.5))
    right = await load_choice_right_share(lengths, sources, choices=CHOICES, measurements=1)
    print(f"{fmean(right):.0%} of {len(right)} choices were right")
    assert right
    assert all(judged in (0, 1) for judged in right)
