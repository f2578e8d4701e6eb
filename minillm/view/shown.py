"""Text from a model or a stranger, made safe to show: it moves no cursor, turns no line round, has a known width.

Whatever a terminal would obey rather than print is replaced by a character that stands for it.
"""

from __future__ import annotations

import unicodedata

from rich.cells import cell_len

STAND_INS = {"\n": "⏎", "\t": "⇥", "\x7f": "␡", "\u2028": "⏎", "\u2029": "⏎", "\u00a0": " "}
REPLACEMENT = "\ufffd"
# Joiners and variation selectors make one wide picture of several, in some terminals: without them all agree.
DROPPED = {"\u200b", "\u200c", "\u200d", "\u2060", "\ufeff", "\u00ad"}


def shown(text: str) -> str:
    """`text` with a stand-in for every control character, direction mark, half character and the like."""
    return text if text.isascii() and text.isprintable() else "".join(map(_shown_character, text))


def _shown_character(character: str) -> str:
    if character in STAND_INS:
        return STAND_INS[character]
    if character in DROPPED or "\ufe00" <= character <= "\ufe0f" or "\U000e0100" <= character <= "\U000e01ef":
        return ""
    if character.isprintable():
        return character
    if character < " ":
        return chr(0x2400 + ord(character))  # Unicode has a picture of each: ␛ for escape
    return " " if unicodedata.category(character) == "Zs" else REPLACEMENT


def fold(text: str, width: int) -> list[slice]:
    """Where `text` is to be cut, so that every piece takes at most `width` terminal cells (wide characters take two).

    A cut is after a space, if there is one in the second half of the piece. A character wider than `width` is a piece
    of its own.
    """
    pieces, start = [], 0
    while True:
        stop = start + len(head(text[start:], width))
        if stop == len(text):
            return [*pieces, slice(start, stop)]
        space = text.rfind(" ", start + (stop - start) // 2, stop)
        stop = max(stop, start + 1) if space < 0 else space + 1
        pieces.append(slice(start, stop))
        start = stop


def head(text: str, width: int) -> str:
    """The beginning of `text`: as much of it as `width` terminal cells hold."""
    used = 0
    for position, character in enumerate(text):
        used += cell_len(character)
        if used > width:
            return text[:position]
    return text


def tail(text: str, width: int) -> slice:
    """The end of `text`: as much of it as `width` terminal cells hold."""
    start, used = len(text), 0
    while start > 0 and used + cell_len(text[start - 1]) <= width:
        used += cell_len(text[start - 1])
        start -= 1
    return slice(start, len(text))
