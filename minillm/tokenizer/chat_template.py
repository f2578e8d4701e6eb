"""Chat templates: the small Jinja programs that lay out a conversation as the text a model was trained on.

A template arrives inside a model file, so it is code from a stranger: `sandbox.py` runs it.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from minillm.errors import ChatTemplateError, RequestError
from minillm.tokenizer.sandbox import Budget, Sandbox, deep_size

MAX_SOURCE = 100_000  # characters of a template's source; published ones stay below 30,000
MAX_REASON = 1_000  # characters of what an error quotes from a template
BASE_WORK = 1_000_000  # units (characters made, mostly) any rendering may spend ...
WORK_PER_CHARACTER = 50  # ... and this many more for each character it was given


class ChatTemplate:
    """One template, compiled once and rendered for many conversations.

    `source` is the Jinja text. Raises `ChatTemplateError` if it does not compile.
    """

    def __init__(self, source: str):
        if not isinstance(source, str):
            raise ChatTemplateError(f"chat template: wants text, found {type(source).__name__}")
        if len(source) > MAX_SOURCE:
            raise ChatTemplateError(f"chat template: {len(source):,} characters of source, more than {MAX_SOURCE:,}")
        self.source = source
        try:
            self._code = Sandbox(Budget(BASE_WORK)).compile(source)
        except Exception as problem:
            raise _explained(problem) from problem

    def __repr__(self) -> str:
        return f"ChatTemplate({self.source[:60]!r}{'...' if len(self.source) > 60 else ''})"

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The conversation as text.

        Parameters
        ----------
        messages: dicts with at least `role` and `content`, both text, oldest first.
        add_generation_prompt: end with the words that open the assistant's turn, so that the model answers.
        variables: what else the template may ask for, such as `bos_token` or `tools`.

        Raises `RequestError` for malformed messages and `ChatTemplateError` when the template fails, refuses
        (`raise_exception`) or is stopped by the sandbox.
        """
        check_messages(messages)
        given = {
            "tools": None,  # templates written for transformers ask `if tools is not none`
            "documents": None,
            **variables,
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            environment = Sandbox(Budget(BASE_WORK + WORK_PER_CHARACTER * deep_size(given, limit=10**8)))
            template = jinja2.Template.from_code(environment, self._code, dict(environment.globals))
            return template.render(given)
        except Exception as problem:
            raise _explained(problem) from problem


def check_messages(messages: object) -> None:
    """Raise `RequestError` unless `messages` is a non-empty list of dicts with text `role` and `content`."""
    if not isinstance(messages, list | tuple):
        raise RequestError(f"messages: wants a list of dicts, found {type(messages).__name__}")
    if not messages:
        raise RequestError("messages: the list is empty; give at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"messages[{index}]: wants a dict, found {type(message).__name__}")
        for field in ("role", "content"):
            if not isinstance(message.get(field), str):
                found = type(message[field]).__name__ if field in message else "nothing"
                raise RequestError(f"messages[{index}][{field!r}]: wants text, found {found}")


def _explained(problem: Exception) -> ChatTemplateError:
    """`problem` as a `ChatTemplateError` that names the template's line."""
    line = getattr(problem, "lineno", None) if isinstance(problem, jinja2.TemplateSyntaxError) else None
    for frame in traceback.extract_tb(problem.__traceback__):
        if frame.filename == "<template>":  # Jinja rewrites its frames to the template's own lines
            line = frame.lineno
    where = f"chat template, line {line}" if line else "chat template"
    what = str(problem)[:MAX_REASON] or type(problem).__name__
    if not isinstance(problem, jinja2.TemplateError):
        what = f"{type(problem).__name__}: {what}"
    return ChatTemplateError(f"{where}: {what}")
