"""How much longer the steps of a `tokenizer.json` may make a text.

The steps (normalizers, pre-tokenizers, ...) are data, but data that can do harm: six steps that replace "a" by a
hundred of it make a terabyte of every "a", and nothing can stop the library once it has begun. So the file's steps
are read first. Those of real tokenizers make a text a few times longer at most.
"""

from __future__ import annotations

import base64
import math
from typing import Any

from minillm.errors import TokenizerError

PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
MAX_GROWTH = 1_000
MAX_AFFIX = 64  # characters of "##" and the like, which some models put before or after every character
# Fields that tell steps which write several characters for one; the library knows steps by their fields, too.
WIDENING = {"trim_offsets", "suffix", "word_delimiter_token"}


def check_growth(described: dict[str, Any], where: str) -> None:
    """Raise `TokenizerError` if a step, or several together, can make a text more than `MAX_GROWTH` times longer.

    `described` is the content of a `tokenizer.json`, as yet unchecked; `where` names it in errors.
    """
    for part in PARTS:
        try:
            growth = _growth(described.get(part))
        except (RecursionError, ValueError) as problem:
            raise TokenizerError(f"{where}: {part!r} cannot be read: {problem}") from problem
        if growth > MAX_GROWTH:
            raise TokenizerError(
                f"{where}: {part!r} may make a text {growth:.3g} times longer; at most {MAX_GROWTH:,} times is accepted"
            )
    model = described.get("model")
    for field in ("continuing_subword_prefix", "end_of_word_suffix"):
        affix = model.get(field) if isinstance(model, dict) else None
        if isinstance(affix, str) and len(affix) > MAX_AFFIX:
            raise TokenizerError(
                f"{where}: model field {field!r} has {len(affix):,} characters, not {MAX_AFFIX} or fewer"
            )


def _growth(step: Any) -> float:
    """The most characters (or tokens, in a post-processor) that a step makes of one; steps in a row multiply."""
    match step:
        case list():  # each may also add something at the text's ends
            return max(len(step), _product(step))
        case {"pattern": pattern, "content": str(new)}:
            old = pattern.get("String") if isinstance(pattern, dict) else pattern
            # A regular expression, or "", may match between any two characters.
            return max(1, len(new) / len(old)) if isinstance(old, str) and old else 1 + len(new)
        case {"prepend": str(new)}:
            return 1 + len(new)
        case {"precompiled_charsmap": str(encoded)}:
            return _longest_replacement(base64.b64decode(encoded, validate=True))
        case {"single": list(pieces), "special_tokens": dict(special)}:
            ids = [token.get("ids") for token in special.values() if isinstance(token, dict)]
            return max(1, len(pieces)) * max((len(some) for some in ids if isinstance(some, list)), default=1)
        case dict():
            widens = WIDENING & step.keys() or step.get("type") == "ByteLevel"  # 4 bytes for one emoji
            return (4 if widens else 1) * _product(step.values())
    return 1


def _product(steps: Any) -> float:
    return math.prod(float(_growth(step)) for step in steps)


def _longest_replacement(table: bytes) -> int:
    """SentencePiece's table: u32 size of an index, the index, then the replacements, a zero byte after each."""
    replacements = table[4 + int.from_bytes(table[:4], "little") :]
    return max(1, *map(len, replacements.split(b"\0")))
