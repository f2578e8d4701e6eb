"""Tokens that end a turn or a text, recognized by their names.

Many GGUF files name one end token, often the end of *text*, although the model ends its turns with another. llama.cpp
therefore also ends generation at every token with one of the names below (`src/llama-vocab.cpp` in ggml-org/llama.cpp).
A chat template shows further ones: the token that it writes after an answer.
"""

from __future__ import annotations

from collections.abc import Iterable

from minillm.errors import MinillmError
from minillm.tokenizer.chat_template import ChatTemplate

END_NAMES = frozenset(
    {
        *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>"),
        *("<end_of_turn>", "<turn|>", "<end_of_utterance>", "<|endoftext|>", "<|end_of_text|>", "<|end_of_turn|>"),
        *("<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<｜end▁of▁sentence｜>"),
    }
)

TEXT_END_NAMES = frozenset({"<|endoftext|>", "<|end_of_text|>", "[EOS]"})  # these do not have to end a turn

ANSWER = "7f3a9c answer"  # a text that no template contains


def end_names(special_tokens: Iterable[str], template: str | None, variables: dict[str, str]) -> list[str]:
    """Return the special tokens that end a turn or a text.

    Parameters
    ----------
    special_tokens : the special tokens of the vocabulary
    template : the model's chat template, or None
    variables : the special tokens by role, as the template uses them
    """
    tokens = list(dict.fromkeys(special_tokens))
    ends = [token for token in tokens if token in END_NAMES]
    if template is not None and not set(ends) - TEXT_END_NAMES:  # rendering takes time, and a known name is enough
        after = _text_after_answer(template, variables)
        ends += [token for token in tokens if token not in ends and token and after.startswith(token)]
    return ends


def _text_after_answer(template: str, variables: dict[str, str]) -> str:
    """Return the text that a template writes after an answer; none if it cannot render the conversation."""
    conversation = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ANSWER}]
    try:
        text = ChatTemplate(template).render(conversation, add_generation_prompt=False, **variables)
    except MinillmError:
        return ""
    return text.partition(ANSWER)[2].lstrip()
