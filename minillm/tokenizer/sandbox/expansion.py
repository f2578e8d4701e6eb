"""Limits how much longer the steps of a `tokenizer.json` can make a text.

The steps (normalizers, pre-tokenizers, ...) are data, but they can do harm. Six steps that each replace "a" by a
hundred "a" turn every "a" into a terabyte, and the library cannot be interrupted once it has started. The steps of a
file are therefore checked before they run. The steps of real tokenizers make a text at most a few times longer.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable
from typing import Any

from minillm.errors import TokenizerError

COMPONENTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
MAX_EXPANSION = 1_000  # characters per character
MAX_AFFIX_LENGTH = 64  # characters of "##" or the like, which some models add before or after every character
# The library also recognizes a step by its fields. Steps with these fields can write several characters for one.
EXPANDING_FIELDS = {"trim_offsets", "suffix", "word_delimiter_token"}


def check_expansion(tokenizer_json: dict[str, Any], source: str) -> None:
    """Raise `TokenizerError` if the steps of a component can make a text more than `MAX_EXPANSION` times longer.

    Parameters
    ----------
    tokenizer_json : the content of a `tokenizer.json`; nothing in it has been checked yet
    source : the file's name, for error messages
    """
    for component in COMPONENTS:
        try:
            expansion = _expansion(tokenizer_json.get(component))
        except (RecursionError, ValueError) as error:
            raise TokenizerError(f"{source}: {component!r} cannot be read: {error}") from error
        if expansion > MAX_EXPANSION:
            raise TokenizerError(
                f"{source}: {component!r} can make a text {expansion:.3g} times longer; expected at most "
                f"{MAX_EXPANSION:,} times"
            )
    model = tokenizer_json.get("model")
    for field in ("continuing_subword_prefix", "end_of_word_suffix"):
        affix = model.get(field) if isinstance(model, dict) else None
        if isinstance(affix, str) and len(affix) > MAX_AFFIX_LENGTH:
            raise TokenizerError(
                f"{source}: model field {field!r} has {len(affix):,} characters; expected at most {MAX_AFFIX_LENGTH}"
            )


def _expansion(step: Any) -> float:
    """Return an upper bound of the characters (tokens, in a post-processor) that a step makes of one.

    The factors of consecutive steps multiply.
    """
    match step:
        case list():  # each step may also add something at the start or end of the text
            return max(len(step), _product(step))
        case {"pattern": pattern, "content": str(replacement)}:
            replaced = pattern.get("String") if isinstance(pattern, dict) else pattern
            if isinstance(replaced, str) and replaced:
                return max(1, len(replacement) / len(replaced))
            return 1 + len(replacement)  # a regular expression or "" may match between any two characters
        case {"prepend": str(prefix)}:
            return 1 + len(prefix)
        case {"precompiled_charsmap": str(encoded)}:
            return _max_replacement_length(base64.b64decode(encoded, validate=True))
        case {"single": list(pieces), "special_tokens": dict(special)}:
            id_lists = [token.get("ids") for token in special.values() if isinstance(token, dict)]
            return max(1, len(pieces)) * max((len(ids) for ids in id_lists if isinstance(ids, list)), default=1)
        case dict():
            expands = EXPANDING_FIELDS & step.keys() or step.get("type") == "ByteLevel"  # an emoji becomes 4 bytes
            return (4 if expands else 1) * _product(step.values())
    return 1


def _product(steps: Iterable[Any]) -> float:
    return math.prod(float(_expansion(step)) for step in steps)


def _max_replacement_length(table: bytes) -> int:
    """Return the length in bytes of the longest replacement in SentencePiece's normalization table.

    The table consists of the size of an index (uint32), the index, and the replacements, each followed by a zero byte.
    """
    replacements = table[4 + int.from_bytes(table[:4], "little") :]
    return max(1, *map(len, replacements.split(b"\0")))
