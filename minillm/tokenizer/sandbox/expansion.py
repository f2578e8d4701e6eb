"""Limit how much longer the steps of a `tokenizer.json` can make a text.

The steps (normalizers, pre-tokenizers, ...) are data, but data can do harm: six steps that each replace "a" by a
hundred "a" turn every "a" into a terabyte, and the library cannot be interrupted. The file's steps are therefore
checked first. The steps of real tokenizers make a text at most a few times longer.
"""

from __future__ import annotations

import base64
import math
from typing import Any

from minillm.errors import TokenizerError

PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
MAX_EXPANSION = 1_000
MAX_AFFIX = 64  # characters of a prefix or suffix such as "##", which some models add to every character
# Fields of steps that write several characters for one. The library also identifies steps by their fields.
EXPANDING_FIELDS = {"trim_offsets", "suffix", "word_delimiter_token"}


def check_expansion(tokenizer_json: dict[str, Any], source: str) -> None:
    """Raise `TokenizerError` if one step or several in a row can make a text more than `MAX_EXPANSION` times longer.

    `tokenizer_json` is the unchecked content of a `tokenizer.json`; `source` names the file in errors.
    """
    for part in PARTS:
        try:
            expansion = _expansion(tokenizer_json.get(part))
        except (RecursionError, ValueError) as problem:
            raise TokenizerError(f"{source}: {part!r} cannot be read: {problem}") from problem
        if expansion > MAX_EXPANSION:
            raise TokenizerError(
                f"{source}: {part!r} may make a text {expansion:.3g} times longer, expected at most {MAX_EXPANSION:,}"
            )
    model = tokenizer_json.get("model")
    for field in ("continuing_subword_prefix", "end_of_word_suffix"):
        affix = model.get(field) if isinstance(model, dict) else None
        if isinstance(affix, str) and len(affix) > MAX_AFFIX:
            raise TokenizerError(
                f"{source}: model field {field!r} has {len(affix):,} characters, expected at most {MAX_AFFIX}"
            )


def _expansion(step: Any) -> float:
    """Return an upper bound on the characters (in a post-processor, tokens) that a step makes from one.

    The bounds of steps in a row are multiplied.
    """
    match step:
        case list():  # each step may also add a constant at the ends of the text
            return max(len(step), _product(step))
        case {"pattern": pattern, "content": str(new)}:
            old = pattern.get("String") if isinstance(pattern, dict) else pattern
            # A regular expression, or an empty pattern, may match between any two characters.
            return max(1, len(new) / len(old)) if isinstance(old, str) and old else 1 + len(new)
        case {"prepend": str(new)}:
            return 1 + len(new)
        case {"precompiled_charsmap": str(encoded)}:
            return _longest_replacement(base64.b64decode(encoded, validate=True))
        case {"single": list(pieces), "special_tokens": dict(special)}:
            ids = [token.get("ids") for token in special.values() if isinstance(token, dict)]
            return max(1, len(pieces)) * max(
                (len(token_ids) for token_ids in ids if isinstance(token_ids, list)), default=1
            )
        case dict():
            expands = EXPANDING_FIELDS & step.keys() or step.get("type") == "ByteLevel"  # an emoji has 4 bytes
            return (4 if expands else 1) * _product(step.values())
    return 1


def _product(steps: Any) -> float:
    return math.prod(float(_expansion(step)) for step in steps)


def _longest_replacement(table: bytes) -> int:
    """Return the length in bytes of the longest replacement in SentencePiece's table, at least 1.

    The table holds the size of an index (u32), the index, then the replacements, each followed by a zero byte.
    """
    replacements = table[4 + int.from_bytes(table[:4], "little") :]
    return max(1, *map(len, replacements.split(b"\0")))
