"""From what a client sent to a checked, tokenized order. Nothing behind this file meets bad input."""

import array
import secrets
from dataclasses import replace

from kvrelay.errors import InvalidArgument
from kvrelay.rpc.context import current_request_id, new_request_id
from kvrelay.rpc.router_convert import Continued, GenerateAsk
from kvrelay.types import Sampling, TokenArray
from router.answer import Answer
from router.order import Order
from router.text import RouterText

SEED_BITS = 64


class Intake:
    """Checks requests for one model."""

    def __init__(self, text: RouterText, *, model: str) -> None:
        self._text = text
        self._model = model

    def check_model(self, model: str) -> None:
        """Refuse a model that is not served; empty means the one that is.

        Raises:
            InvalidArgument: another one is asked for.
        """
        if model not in {"", self._model}:
            raise InvalidArgument("model", f"{model!r} is not served; served is {self._model!r}")

    async def prompt_ids(self, prompt: "str | tuple[tuple[str, str], ...] | TokenArray") -> TokenArray:
        """Return the token ids of a prompt.

        Raises:
            InvalidArgument: it cannot be rendered, or is no prompt of this model.
        """
        if isinstance(prompt, array.array):
            self._check_ids("prompt_ids", prompt)
            return prompt
        if isinstance(prompt, str):
            ids = await self._text.encode(prompt)
        else:
            rendered = self._text.render([{"role": role, "content": content} for role, content in prompt])
            ids = await self._text.encode(rendered, special=False)
        if not ids:
            raise InvalidArgument("prompt", "it has no tokens; at least one is needed")
        return array.array("I", ids)

    async def admit(self, ask: GenerateAsk, *, request_id: str, context_tokens: int | None) -> tuple[Order, Answer]:
        """Return the order, and the answer with what a continued one had already.

        Args:
            ask: the request.
            request_id: its id.
            context_tokens: longest sequence that the fleet takes; None: nobody is there to tell.

        Raises:
            InvalidArgument: names the field and the limit.
        """
        self.check_model(ask.model)
        self._check_ids("sampling.stop_ids", array.array("I", ask.sampling.stop_ids))
        prompt_ids = await self.prompt_ids(ask.prompt)
        own = self._text.model.context_tokens
        most = own if context_tokens is None else min(own, context_tokens)
        if len(prompt_ids) >= most:
            raise InvalidArgument(
                "prompt",
                f"{len(prompt_ids)} tokens; the context of {most} must hold the answer too: at most {most - 1}",
            )
        sampling = _settled(ask.sampling, ask.continued).limited(len(prompt_ids), most)
        order = self._order(ask, request_id, prompt_ids, sampling)
        return order, self._answer(ask, order)

    def _order(self, ask: GenerateAsk, request_id: str, prompt_ids: TokenArray, sampling: Sampling) -> Order:
        return Order(
            request_id=request_id,
            model=self._model,
            prompt_ids=prompt_ids,
            sampling=sampling,
            wanted_tokens=ask.sampling.max_tokens,
            first_attempt=ask.continued.attempt if ask.continued else 0,
            priority=ask.priority,
            salt=ask.cache_salt,
            ttft_slo_ms=ask.ttft_slo_ms,
            tpot_slo_ms=ask.tpot_slo_ms,
        )

    def _answer(self, ask: GenerateAsk, order: Order) -> Answer:
        answer = Answer(
            prompt_tokens=len(order.prompt_ids),
            sampling=order.sampling,
            eos_ids=self._text.model.eos_ids,
            tokenizer=self._text.model.tokenizer,
            tell_ids=ask.return_ids or ask.sampling.logprobs is not None,
        )
        if ask.continued:
            written, most = ask.continued.output_ids, order.sampling.max_tokens or 0
            self._check_ids("continuation.output_ids", written)
            if len(written) > most:
                raise InvalidArgument(
                    "continuation.output_ids", f"{len(written)} tokens, the answer has {most} at most"
                )
            answer.prime(written)
        return answer

    def _check_ids(self, name: str, ids: TokenArray) -> None:
        vocab_size = self._text.model.vocab_size
        if ids and (worst := max(ids)) >= vocab_size:
            index = ids.index(worst)
            raise InvalidArgument(name, f"token id {worst} at index {index} is not in [0, {vocab_size})")


def request_id_of(ask: GenerateAsk) -> str:
    """Return the id of a request: that of the answer it continues, the client's, the call's, or a new one."""
    given = ask.continued.request_id if ask.continued else ask.request_id
    return given or current_request_id() or new_request_id()


def _settled(sampling: Sampling, continued: Continued | None) -> Sampling:
    """Return the sampling with its seed: that of the answer's beginning, the client's, or a new one."""
    if continued:
        return replace(sampling, seed=continued.seed)
    return sampling if sampling.seed is not None else replace(sampling, seed=secrets.randbits(SEED_BITS))
