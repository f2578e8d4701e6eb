"""A run at one moment, as lines of styled text: what the step computes, the timeline, the pool, the answers.

Much shortened, it looks like this:

    step 8 · chunked · 8/12 tokens · 2 running, 1 waiting · 6/8 blocks held
    batch ABBBBBBB····                  a cell a token of the step's budget
    3 rows   0                          a cell a step
    A one    ▇•••••••••
    B two     ··█▆•✗··▅
    C three         ···
    pool   A  A  A  B  B  AB  ○  ·      a tile a block
    A decode   the end of its text so far
    what happened in the step
    what the glyphs mean
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from minillm.trace import StepRecord, sequence_name
from minillm.view.look import COLOURS, OWNED, QUIET, SHARED, UNICODE, Look, owner_style
from minillm.view.shown import fold, head, shown, tail
from minillm.view.timeline import HISTORY, Row, State, Timeline

LABEL = 6  # cells of "batch ", "pool  "
TILE = 3  # cells of a block in the pool, where there is room
MOST_ANSWER_LINES = 3
GAPS = 4  # empty lines between the sections, if there is room


def frame(timeline: Timeline, width: int, height: int, look: Look = UNICODE, hint: str = "") -> list[Text]:
    """The newest step and those before it: at most `height` lines of at most `width` cells.

    Parameters
    ----------
    timeline : holds at least one step.
    hint : what keys do, for the last line.
    """
    record = timeline.record
    top = [_header(timeline, width, look), _batch(timeline, width, look)]
    most_pool_lines = max(1, height // 8)
    tile = _tile_width(record.pool.num_blocks, width, most_pool_lines)
    pool = _pool(timeline, width, most_pool_lines, tile, look)
    events = _events(timeline, width, look, most_lines=1 if height < 30 else 2)
    bottom = events + _legend(width, tile, look, hint)
    room = height - len(top) - len(pool) - len(bottom) - 1  # for rows and answers; the 1 is the ruler
    rows = _chosen(timeline, max(1, room // 2))
    answers = max(1, len(rows))
    lines_each = max(1, min(MOST_ANSWER_LINES, (room - answers - GAPS) // answers))
    sections = [top, _grid(timeline, rows, width, look), pool, _answers(rows, record.step, width, lines_each), bottom]
    spare = height - sum(map(len, sections))
    lines: list[Text] = []
    for number, section in enumerate(sections):
        lines += [Text()] * (number > 0 and number <= spare) + section
    for line in lines:
        line.no_wrap = True
        line.truncate(width, overflow="crop")
    return lines[:height]


def _header(timeline: Timeline, width: int, look: Look) -> Text:
    record, facts = timeline.record, timeline.facts
    pool = record.pool
    items = [
        f"step {record.step}",
        shown(facts.policy),
        f"{record.num_tokens}/{facts.max_batch_tokens} tokens",
        f"{len(record.running)} running, {record.num_waiting} waiting",
        f"{pool.num_held}/{pool.num_blocks} blocks held",
        f"{sum(record.milliseconds.values()):.1f} ms",
        shown(facts.model),
    ]
    return _fitting([Text(item, "bold") for item in items], width, look.divider)


def _batch(timeline: Timeline, width: int, look: Look) -> Text:
    """The step's tokens, chunk after chunk, as they lie in the batch; what is left of the budget stays empty."""
    record, budget = timeline.record, max(1, timeline.facts.max_batch_tokens)
    scale = min(1.0, (width - LABEL) / budget)
    line, used = Text("batch "), 0
    for chunk in record.chunks:
        row = timeline.rows.get(sequence_name(chunk.request_id, chunk.completion))
        cells = max(1, round(chunk.num_tokens * scale))
        line.append((row.letter if row else "?") * cells, owner_style(row) if row else SHARED)
        used += cells
    line.append(look.free * max(0, int(budget * scale) - used), QUIET)
    return line


# --- the timeline -------------------------------------------------------------------------------------------------


def _chosen(timeline: Timeline, most: int) -> list[Row]:
    """As many rows as there is room for: who runs, then who waits, then who ended last; in order of arrival."""
    step = timeline.record.step

    def rank(numbered: tuple[int, Row]) -> tuple[int, int]:
        number, row = numbered
        cell = row.cell(step)
        if row.until is not None:
            return (0, number) if row.until == step else (2, -row.until)
        return (1 if cell is None or cell.state == State.WAITING else 0, number)

    numbered = sorted(enumerate(timeline.rows.values()), key=rank)[:most]
    return [row for _, row in sorted(numbered, key=lambda item: item[0])]


def _grid(timeline: Timeline, rows: Sequence[Row], width: int, look: Look) -> list[Text]:
    """The ruler, then a line a row, a cell a step; the newest steps, if not all find room."""
    step = timeline.record.step
    names = max((min(cell_len(shown(row.name)), max(4, width // 8)) for row in rows), default=0)
    progress = [f"{row.num_answered}/{row.max_tokens if row.max_tokens is not None else '?'}" for row in rows]
    digits = max(map(len, progress), default=0)
    label = max(2 + names + 1 + digits + 1, 8)
    columns = max(1, min(width - label, HISTORY))
    steps = range(max(timeline.first, step - columns + 1), step + 1)
    count = len(timeline.rows)
    rows_said = f"{count} row{'s' * (count != 1)}" if len(rows) == count else f"{len(rows)} of {count}"
    lines = [Text(head(rows_said, label - 1).ljust(label) + _ruler(steps, columns), QUIET)]
    for row, said in zip(rows, progress, strict=True):
        name = head(shown(row.name), names)
        line = Text.assemble((row.letter, owner_style(row)), " ", name, " " * (names - cell_len(name) + 1))
        line.append(said.rjust(digits) + " ", QUIET)
        for number in steps:
            line.append(*look.cell(row.cell(number), timeline.facts.max_batch_tokens))
        lines.append(line)
    return lines


def _ruler(steps: range, columns: int) -> str:
    """Every tenth step's number, its first digit above that step."""
    line = ""
    for column, step in enumerate(steps):
        if step % 10 == 0 and len(line) <= column and column + len(str(step)) <= columns:
            line = line.ljust(column) + str(step) + " "
    return line


# --- the pool -----------------------------------------------------------------------------------------------------


def _tile_width(blocks: int, width: int, most_lines: int) -> int:
    """Cells of a block's tile: as wide as finds room."""
    return TILE if blocks <= most_lines * ((width - LABEL) // TILE) else 1


def _pool(timeline: Timeline, width: int, most_lines: int, tile: int, look: Look) -> list[Text]:
    """A tile a block: the letter of who holds it, two letters or a number where it is shared."""
    blocks = timeline.record.pool.num_blocks
    a_line = max(1, (width - LABEL) // tile)
    owners, states = timeline.owners(), timeline.record.pool.states()
    lines = []
    for start in range(0, blocks, a_line):
        line = Text("pool  " if start == 0 else " " * LABEL)
        for block in range(start, min(start + a_line, blocks)):
            line.append(*_tile(states[block], owners.get(block, []), tile, look))
        lines.append(line)
    if len(lines) > most_lines:
        left_out = blocks - (most_lines - 1) * a_line
        lines[most_lines - 1 :] = [Text(f"{'':{LABEL}}{look.more} {left_out} more blocks", QUIET)]
    return lines


def _tile(state: str, owners: Sequence[Row], width: int, look: Look) -> tuple[str, str]:
    """Text and style of a block."""
    if state != "held" or not owners:
        glyph = {"cached": look.cached, "free": look.free}.get(state, "?")
        return glyph.center(width), QUIET if state == "free" else ""
    if len(owners) == 1:
        return owners[0].letter.center(width), owner_style(owners[0])
    if width == 1:
        return (str(len(owners)) if len(owners) < 10 else "+"), SHARED
    if len(owners) == 2:
        return f"{owners[0].letter}{owners[1].letter}".center(width), SHARED
    return f"{owners[0].letter}+{min(9, len(owners) - 1)}", SHARED


# --- the answers --------------------------------------------------------------------------------------------------


def _answers(rows: Sequence[Row], step: int, width: int, lines_each: int) -> list[Text]:
    """For each row its state in words, and the end of its text: the prompt faint, what the step has brought bold."""
    lines = []
    for row in rows:
        cell = row.cell(step)
        word = head(shown(row.reason or (cell.state if cell else "")), 10)
        label = Text.assemble((row.letter, owner_style(row)), " ", (word.ljust(11), QUIET))
        text = Text.assemble((row.prompt or f"({row.num_prompt_tokens} prompt tokens)", QUIET))
        text.append(row.answer[: len(row.answer) - row.fresh])
        text.append(row.answer[len(row.answer) - row.fresh :], "bold underline")
        pieces = _last_lines(text.plain, max(2, width - label.cell_len), lines_each)
        for number in range(lines_each):
            line = label.copy() if number == 0 else Text(" " * label.cell_len)
            lines.append(line.append_text(text[pieces[number]]) if number < len(pieces) else line)
    return lines


def _last_lines(text: str, width: int, most: int) -> list[slice]:
    """The end of `text` in at most so many lines. One slides; several are turned over only when the last is full."""
    return [tail(text, width)] if most == 1 else fold(text, width)[-most:]


# --- words --------------------------------------------------------------------------------------------------------


def _events(timeline: Timeline, width: int, look: Look, most_lines: int) -> list[Text]:
    """What happened in the step, apart from computing."""
    words = look.divider.join(_happened(timeline, timeline.record))
    pieces = fold(words, width)
    lines = [Text(words[piece].strip()) for piece in pieces[:most_lines]]
    if len(pieces) > most_lines:
        lines[-1] = Text(head(lines[-1].plain, width - 1) + look.more)
    return lines


def _happened(timeline: Timeline, record: StepRecord) -> Iterable[str]:
    def letter(part: Any) -> str:
        row = timeline.rows.get(sequence_name(part.request_id, part.completion))
        return row.letter if row else "?"

    for arrival in record.arrived:
        row = timeline.rows.get(arrival.request_id)
        yield f"{row.letter if row else '?'} arrived with {arrival.num_prompt_tokens} tokens"
    for admission in record.admitted:
        found = f", {admission.num_cached_tokens} tokens cached" if admission.num_cached_tokens else ""
        yield f"{letter(admission)} {'readmitted' if admission.after_preemption else 'admitted'}{found}"
    for preemption in record.preempted:
        yield f"{letter(preemption)} preempted, {preemption.num_computed} tokens computed"
    for finish in record.finished:
        yield f"{letter(finish)} ended: {shown(finish.error or finish.reason)}"
    for copy in record.pool.copies:
        yield f"block {copy.source} copied to {copy.target}"
    if record.pool.evicted:
        yield f"evicted block {', '.join(map(str, record.pool.evicted))}"
    if not record.chunks:
        yield "nothing to do"


def _legend(width: int, tile: int, look: Look, hint: str) -> list[Text]:
    """What the glyphs mean, as far as there is room, and what keys do."""
    states = [_item(look.states[state][-1], COLOURS[state], state) for state in State]
    blocks = [
        _item("A", OWNED, "held"),
        _item("AB" if tile > 1 else "2", SHARED, "shared"),
        _item(look.cached, "", "cached"),
        _item(look.free, QUIET, "free"),
    ]
    return [_fitting(items, width, "  ") for items in (states, [Text(hint), *blocks] if hint else blocks)]


def _item(glyph: str, style: str, meaning: str) -> Text:
    return Text.assemble((glyph, style), (f" {meaning}", QUIET))


def _fitting(items: Sequence[Text], width: int, divider: str) -> Text:
    """The items up to the first that finds no room; of the very first as much as there is room for."""
    line = items[0].copy()
    for item in items[1:]:
        if line.cell_len + cell_len(divider) + item.cell_len > width:
            break
        line.append(divider, QUIET).append_text(item)
    return line
