"""HeatMap: the attention weights of one head in a terminal, one row per token. `heatpage.py` makes an HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.text import Text

from minillm.view.glyphs import DIM
from minillm.view.printable import head, printable

BOUNDS = (0.05, 0.2, 0.4, 0.7)  # weights from which a cell is drawn one shade darker
COLOUR, STRONGEST = "#56b4e9", "bold #e69f00"  # from Okabe and Ito; the second marks the largest weight of each row
LABEL = 10  # terminal cells for a token's text
GAP = 2  # terminal cells between the map and the column to its right


@dataclass(frozen=True)
class Shades:
    """The characters of a map: one per shade, one for a space within a token, and one for an omission."""

    levels: str
    space: str
    ellipsis: str


UNICODE, ASCII = Shades("·░▒▓█", "␣", "…"), Shades(".:o%#", "_", "~")


@dataclass(frozen=True)
class HeatMap:
    """The attention weights of one head between the tokens of a text. A rich Console prints it at its full width.

    Attributes
    ----------
    texts : the texts of the T tokens. Characters that control a terminal are replaced when they are shown.
    weights : [T, T]; row t holds a weight from 0 to 1 for each position. Positions after t are ignored.
    title : a line above the map.

    Raises
    ------
    ValueError
        The weights are not T rows of T numbers.
    """

    texts: Sequence[str]
    weights: Sequence[Sequence[float]]
    title: str = ""

    def __post_init__(self) -> None:
        sizes = {len(self.weights), *map(len, self.weights)}
        if sizes - {len(self.texts)}:
            raise ValueError(
                f"expected weights of shape [{len(self.texts)}, {len(self.texts)}] for {len(self.texts)} tokens, "
                f"got {len(self.weights)} rows of {max(sizes)}"
            )

    def label(self, position: int, space: str = UNICODE.space) -> str:
        """Return a token's text in printable characters, with visible spaces."""
        return printable(self.texts[position]).replace(" ", space)

    def strongest(self, position: int) -> int:
        """Return the position that a token attends to most; the first one if there is a tie."""
        row = self.weights[position]
        return max(range(position + 1), key=lambda other: (row[other], -other))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        shades = ASCII if options.ascii_only else UNICODE
        digits = len(str(len(self.texts) - 1))
        margins = 2 * (digits + 1 + LABEL) + 1 + GAP + len(" 0.00")
        room = max(8, options.max_width - margins)
        width = 2 if 2 * len(self.texts) <= room else 1
        lines = [Text(printable(self.title)), *(Text(line, style=DIM) for line in legend(shades))]
        for first in range(0, len(self.texts), room // width):
            columns = range(first, min(first + room // width, len(self.texts)))
            lines += [Text(), *self._column_numbers(columns, digits, width)]
            lines += [self._row(t, columns, digits, width, shades) for t in range(first, len(self.texts))]
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
            yield line

    def _column_numbers(self, columns: range, digits: int, width: int) -> Iterator[Text]:
        """Write the numbers of the columns, one line per digit. Tens and hundreds appear only where they change."""
        for digit in range(digits - 1, -1, -1):
            size = 10**digit
            cells = [str(n // size % 10) if n % size == 0 and n >= size else " " for n in columns]
            if digit == 0:
                cells = [str(n % 10) for n in columns]
            line = "".join(f"{cell:<{width}}" for cell in cells)
            heading = " attends most to" if digit == 0 else ""
            yield Text(f"{'':{digits + 1 + LABEL + 1}}{line}{'':{GAP - 1}}{heading}", style=DIM)

    def _row(self, position: int, columns: range, digits: int, width: int, shades: Shades) -> Text:
        """Draw a token, its weights for the columns, and the token that it attends to most."""
        strongest, row = self.strongest(position), self.weights[position]
        texts = [padded(self.label(n, shades.space), shades.ellipsis) for n in (position, strongest)]
        line = Text(f"{position:>{digits}} {texts[0]} ")
        for n in columns:
            if n > position:
                line.append(" " * width)
            else:
                line.append(shade(row[n], shades.levels) * width, STRONGEST if n == strongest else COLOUR)
        line.append(f"{'':{GAP}}{strongest:>{digits}} {texts[1]} {row[strongest]:.2f}")
        return line


def shade(weight: float, levels: str) -> str:
    """Return the character for a weight: one level darker from each of BOUNDS."""
    return levels[sum(weight >= bound for bound in BOUNDS)]


def legend(shades: Shades) -> Iterator[str]:
    """Return the two lines that explain the map."""
    bounds = "  ".join(f"{character} {bound:.0%}" for character, bound in zip(shades.levels[1:], BOUNDS, strict=True))
    yield "Each row is a token. Its columns are the tokens up to and including itself."
    yield f"Attention weight: {shades.levels[0]} less  {bounds} or more"


def padded(text: str, ellipsis: str) -> str:
    """Return `text` in exactly LABEL terminal cells, cut and marked with `ellipsis` if it is longer."""
    cut = text if cell_len(text) <= LABEL else head(text, LABEL - 1) + ellipsis
    return cut + " " * (LABEL - cell_len(cut))
