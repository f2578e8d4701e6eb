"""One step of a run as lines of styled text: the batch, the timeline, the block pool and the answers.

Shortened, a frame looks like this:

    step 8 · chunked · 8/12 tokens · 2 running, 1 waiting · 6/8 blocks held
    batch ABBBBBBB····                  one cell per token of the step's budget
    3 seqs   0                          one cell per step
    A one    ▇•••••••••
    B two     ··█▆•✗··▅
    C three         ···
    pool   A  A  A  B  B  AB  ○  ·      one tile per block
    A decode   the end of its text so far
    the events of the step
    the legend
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.text import Text

from minillm.trace import StepRecord
from minillm.view.glyphs import DIM, HELD, SHARED, STATE_STYLES, UNICODE, Glyphs, owner_style
from minillm.view.printable import head, printable, tail, wrap
from minillm.view.timeline import MAX_CELLS, State, Timeline, Track

LABEL = 6  # terminal cells of "batch " and "pool  "
TILE = 3  # terminal cells per block of the pool, if there is room
MAX_ANSWER_LINES = 3
NUM_GAPS = 4  # empty lines between the sections, if there is room


def frame(timeline: Timeline, width: int, height: int, glyphs: Glyphs = UNICODE, hint: str = "") -> list[Text]:
    """Return the newest step and its predecessors as at most `height` lines of at most `width` terminal cells.

    Parameters
    ----------
    timeline : must hold at least one step.
    hint : description of the keys, for the last line.

    Raises
    ------
    ValueError
        The timeline is empty.
    """
    record = timeline.record
    if record is None:
        raise ValueError("the timeline is empty: push a record before drawing it")
    top = [_header(timeline, record, width, glyphs), _batch(timeline, record, width, glyphs)]
    max_pool_lines = max(1, height // 8)
    tile_width = _tile_width(record.pool.num_blocks, width, max_pool_lines)
    pool = _pool(timeline, record, width, max_pool_lines, tile_width, glyphs)
    events = _events(timeline, record, width, glyphs, max_lines=1 if height < 30 else 2)
    bottom = events + _legend(width, tile_width, glyphs, hint)
    room = height - len(top) - len(pool) - len(bottom) - 1  # for tracks and answers; the 1 is the ruler
    tracks = _visible_tracks(timeline, record.step, max(1, room // 2))
    num_answers = max(1, len(tracks))
    lines_per_answer = max(1, min(MAX_ANSWER_LINES, (room - num_answers - NUM_GAPS) // num_answers))
    answers = _answers(tracks, record.step, width, lines_per_answer)
    sections = [top, _track_lines(timeline, record.step, tracks, width, glyphs), pool, answers, bottom]
    spare = height - sum(map(len, sections))
    lines: list[Text] = []
    for number, section in enumerate(sections):
        lines += [Text()] * (number > 0 and number <= spare) + section
    for line in lines:
        line.no_wrap = True
        line.truncate(width, overflow="crop")
    return lines[:height]


def _header(timeline: Timeline, record: StepRecord, width: int, glyphs: Glyphs) -> Text:
    facts, pool = timeline.facts, record.pool
    items = [
        f"step {record.step}",
        printable(facts.policy),
        f"{record.num_tokens}/{facts.max_batch_tokens} tokens",
        f"{len(record.running)} running, {record.num_waiting} waiting",
        f"{pool.num_held}/{pool.num_blocks} blocks held",
        f"{sum(record.milliseconds.values()):.1f} ms",
        printable(facts.model),
    ]
    return _joined([Text(item, "bold") for item in items], width, glyphs.divider)


def _batch(timeline: Timeline, record: StepRecord, width: int, glyphs: Glyphs) -> Text:
    """Draw the step's tokens, chunk after chunk, in the order of the batch. The unused budget stays empty."""
    budget = max(1, timeline.facts.max_batch_tokens)
    scale = min(1.0, (width - LABEL) / budget)
    line, used = Text("batch "), 0
    for chunk in record.chunks:
        track = timeline.tracks.get(chunk.name)
        cells = max(1, round(chunk.num_tokens * scale))
        line.append((track.letter if track else "?") * cells, owner_style(track) if track else SHARED)
        used += cells
    line.append(glyphs.free * max(0, int(budget * scale) - used), DIM)
    return line


# --- the timeline -------------------------------------------------------------------------------------------------


def _visible_tracks(timeline: Timeline, step: int, max_tracks: int) -> list[Track]:
    """Return at most `max_tracks` tracks in order of arrival.

    Sequences that run or end in this step come first, then waiting ones, then the last finished ones.
    """

    def rank(numbered: tuple[int, Track]) -> tuple[int, int]:
        number, track = numbered
        cell = track.cell(step)
        if track.end_step is not None:
            return (0, number) if track.end_step == step else (2, -track.end_step)
        return (1 if cell is None or cell.state == State.WAITING else 0, number)

    numbered = sorted(enumerate(timeline.tracks.values()), key=rank)[:max_tracks]
    return [track for _, track in sorted(numbered, key=lambda item: item[0])]


def _track_lines(timeline: Timeline, step: int, tracks: Sequence[Track], width: int, glyphs: Glyphs) -> list[Text]:
    """Draw the ruler, then one line per track with one cell per step. The newest steps are shown if not all fit."""
    name_width = max((min(cell_len(printable(track.name)), max(4, width // 8)) for track in tracks), default=0)
    progress = [f"{track.num_generated}/{'?' if track.max_tokens is None else track.max_tokens}" for track in tracks]
    digits = max(map(len, progress), default=0)
    label_width = max(2 + name_width + 1 + digits + 1, 8)
    columns = max(1, min(width - label_width, MAX_CELLS))
    steps = range(max(timeline.first_step, step - columns + 1), step + 1)
    count = len(timeline.tracks)
    heading = f"{count} seq{'s' * (count != 1)}" if len(tracks) == count else f"{len(tracks)} of {count}"
    lines = [Text(head(heading, label_width - 1).ljust(label_width) + _ruler(steps, columns), DIM)]
    for track, tokens in zip(tracks, progress, strict=True):
        name = head(printable(track.name), name_width)
        padding = " " * (name_width - cell_len(name) + 1)
        line = Text.assemble((track.letter, owner_style(track)), " ", name, padding)
        line.append(tokens.rjust(digits) + " ", DIM)
        for number in steps:
            line.append(*glyphs.cell(track.cell(number), timeline.facts.max_batch_tokens))
        lines.append(line)
    return lines


def _ruler(steps: range, columns: int) -> str:
    """Write the number of every tenth step, with its first digit above that step."""
    line = ""
    for column, step in enumerate(steps):
        if step % 10 == 0 and len(line) <= column and column + len(str(step)) <= columns:
            line = line.ljust(column) + str(step) + " "
    return line


# --- the pool -----------------------------------------------------------------------------------------------------


def _tile_width(num_blocks: int, width: int, max_lines: int) -> int:
    """Return the terminal cells per block: TILE if all blocks then fit, else 1."""
    return TILE if num_blocks <= max_lines * ((width - LABEL) // TILE) else 1


def _pool(
    timeline: Timeline, record: StepRecord, width: int, max_lines: int, tile_width: int, glyphs: Glyphs
) -> list[Text]:
    """Draw one tile per block: its owner's letter, or two letters or a number where it is shared."""
    num_blocks = record.pool.num_blocks
    per_line = max(1, (width - LABEL) // tile_width)
    owners, states = timeline.block_owners(), record.pool.states()
    lines: list[Text] = []
    for start in range(0, num_blocks, per_line):
        line = Text("pool  " if start == 0 else " " * LABEL)
        for block in range(start, min(start + per_line, num_blocks)):
            line.append(*_tile(states[block], owners.get(block, []), tile_width, glyphs))
        lines.append(line)
    if len(lines) > max_lines:
        num_hidden = num_blocks - (max_lines - 1) * per_line
        lines[max_lines - 1 :] = [Text(f"{'':{LABEL}}{glyphs.ellipsis} {num_hidden} more blocks", DIM)]
    return lines


def _tile(state: str, owners: Sequence[Track], width: int, glyphs: Glyphs) -> tuple[str, str]:
    """Return the text and the style of a block."""
    if state != "held" or not owners:
        glyph = {"cached": glyphs.cached, "free": glyphs.free}.get(state, "?")
        return glyph.center(width), DIM if state == "free" else ""
    if len(owners) == 1:
        return owners[0].letter.center(width), owner_style(owners[0])
    if width == 1:
        return (str(len(owners)) if len(owners) < 10 else "+"), SHARED
    if len(owners) == 2:
        return f"{owners[0].letter}{owners[1].letter}".center(width), SHARED
    return f"{owners[0].letter}+{min(9, len(owners) - 1)}", SHARED


# --- the answers --------------------------------------------------------------------------------------------------


def _answers(tracks: Sequence[Track], step: int, width: int, lines_each: int) -> list[Text]:
    """Draw each track's state in words and the end of its text: the prompt dim, the text of this step bold."""
    lines: list[Text] = []
    for track in tracks:
        cell = track.cell(step)
        state = head(printable(track.finish_reason or (cell.state if cell else "")), 10)
        label = Text.assemble((track.letter, owner_style(track)), " ", (state.ljust(11), DIM))
        text = Text.assemble((track.prompt or f"({track.num_prompt_tokens} prompt tokens)", DIM))
        num_old = len(track.answer) - track.num_new_characters
        text.append(track.answer[:num_old])
        text.append(track.answer[num_old:], "bold underline")
        pieces = _last_lines(text.plain, max(2, width - label.cell_len), lines_each)
        for number in range(lines_each):
            line = label.copy() if number == 0 else Text(" " * label.cell_len)
            lines.append(line.append_text(text[pieces[number]]) if number < len(pieces) else line)
    return lines


def _last_lines(text: str, width: int, max_lines: int) -> list[slice]:
    """Return the end of `text` as slices of at most `max_lines` lines.

    A single line scrolls by characters. Several lines scroll by a line when the last one is full.
    """
    return [tail(text, width)] if max_lines == 1 else wrap(text, width)[-max_lines:]


# --- events and legend --------------------------------------------------------------------------------------------


def _events(timeline: Timeline, record: StepRecord, width: int, glyphs: Glyphs, max_lines: int) -> list[Text]:
    """Describe the step's events in at most `max_lines` lines."""
    text = glyphs.divider.join(_event_texts(timeline, record))
    pieces = wrap(text, width)
    lines = [Text(text[piece].strip()) for piece in pieces[:max_lines]]
    if len(pieces) > max_lines:
        lines[-1] = Text(head(lines[-1].plain, width - 1) + glyphs.ellipsis)
    return lines


def _event_texts(timeline: Timeline, record: StepRecord) -> Iterable[str]:
    def letter(name: str) -> str:
        track = timeline.tracks.get(name)
        return track.letter if track else "?"

    for arrival in record.arrived:
        yield f"{letter(arrival.request_id)} arrived with {arrival.num_prompt_tokens} tokens"
    for admission in record.admitted:
        cached = f", {admission.num_cached_tokens} tokens cached" if admission.num_cached_tokens else ""
        verb = "readmitted" if admission.after_preemption else "admitted"
        yield f"{letter(admission.name)} {verb}{cached}"
    for preemption in record.preempted:
        yield f"{letter(preemption.name)} preempted, {preemption.num_computed} tokens computed"
    for finish in record.finished:
        yield f"{letter(finish.name)} ended: {printable(finish.error or finish.reason)}"
    for copy in record.pool.copies:
        yield f"block {copy.source} copied to {copy.target}"
    if record.pool.evicted:
        yield f"evicted block {', '.join(map(str, record.pool.evicted))}"
    if not record.chunks:
        yield "nothing scheduled"


def _legend(width: int, tile_width: int, glyphs: Glyphs, hint: str) -> list[Text]:
    """Explain the glyphs, as far as there is room, and the keys."""
    states = [_legend_item(glyphs.states[state][-1], STATE_STYLES[state], state) for state in State]
    blocks = [
        _legend_item("A", HELD, "held"),
        _legend_item("AB" if tile_width > 1 else "2", SHARED, "shared"),
        _legend_item(glyphs.cached, "", "cached"),
        _legend_item(glyphs.free, DIM, "free"),
    ]
    return [_joined(items, width, "  ") for items in (states, [Text(hint), *blocks] if hint else blocks)]


def _legend_item(glyph: str, style: str, meaning: str) -> Text:
    return Text.assemble((glyph, style), (f" {meaning}", DIM))


def _joined(items: Sequence[Text], width: int, divider: str) -> Text:
    """Join the items up to the first one that does not fit. The first item is always included."""
    line = items[0].copy()
    for item in items[1:]:
        if line.cell_len + cell_len(divider) + item.cell_len > width:
            break
        line.append(divider, DIM).append_text(item)
    return line
