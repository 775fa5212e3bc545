"""From the parts of an answer to the whole. Pure."""

from kvrelay.client.values import Answer, Decision, Delta, Finish, Part
from kvrelay.errors import Unavailable
from kvrelay.types import TokenLogprobs


class AnswerBuilder:
    """Collects the parts of one answer in the order of their arrival."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._decision: Decision | None = None
        self._finish: Finish | None = None

    @property
    def begun(self) -> bool:
        """Whether any part has arrived."""
        return self._decision is not None or self._finish is not None or bool(self._texts)

    @property
    def finished(self) -> bool:
        """Whether the last part has arrived."""
        return self._finish is not None

    def add(self, part: Part) -> None:
        """Take the next part."""
        if isinstance(part, Decision):
            self._decision = part
        elif isinstance(part, Delta):
            self._texts.append(part.text)
            self._ids.extend(part.ids)
            self._logprobs.extend(part.logprobs)
        else:
            self._finish = part

    def answer(self) -> Answer:
        """Return the whole answer.

        Raises:
            Unavailable: the answer broke off: its end, or where it was written, was never told.
        """
        if self._finish is None or self._decision is None:
            raise Unavailable("the answer broke off before its end; ask again")
        return Answer(
            text="".join(self._texts),
            decision=self._decision,
            finish=self._finish,
            ids=tuple(self._ids),
            logprobs=tuple(self._logprobs),
        )
