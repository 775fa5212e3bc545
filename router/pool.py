"""Which replicas serve the same blocks as each other and read the same tokens as this router. Pure."""

from collections.abc import Iterable

from kvrelay.errors import Mismatch
from kvrelay.kv.keys import check_identity, make_identity
from kvrelay.types import ModelIdentity, Replica


class Pool:
    """The pool that this router sends to.

    Attributes:
        identity: what all its replicas have in common, learned from the first one that fits; None: nobody is there.
    """

    def __init__(self, *, model: str, tokenizer_fingerprint: str) -> None:
        self._model = model
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self.identity: ModelIdentity | None = None

    def sort(self, replicas: Iterable[Replica]) -> dict[str, Mismatch]:
        """Go through all live replicas, by id; return those that are not routed to, with the difference.

        The identity stays while anyone has it; then it is learned anew.
        """
        replicas = list(replicas)
        if all(replica.identity != self.identity for replica in replicas):
            self.identity = None
        refused: dict[str, Mismatch] = {}
        for replica in replicas:
            if mismatch := self._difference(replica.identity):
                refused[replica.peer.replica_id] = mismatch
            else:
                self.identity = self.identity or replica.identity
        return refused

    def _difference(self, got: ModelIdentity) -> Mismatch | None:
        try:
            check_identity(self.identity or self._expected(got), got)
        except Mismatch as mismatch:
            return mismatch
        return None

    def _expected(self, got: ModelIdentity) -> ModelIdentity:
        """What a first replica must tell: its weights are its own affair, the tokenizer must be this router's."""
        return make_identity(
            model=self._model,
            model_fingerprint=got.model_fingerprint,
            tokenizer_fingerprint=self._tokenizer_fingerprint,
            block_tokens=max(1, got.block_tokens),
            context_tokens=got.context_tokens,
        )
