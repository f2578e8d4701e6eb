"""HeatMap: what one attention head looks at, a row a token, in a terminal. `heatpage.py` makes a page of the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.text import Text

from minillm.view.look import QUIET
from minillm.view.shown import head, shown

BOUNDS = (0.05, 0.2, 0.4, 0.7)  # shares from which on a cell is drawn darker
COLOUR, STRONGEST = "#56b4e9", "bold #e69f00"  # Okabe and Ito's; the second for the largest share of each row
LABEL = 10  # terminal cells for a token's text
GAP = 2  # cells between the map and what stands right of it


@dataclass(frozen=True)
class Strokes:
    """What a map is drawn with: a character for each shade, one for a space in a token, one for what was left out."""

    shades: str
    space: str
    more: str


UNICODE, ASCII = Strokes("·░▒▓█", "␣", "…"), Strokes(".:o%#", "_", "~")


@dataclass(frozen=True)
class HeatMap:
    """A head's weights between the tokens of a text. Printed by a rich Console, it fills the width there is.

    Attributes
    ----------
    texts : the tokens, T of them, as they are: what a terminal would obey is replaced when shown.
    weights : T rows; row t has a share from 0 to 1 for each position, of which those after t are not looked at.
    title : a line above the map.

    Raises
    ------
    ValueError
        The rows are not T, or one has not T shares.
    """

    texts: Sequence[str]
    weights: Sequence[Sequence[float]]
    title: str = ""

    def __post_init__(self):
        sizes = {len(self.weights), *map(len, self.weights)}
        if sizes - {len(self.texts)}:
            raise ValueError(
                f"{len(self.texts)} tokens, but weights of {len(self.weights)} rows of {max(sizes)} shares"
            )

    def label(self, position: int, space: str = UNICODE.space) -> str:
        """A token's text, safe to show, its spaces to be seen."""
        return shown(self.texts[position]).replace(" ", space)

    def strongest(self, position: int) -> int:
        """Whom a token looks at most; the first of several."""
        row = self.weights[position]
        return max(range(position + 1), key=lambda other: (row[other], -other))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        strokes = ASCII if options.ascii_only else UNICODE
        digits = len(str(len(self.texts) - 1))
        aside = 2 * (digits + 1 + LABEL) + 1 + GAP + len(" 0.00")
        room = max(8, options.max_width - aside)
        width = 2 if 2 * len(self.texts) <= room else 1
        lines = [Text(shown(self.title)), *(Text(line, style=QUIET) for line in legend(strokes))]
        for first in range(0, len(self.texts), room // width):
            columns = range(first, min(first + room // width, len(self.texts)))
            lines += [Text(), *self._heads(columns, digits, width)]
            lines += [self._row(t, columns, digits, width, strokes) for t in range(first, len(self.texts))]
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
            yield line

    def _heads(self, columns: range, digits: int, width: int) -> Iterator[Text]:
        """The columns' numbers, a line a digit; tens and hundreds where they change."""
        for place in range(digits - 1, -1, -1):
            size = 10**place
            cells = (str(n // size % 10) if n % size == 0 and n >= size else " " for n in columns)
            if place == 0:
                cells = (str(n % 10) for n in columns)
            line = "".join(f"{cell:<{width}}" for cell in cells)
            aside = " looks most at" if place == 0 else ""
            yield Text(f"{'':{digits + 1 + LABEL + 1}}{line}{'':{GAP - 1}}{aside}", style=QUIET)

    def _row(self, position: int, columns: range, digits: int, width: int, strokes: Strokes) -> Text:
        """A token, how much it looks at each of the columns, and whom it looks at most."""
        strongest, row = self.strongest(position), self.weights[position]
        texts = [fitted(self.label(n, strokes.space), strokes.more) for n in (position, strongest)]
        line = Text(f"{position:>{digits}} {texts[0]} ")
        for n in columns:
            if n > position:
                line.append(" " * width)
            else:
                line.append(shade(row[n], strokes.shades) * width, STRONGEST if n == strongest else COLOUR)
        line.append(f"{'':{GAP}}{strongest:>{digits}} {texts[1]} {row[strongest]:.2f}")
        return line


def shade(share: float, shades: str) -> str:
    """The character for a share: one darker from each of BOUNDS on."""
    return shades[sum(share >= bound for bound in BOUNDS)]


def legend(strokes: Strokes) -> Iterator[str]:
    """What is what, for those who read."""
    bounds = "  ".join(f"{character} {bound:.0%}" for character, bound in zip(strokes.shades[1:], BOUNDS, strict=True))
    yield "A row is a token, a column whom it looks at: itself or an earlier one."
    yield f"Share of its look: {strokes.shades[0]} less  {bounds} or more"


def fitted(text: str, more: str) -> str:
    """`text` in exactly LABEL terminal cells, of a longer one its beginning and `more`."""
    cut = text if cell_len(text) <= LABEL else head(text, LABEL - 1) + more
    return cut + " " * (LABEL - cell_len(cut))
