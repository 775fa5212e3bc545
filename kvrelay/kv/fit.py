"""A running linear fit: how long something takes, from what it took before. Pure.

    time = c0 * x0 + c1 * x1 + …   with every coefficient >= 0

A prior gives the proportions. The samples scale it, and replace it as far as they tell the coefficients apart. A sample
weighs by the inverse square of the time that the prior predicts for it, so that relative errors count whatever the
size, and less with each newer one.
"""

import math
from collections.abc import Sequence
from typing import Final

SAMPLE_KEPT: Final = 0.95
"""Share of its weight that a sample keeps at the next one: the fit follows a change within about 20 samples."""

PRIOR_WEIGHT: Final = 0.05
"""Weight of the prior, in samples of ordinary size: it decides only what no sample tells."""

SURPRISE_COLD_MAX: Final = 30.0
SURPRISE_MAX: Final = 4.0
WARM_SAMPLES: Final = 5.0
"""A time counts as at most this many times the predicted one, and as at least that part of it; less is believed once
there are so many samples. A true change is still followed, one stall is not."""

TIME_MIN_S: Final = 1e-6
"""Shorter times count as this long: no clock tells them from nothing."""


class Fit:
    """Predicts a time, s, from features that are zero or more.

    Args:
        prior: coefficients before anything was measured, s a unit of each feature.
        usual: ordinary size of each feature, above 0: where the prior counts as a sample does.
    """

    def __init__(self, *, prior: Sequence[float], usual: Sequence[float]) -> None:
        self._usual = tuple(usual)
        # Features are kept in units of their ordinary size, which keeps the sums near one another.
        self._prior = [c * size for c, size in zip(prior, usual, strict=True)]
        self._prior_weight = PRIOR_WEIGHT / sum(self._prior) ** 2
        size = range(len(self._prior))
        self._squares = [[0.0 for _ in size] for _ in size]
        self._products = [0.0 for _ in size]
        self._samples = 0.0
        self._log_scale = 0.0
        self._solution: list[float] | None = list(self._prior)

    def add(self, features: Sequence[float], elapsed_s: float) -> None:
        """Take a sample in."""
        x = self._scaled(features)
        guess_s = max(_dot(self._prior, x), TIME_MIN_S)
        elapsed_s = self._tempered(max(elapsed_s, TIME_MIN_S), self.predict(features))
        self.fade(SAMPLE_KEPT)
        self._samples += 1
        self._log_scale += math.log(elapsed_s / guess_s)
        for row, at in enumerate(x):
            self._products[row] += at * elapsed_s / guess_s**2
            for column, other in enumerate(x):
                self._squares[row][column] += at * other / guess_s**2

    def fade(self, kept: float) -> None:
        """Have all samples so far weigh `kept` times as much; what is lost of them goes to the prior."""
        self._samples *= kept
        self._log_scale *= kept
        self._products = [value * kept for value in self._products]
        self._squares = [[value * kept for value in row] for row in self._squares]
        self._solution = None

    def predict(self, features: Sequence[float]) -> float:
        """Return the predicted time, s."""
        if self._solution is None:
            self._solution = self._solve()
        return _dot(self._solution, self._scaled(features))

    def _scaled(self, features: Sequence[float]) -> list[float]:
        return [x / size for x, size in zip(features, self._usual, strict=True)]

    def _tempered(self, elapsed_s: float, expected_s: float) -> float:
        most = SURPRISE_MAX if self._samples > WARM_SAMPLES else SURPRISE_COLD_MAX
        expected_s = max(expected_s, TIME_MIN_S)
        return min(max(elapsed_s, expected_s / most), expected_s * most)

    def _solve(self) -> list[float]:
        """Solve for the coefficients; those that come out below zero are fixed at zero, worst first."""
        free = list(range(len(self._prior)))
        while True:
            found = self._solve_for(free)
            worst = min(range(len(free)), key=found.__getitem__)
            if found[worst] >= 0:
                solution = dict(zip(free, found, strict=True))
                return [solution.get(index, 0.0) for index in range(len(self._prior))]
            # The last one left is a mean of positive times, and never goes.
            del free[worst]

    def _solve_for(self, free: list[int]) -> list[float]:
        scale = math.exp(self._log_scale / (self._samples + PRIOR_WEIGHT))
        squares = [
            [self._squares[row][column] + (self._prior_weight if row == column else 0.0) for column in free]
            for row in free
        ]
        products = [self._products[row] + self._prior_weight * self._prior[row] * scale for row in free]
        return _solve_symmetric(squares, products)


def _dot(coefficients: Sequence[float], x: Sequence[float]) -> float:
    return sum(c * at for c, at in zip(coefficients, x, strict=True))


def _solve_symmetric(squares: list[list[float]], products: list[float]) -> list[float]:
    """Solve a small positive definite system by elimination; it needs no pivots."""
    rows = [[*row, product] for row, product in zip(squares, products, strict=True)]
    size = len(rows)
    for at in range(size):
        for below in range(at + 1, size):
            factor = rows[below][at] / rows[at][at]
            rows[below] = [value - factor * above for value, above in zip(rows[below], rows[at], strict=True)]
    solution = [0.0] * size
    for at in reversed(range(size)):
        known = sum(rows[at][column] * solution[column] for column in range(at + 1, size))
        solution[at] = (rows[at][size] - known) / rows[at][at]
    return solution
