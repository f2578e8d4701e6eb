"""Look: glyphs and colours. Everything is told apart by its glyph as well as by its colour, and no pair of colours that
stand for different things is one that colour-blind people mix up.

States have the colours of Okabe and Ito (2008, Color Universal Design), owners of blocks those of Tol's "light" scheme
(Tol 2021, SRON/EPS/TN/09-002), made to lie behind black letters.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from minillm.view.timeline import LETTERS, Cell, Row, State

COLOURS = {
    State.WAITING: "bright_black",
    State.PREFILL: "#e69f00",
    State.RECOMPUTE: "#cc79a7",
    State.DECODE: "#56b4e9",
    State.HELD_UP: "bright_black",
    State.PREEMPTED: "bold #d55e00",
    State.FINISHED: "bold #009e73",
    State.ENDED: "bold #d55e00",
}
OWNERS = ("#77aadd", "#ee8866", "#eedd88", "#ffaabb", "#99ddff", "#44bb99", "#bbcc33", "#aaaa00")
OWNED = f"black on {OWNERS[0]}"  # whoever it is
SHARED = "bold black on #dddddd"
QUIET = "bright_black"


@dataclass(frozen=True)
class Look:
    """What is drawn for what: one terminal cell each.

    Attributes
    ----------
    states : a glyph for each state; for a prefill several, for ever larger shares of the step's budget.
    cached, free : blocks that nobody holds.
    more : stands where something was left out.
    divider : stands between the items of a line.
    """

    states: dict[State, str]
    cached: str
    free: str
    more: str
    divider: str

    def cell(self, cell: Cell | None, budget: int) -> tuple[str, str]:
        """Glyph and style of a cell, in a run whose steps compute at most `budget` tokens."""
        if cell is None:
            return " ", ""
        glyphs = self.states[cell.state]
        height = ceil(len(glyphs) * cell.num_tokens / max(1, budget))
        return glyphs[min(max(1, height), len(glyphs)) - 1], COLOURS[cell.state]


UNICODE = Look(
    states={
        State.WAITING: "·",
        State.PREFILL: "▁▂▃▄▅▆▇█",
        State.RECOMPUTE: "▒",
        State.DECODE: "•",
        State.HELD_UP: "─",
        State.PREEMPTED: "✗",
        State.FINISHED: "✓",
        State.ENDED: "!",
    },
    cached="○",
    free="·",
    more="…",
    divider=" · ",
)
ASCII = Look(
    states={
        State.WAITING: ".",
        State.PREFILL: "#",
        State.RECOMPUTE: "%",
        State.DECODE: "*",
        State.HELD_UP: "-",
        State.PREEMPTED: "x",
        State.FINISHED: "=",
        State.ENDED: "!",
    },
    cached="o",
    free=".",
    more="~",
    divider=", ",
)


def owner_style(row: Row) -> str:
    """The colour of what belongs to a sequence."""
    return f"black on {OWNERS[LETTERS.index(row.letter) % len(OWNERS)]}"
