"""Glyphs and colours of the views. Everything that differs in colour also differs in its glyph.

Colours with different meanings are distinguishable with colour blindness. States use the palette of Okabe and Ito
(2008, Color Universal Design). Owners of blocks use the "light" scheme of Tol (2021, SRON/EPS/TN/09-002), which is made
for backgrounds behind black text.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from minillm.view.timeline import LETTERS, Cell, State, Track

STATE_STYLES = {
    State.WAITING: "bright_black",
    State.PREFILL: "#e69f00",
    State.RECOMPUTE: "#cc79a7",
    State.DECODE: "#56b4e9",
    State.STALLED: "bright_black",
    State.PREEMPTED: "bold #d55e00",
    State.FINISHED: "bold #009e73",
    State.ENDED_EARLY: "bold #d55e00",
}
OWNER_COLOURS = ("#77aadd", "#ee8866", "#eedd88", "#ffaabb", "#99ddff", "#44bb99", "#bbcc33", "#aaaa00")
HELD = f"black on {OWNER_COLOURS[0]}"  # a held block in the legend, where the owner does not matter
SHARED = "bold black on #dddddd"
DIM = "bright_black"


@dataclass(frozen=True)
class Glyphs:
    """The characters that the terminal view draws with. Each takes one terminal cell.

    Attributes
    ----------
    states : the glyphs of each state. A prefill has several, for increasing shares of the step's token budget.
    cached, free : blocks that no sequence holds.
    ellipsis : marks an omission.
    divider : separates the items of a line; it may take several cells.
    """

    states: dict[State, str]
    cached: str
    free: str
    ellipsis: str
    divider: str

    def cell(self, cell: Cell | None, budget: int) -> tuple[str, str]:
        """Return the glyph and the style of a cell, in a run whose steps compute at most `budget` tokens."""
        if cell is None:
            return " ", ""
        glyphs = self.states[cell.state]
        height = ceil(len(glyphs) * cell.num_tokens / max(1, budget))
        return glyphs[min(max(1, height), len(glyphs)) - 1], STATE_STYLES[cell.state]


UNICODE = Glyphs(
    states={
        State.WAITING: "·",
        State.PREFILL: "▁▂▃▄▅▆▇█",
        State.RECOMPUTE: "▒",
        State.DECODE: "•",
        State.STALLED: "─",
        State.PREEMPTED: "✗",
        State.FINISHED: "✓",
        State.ENDED_EARLY: "!",
    },
    cached="○",
    free="·",
    ellipsis="…",
    divider=" · ",
)
ASCII = Glyphs(
    states={
        State.WAITING: ".",
        State.PREFILL: "#",
        State.RECOMPUTE: "%",
        State.DECODE: "*",
        State.STALLED: "-",
        State.PREEMPTED: "x",
        State.FINISHED: "=",
        State.ENDED_EARLY: "!",
    },
    cached="o",
    free=".",
    ellipsis="~",
    divider=", ",
)


def owner_style(track: Track) -> str:
    """Return the style of blocks, tokens and letters that belong to a sequence."""
    return f"black on {OWNER_COLOURS[LETTERS.index(track.letter) % len(OWNER_COLOURS)]}"
