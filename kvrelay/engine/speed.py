"""How fast this engine is, as measured: running means that forget."""

from dataclasses import dataclass

DECAY = 0.95
"""Weight a sample keeps at the next one: the mean follows a change within about 20 steps."""


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
    """Measured prefill rate and decode step time; 0 while unknown."""

    def __init__(self) -> None:
        self._prefill = Mean()
        self._decode = Mean()

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens computed a second."""
        return self._prefill.amount / self._prefill.seconds if self._prefill.seconds else 0.0

    @property
    def step_s(self) -> float:
        """Time of a step that only decodes, s."""
        return self._decode.seconds / self._decode.amount if self._decode.amount else 0.0

    def add(self, *, prompt_tokens: int, elapsed_s: float) -> None:
        """Take a step in. A step with prompts in it tells of prefill as it is in the company of this load."""
        if prompt_tokens:
            self._prefill.add(prompt_tokens, elapsed_s)
        else:
            self._decode.add(1, elapsed_s)
