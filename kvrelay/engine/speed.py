"""How fast this engine is, as measured: running means and a running fit that forget."""

from dataclasses import dataclass
from typing import Final

from kvrelay.kv.fit import Fit

DECAY = 0.95
"""Weight a sample keeps at the next one: the mean follows a change within about 20 steps."""

PRIOR_STEP_S: Final = 0.005
PRIOR_TOKEN_S: Final = 1 / 400
PRIOR_TOKEN_CONTEXT_S: Final = 2e-7
"""Before anything was measured: one CPU core with a model of 135 million parameters. A step costs 5 ms, a token of a
prompt 2.5 ms, and 0.2 µs more for each token before it."""

USUAL_TOKENS: Final = 256.0
USUAL_CONTEXT_TOKENS: Final = 1024.0


@dataclass(slots=True)
class Mean:
    """A decaying ratio of two sums."""

    amount: float = 0.0
    seconds: float = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """Take a sample in."""
        self.amount = self.amount * DECAY + amount
        self.seconds = self.seconds * DECAY + seconds


class Speed:
    """Measured prefill rate and decode step time, 0 while unknown; and a prediction of what a prompt will take."""

    def __init__(self) -> None:
        self._prefill = Mean()
        self._decode = Mean()
        self._fit = Fit(
            prior=(PRIOR_STEP_S, PRIOR_TOKEN_S, PRIOR_TOKEN_CONTEXT_S),
            usual=(1.0, USUAL_TOKENS, USUAL_TOKENS * USUAL_CONTEXT_TOKENS),
        )

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens computed a second."""
        return self._prefill.amount / self._prefill.seconds if self._prefill.seconds else 0.0

    @property
    def step_s(self) -> float:
        """Time of a step that only decodes, s."""
        return self._decode.seconds / self._decode.amount if self._decode.amount else 0.0

    def add(self, *, prompt_tokens: int, elapsed_s: float, attended: int = 0) -> None:
        """Take a step in. A step with prompts in it tells of prefill as it is in the company of this load.

        Args:
            prompt_tokens: prompt tokens it computed.
            elapsed_s: time it took.
            attended: tokens before them, summed over these tokens.
        """
        if prompt_tokens:
            self._prefill.add(prompt_tokens, elapsed_s)
            self._fit.add((1.0, prompt_tokens, attended), elapsed_s)
        else:
            self._decode.add(1, elapsed_s)

    def compute_s(self, start: int, end: int, *, chunk_tokens: int) -> float:
        """Predict how long computing a prompt's tokens [start, end) takes, in steps of `chunk_tokens`, s."""
        if end <= start:
            return 0.0
        return self._fit.predict(((end - start) / chunk_tokens, end - start, attended_by(start, end)))


def attended_by(start: int, end: int) -> int:
    """Return how many tokens come before each of [start, end), summed."""
    return (end * (end - 1) - start * (start - 1)) // 2
