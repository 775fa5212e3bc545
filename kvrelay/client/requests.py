"""From what a client asks to the messages of the router's protocol. Pure."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from kvrelay.client import wire
from kvrelay.client.values import Message, Slo
from kvrelay.errors import InvalidArgument
from kvrelay.rpc.convert import sampling_to_pb
from kvrelay.types import Sampling, pack_ids
from kvrelay.v1 import router_pb2

ChatPrompt: TypeAlias = str | Sequence[Message | Mapping[str, str]]
"""One user message, or messages oldest first; a mapping has the keys "role" and "content"."""

RawPrompt: TypeAlias = str | Sequence[int]
"""Text taken as it is, or token ids."""

SAMPLING_FIELDS = frozenset(field.name for field in dataclasses.fields(Sampling))
REQUEST_FIELDS = frozenset({"model", "session", "priority", "tenant", "slo", "request_id", "return_ids", "cache_salt"})


def chat_request(prompt: ChatPrompt, options: Mapping[str, Any]) -> router_pb2.GenerateRequest:
    """Build a request whose prompt is rendered by the model's chat template.

    Raises:
        InvalidArgument: no message, one that is not a message, or sampling that is out of range.
        TypeError: an unknown option, or options that exclude each other.
    """
    request = _request(options)
    request.chat.CopyFrom(_chat(prompt))
    return request


def raw_request(prompt: RawPrompt, options: Mapping[str, Any]) -> router_pb2.GenerateRequest:
    """Build a request whose prompt is taken as it is.

    Raises:
        InvalidArgument: an id that no vocabulary has, or sampling that is out of range.
        TypeError: an unknown option, or options that exclude each other.
    """
    request = _request(options)
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.prompt_ids = _pack(prompt, "prompt_ids")
    return request


def tokenize_request(prompt: ChatPrompt, *, raw: bool, model: str) -> router_pb2.TokenizeRequest:
    """Build a question for token ids; `raw` takes a text as it is instead of as a chat.

    Raises:
        InvalidArgument: as `chat_request`, or messages together with `raw`.
    """
    if not raw:
        return router_pb2.TokenizeRequest(model=model, chat=_chat(prompt))
    if not isinstance(prompt, str):
        raise InvalidArgument("prompt", "messages cannot be taken raw; give one text")
    return router_pb2.TokenizeRequest(model=model, text=prompt)


def _request(options: Mapping[str, Any]) -> router_pb2.GenerateRequest:
    unknown = sorted(set(options) - SAMPLING_FIELDS - REQUEST_FIELDS - {"sampling"})
    if unknown:
        raise TypeError(f"unknown option {', '.join(unknown)}")
    fields = {name: options[name] for name in REQUEST_FIELDS & set(options)}
    slo: Slo | None = fields.pop("slo", None)
    request = router_pb2.GenerateRequest(sampling=sampling_to_pb(_sampling(options)), **fields)
    if slo is not None:
        request.slo.CopyFrom(wire.slo_to_pb(slo))
    return request


def _sampling(options: Mapping[str, Any]) -> Sampling:
    given = {name: options[name] for name in SAMPLING_FIELDS & set(options)}
    if given and "sampling" in options:
        raise TypeError(f"give sampling or {', '.join(sorted(given))}, not both")
    sampling: Sampling = options["sampling"] if "sampling" in options else Sampling(**given)
    sampling.validate()
    return sampling


def _chat(prompt: ChatPrompt) -> router_pb2.Chat:
    messages = [Message("user", prompt)] if isinstance(prompt, str) else prompt
    if not messages:
        raise InvalidArgument("chat.messages", "none given, at least one")
    return router_pb2.Chat(messages=[_message(message, index) for index, message in enumerate(messages)])


def _message(message: Message | Mapping[str, str], index: int) -> router_pb2.ChatMessage:
    if isinstance(message, Message):
        return router_pb2.ChatMessage(role=message.role, content=message.content)
    if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
        raise InvalidArgument(f"chat.messages[{index}]", "neither a Message nor a mapping of role and content")
    return router_pb2.ChatMessage(role=message["role"], content=message["content"])


def _pack(ids: Sequence[int], name: str) -> bytes:
    try:
        return pack_ids(list(ids))
    except (OverflowError, TypeError) as error:
        raise InvalidArgument(name, "token ids are integers in [0, 4294967295]") from error
