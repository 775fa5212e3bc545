"""The text side of requests: chat templates and tokenizing."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox

from kvrelay.errors import InvalidArgument
from kvrelay.model.text import TextModel

INLINE_CHARACTERS_MAX: Final = 4096
"""Texts up to this are tokenized on the event loop (about 2 ms); a hop to a thread would cost more than it saves."""

TEXT_THREADS: Final = 2
"""Threads for long texts. Tokenizing is native code without the interpreter lock."""


class RouterText:
    """Turns prompts into token ids with the model's own template and tokenizer."""

    def __init__(self, model: TextModel) -> None:
        self.model = model
        self._template = _compile(model.chat_template) if model.chat_template else None
        self._threads = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="text")

    def close(self) -> None:
        """End the threads; texts under way are finished first."""
        self._threads.shutdown()

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the chat as the prompt that asks for the assistant's next message.

        Raises:
            InvalidArgument: the model has no template, or its template refuses the messages; says why.
        """
        if self._template is None:
            raise InvalidArgument("chat", "this model has no chat template; send text instead")
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=True,
                bos_token=self.model.bos_token,
                eos_token=self.model.eos_token,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise InvalidArgument("chat", f"the model's template refuses it: {error}") from error

    async def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: the text; special tokens written in it are recognised.
            special: add what the tokenizer puts around a text of its own (such as a beginning-of-sequence token),
                unless the text begins with it already. A rendered chat has it from its template.
        """
        special = special and not (self.model.bos_token and text.startswith(self.model.bos_token))
        if len(text) <= INLINE_CHARACTERS_MAX:
            return self._encode(text, special)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._encode, text, special)

    def _encode(self, text: str, special: bool) -> list[int]:  # noqa: FBT001 - run_in_executor passes by position
        ids: list[int] = self.model.tokenizer.encode(text, add_special_tokens=special).ids
        return ids


def _compile(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols],
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.filters["tojson"] = _tojson
    return environment.from_string(source)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now(tz=UTC).astimezone().strftime(form)


def _tojson(value: Any, indent: int | None = None) -> str:
    # The built-in filter escapes for HTML, which would change what the model reads.
    return json.dumps(value, ensure_ascii=False, indent=indent)
