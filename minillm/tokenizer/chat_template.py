"""Chat templates: Jinja programs that turn a conversation into the text format that a model was trained on.

A template comes with a model file, so it is untrusted code. It runs in the sandbox of `minillm.tokenizer.sandbox`.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from minillm.errors import ChatTemplateError, RequestError
from minillm.tokenizer.sandbox import Budget, BudgetedEnvironment, deep_size

MAX_TEMPLATE_LENGTH = 100_000  # characters; published templates have fewer than 30,000
MAX_REASON_LENGTH = 1_000  # characters of a reason in an error message; a template chooses the text of its own errors
# The budget of a rendering in units of work, which are mostly characters produced.
BASE_UNITS = 1_000_000
UNITS_PER_CHARACTER = 50  # added for each character of the variables


class ChatTemplate:
    """A template that is compiled once and rendered for many conversations.

    Parameters
    ----------
    template : the Jinja program

    Raises
    ------
    ChatTemplateError
        The template is not text, is too long, or does not compile.
    """

    def __init__(self, template: str):
        if not isinstance(template, str):
            raise ChatTemplateError(f"chat template: expected text, got {type(template).__name__}")
        if len(template) > MAX_TEMPLATE_LENGTH:
            raise ChatTemplateError(
                f"chat template: expected at most {MAX_TEMPLATE_LENGTH:,} characters, got {len(template):,}"
            )
        self.template = template
        try:
            self._code = BudgetedEnvironment(Budget(BASE_UNITS)).compile(template)
        except Exception as error:
            raise _template_error(error) from error

    def __repr__(self) -> str:
        return f"ChatTemplate({self.template[:60]!r}{'...' if len(self.template) > 60 else ''})"

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Return the conversation as text.

        Parameters
        ----------
        messages : dicts with at least `role` and `content`, both text; the oldest message comes first
        add_generation_prompt : append the start of the assistant's turn, so that the model generates a reply
        variables : other variables that the template may use, such as `bos_token` or `tools`

        Raises
        ------
        RequestError
            `messages` is empty or malformed.
        ChatTemplateError
            The template fails, rejects the conversation with `raise_exception`, or is stopped by the sandbox.
        """
        check_messages(messages)
        variables = {
            "tools": None,  # templates written for transformers test `tools is not none`
            "documents": None,
            **variables,
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            units = BASE_UNITS + UNITS_PER_CHARACTER * deep_size(variables, limit=10**8)
            environment = BudgetedEnvironment(Budget(units))
            template = jinja2.Template.from_code(environment, self._code, dict(environment.globals))
            return template.render(variables)
        except Exception as error:
            raise _template_error(error) from error


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


def _template_error(error: Exception) -> ChatTemplateError:
    """Return a `ChatTemplateError` that names the template's line and the reason."""
    line = getattr(error, "lineno", None) if isinstance(error, jinja2.TemplateSyntaxError) else None
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == "<template>":  # Jinja rewrites its frames to the lines of the template
            line = frame.lineno
    location = f"chat template, line {line}" if line else "chat template"
    reason = str(error)[:MAX_REASON_LENGTH] or type(error).__name__
    if not isinstance(error, jinja2.TemplateError):
        reason = f"{type(error).__name__}: {reason}"
    return ChatTemplateError(f"{location}: {reason}")
