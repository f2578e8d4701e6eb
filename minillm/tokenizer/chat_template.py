"""Chat templates: small Jinja programs that turn a conversation into the text format a model was trained on.

A template comes from a model file and is untrusted code, so it runs in `minillm.tokenizer.sandbox`.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from minillm.errors import ChatTemplateError, RequestError
from minillm.tokenizer.sandbox import Budget, Sandbox, deep_size

MAX_SOURCE = 100_000  # characters of a template's source; published templates have fewer than 30,000
MAX_QUOTED = 1_000  # characters that an error quotes from a template
BASE_UNITS = 1_000_000  # units (mostly characters created) that any rendering may spend
UNITS_PER_CHARACTER = 50  # additional units per character of input


class ChatTemplate:
    """A template, compiled once and rendered for many conversations.

    `source` is the Jinja text. Raises `ChatTemplateError` if it does not compile.
    """

    def __init__(self, source: str):
        if not isinstance(source, str):
            raise ChatTemplateError(f"chat template: expected text, got {type(source).__name__}")
        if len(source) > MAX_SOURCE:
            raise ChatTemplateError(
                f"chat template: {len(source):,} characters of source, expected at most {MAX_SOURCE:,}"
            )
        self.source = source
        try:
            self._code = Sandbox(Budget(BASE_UNITS)).compile(source)
        except Exception as problem:
            raise _template_error(problem) from problem

    def __repr__(self) -> str:
        return f"ChatTemplate({self.source[:60]!r}{'...' if len(self.source) > 60 else ''})"

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Render a conversation as text.

        Parameters
        ----------
        messages : dicts with at least `role` and `content`, both text, oldest first
        add_generation_prompt : whether to end with the text that opens the assistant's turn, so that the model answers
        variables : other variables that the template may use, such as `bos_token` or `tools`

        Raises
        ------
        RequestError
            The messages are malformed.
        ChatTemplateError
            The template fails, rejects the messages (`raise_exception`), or is stopped by the sandbox.
        """
        check_messages(messages)
        context = {
            "tools": None,  # templates written for transformers test `if tools is not none`
            "documents": None,
            **variables,
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            environment = Sandbox(Budget(BASE_UNITS + UNITS_PER_CHARACTER * deep_size(context, limit=10**8)))
            template = jinja2.Template.from_code(environment, self._code, dict(environment.globals))
            return template.render(context)
        except Exception as problem:
            raise _template_error(problem) from problem


def check_messages(messages: object) -> None:
    """Raise `RequestError` unless `messages` is a non-empty list of dicts with text `role` and `content`."""
    if not isinstance(messages, list | tuple):
        raise RequestError(f"messages: expected a list of dicts, got {type(messages).__name__}")
    if not messages:
        raise RequestError("messages: the list is empty; give at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"messages[{index}]: expected a dict, got {type(message).__name__}")
        for field in ("role", "content"):
            if not isinstance(message.get(field), str):
                found = type(message[field]).__name__ if field in message else "nothing"
                raise RequestError(f"messages[{index}][{field!r}]: expected text, got {found}")


def _template_error(problem: Exception) -> ChatTemplateError:
    """Return a `ChatTemplateError` for `problem` that names the line of the template."""
    line = getattr(problem, "lineno", None) if isinstance(problem, jinja2.TemplateSyntaxError) else None
    for frame in traceback.extract_tb(problem.__traceback__):
        if frame.filename == "<template>":  # Jinja rewrites its frames to the lines of the template
            line = frame.lineno
    location = f"chat template, line {line}" if line else "chat template"
    reason = str(problem)[:MAX_QUOTED] or type(problem).__name__
    if not isinstance(problem, jinja2.TemplateError):
        reason = f"{type(problem).__name__}: {reason}"
    return ChatTemplateError(f"{location}: {reason}")
