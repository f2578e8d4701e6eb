"""Renders a chat template for a short conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from minillm.tokenizer.chat_template import ChatTemplate

GREETING = [{"role": "user", "content": "Hi <there> & 'all' 안녕"}]


def render(template: str, messages: Sequence[Mapping[str, Any]] = GREETING, **variables: Any) -> str:
    return ChatTemplate(template).render(messages, **variables)
