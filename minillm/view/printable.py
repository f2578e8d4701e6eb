"""Make untrusted text safe to display: no control characters, no change of text direction, and a known width.

Every character that a terminal would act on is replaced by a visible one. Prompts, answers and request ids all pass
through here before they are drawn.
"""

from __future__ import annotations

import unicodedata

from rich.cells import cell_len

SUBSTITUTES = {"\n": "⏎", "\t": "⇥", "\x7f": "␡", "\u2028": "⏎", "\u2029": "⏎", "\u00a0": " "}
REPLACEMENT = "\ufffd"
# Some terminals combine characters around joiners and variation selectors into one wide glyph, others do not. Without
# them, all terminals agree on the width.
DROPPED = {"\u200b", "\u200c", "\u200d", "\u2060", "\ufeff", "\u00ad"}


def printable(text: str) -> str:
    """Return `text` with every control character, direction mark and lone surrogate replaced or dropped."""
    return text if text.isascii() and text.isprintable() else "".join(map(_printable_character, text))


def _printable_character(character: str) -> str:
    if character in SUBSTITUTES:
        return SUBSTITUTES[character]
    if character in DROPPED or "\ufe00" <= character <= "\ufe0f" or "\U000e0100" <= character <= "\U000e01ef":
        return ""
    if character.isprintable():
        return character
    if character < " ":
        return chr(0x2400 + ord(character))  # Unicode's control pictures: ␛ for escape
    return " " if unicodedata.category(character) == "Zs" else REPLACEMENT


def wrap(text: str, width: int) -> list[slice]:
    """Return slices that divide `text` into lines of at most `width` terminal cells. Wide characters take two cells.

    A line ends after a space if its second half contains one. A character wider than `width` gets a line of its own.
    """
    lines: list[slice] = []
    start = 0
    while True:
        stop = start + len(head(text[start:], width))
        if stop == len(text):
            return [*lines, slice(start, stop)]
        space = text.rfind(" ", start + (stop - start) // 2, stop)
        stop = max(stop, start + 1) if space < 0 else space + 1
        lines.append(slice(start, stop))
        start = stop


def head(text: str, width: int) -> str:
    """Return the longest prefix of `text` that fits in `width` terminal cells."""
    used = 0
    for index, character in enumerate(text):
        used += cell_len(character)
        if used > width:
            return text[:index]
    return text


def tail(text: str, width: int) -> slice:
    """Return the slice of the longest suffix of `text` that fits in `width` terminal cells."""
    start, used = len(text), 0
    while start > 0 and used + cell_len(text[start - 1]) <= width:
        used += cell_len(text[start - 1])
        start -= 1
    return slice(start, len(text))
