// TimelineView: a lane a sequence, a cell a step.

const LANE = 18;
const RULER = 18;

class TimelineView {
  // scroller: what scrolls the lanes up and down; it holds a spacer as high as all of them, and the canvas.
  constructor(panel, scroller) {
    this.panel = panel;
    this.scroller = scroller;
    this.spacer = scroller.querySelector(".spacer");
    this.canvas = scroller.querySelector("canvas");
    this.layer = new Layer();
    this.spacer.style.height = `${panel.run.rows.length * LANE + RULER}px`;
    scroller.addEventListener("scroll", () => panel.changed());
    this.canvas.addEventListener("click", (event) => this.choose(event));
    this.canvas.addEventListener("pointermove", (event) => this.explain(event));
    this.canvas.addEventListener("pointerleave", () => panel.explain(""));
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const lane = Math.floor((event.clientY - box.top - RULER + this.scroller.scrollTop) / LANE);
    const x = event.clientX - box.left - this.panel.gutter;
    return { row: this.panel.run.rows[lane] || null, index: x >= 0 ? this.panel.axis.indexAt(x) : null };
  }

  choose(event) {
    const { row, index } = this.at(event);
    if (row) this.panel.follow(row);
    if (index !== null) this.panel.clock.show(this.panel.run, index);
  }

  explain(event) {
    const { row, index } = this.at(event);
    const cell = row && index !== null && this.panel.run.cell(row, index);
    const computed = cell && cell.tokens ? `, ${count(cell.tokens, "token")}` : "";
    const step = this.panel.run.data.first + index;
    this.panel.explain(cell ? `${row.name}, step ${step}: ${cell.state}${computed}` : row ? row.name : "");
  }

  // Scroll so that a row's lane is to be seen.
  reveal(row) {
    const top = row.number * LANE;
    const room = this.scroller.clientHeight - RULER;
    if (top < this.scroller.scrollTop) this.scroller.scrollTop = top;
    else if (top + LANE > this.scroller.scrollTop + room) this.scroller.scrollTop = top + LANE - room;
  }

  // If nobody's lane is to be seen who runs, scroll so that the first of them is at the top.
  revealRunning(record) {
    const rows = record.running.map((part) => this.panel.run.rowOf(part.who, record.index)).filter(Boolean);
    const top = this.scroller.scrollTop;
    const bottom = top + this.scroller.clientHeight - RULER;
    const isSeen = (row) => row.number * LANE >= top && (row.number + 1) * LANE <= bottom;
    if (rows.length && !rows.some(isSeen)) this.scroller.scrollTop = rows[0].number * LANE;
  }

  draw(index) {
    const { panel, canvas, scroller } = this;
    const { theme, axis, gutter, followed } = panel;
    const width = panel.width;
    const height = scroller.clientHeight;
    const top = scroller.scrollTop;
    const context = fitted(canvas, width, height);
    const key = [panel.version, width, height, top, followed && followed.number].join();
    this.layer.onto(context, width, height, key, (under) => this.drawLanes(under, width, height, top));
    drawCursor(context, theme, axis, gutter, index, RULER, height);
    const step = panel.run.data.first + index;
    const label = panel.clock.byTime ? `${panel.run.begin[index].toFixed(3)} s` : String(step);
    const x = Math.min(width - 26, Math.max(gutter + 14, gutter + axis.x(index) + axis.cellWidth(index) / 2));
    context.fillStyle = theme.accent;
    context.beginPath();
    context.roundRect(x - 4 - label.length * 3.3, 2, label.length * 6.6 + 8, 14, 4);
    context.fill();
    write(context, theme, label, x, 9.5, { colour: theme.card, weight: 600, align: "center" });
  }

  drawLanes(context, width, height, top) {
    const { run, axis, gutter, theme, followed } = this.panel;
    const first = Math.max(0, Math.floor(top / LANE));
    const rows = run.rows.slice(first, Math.ceil((top + height - RULER) / LANE));
    context.save();
    context.beginPath();
    context.rect(0, RULER, width, height - RULER);
    context.clip();
    for (const row of rows) {
      const y = RULER + row.number * LANE - top;
      if (row === followed) {
        context.fillStyle = theme.soft;
        context.fillRect(0, y, width, LANE);
      }
      badge(context, theme, row, 2, y + 2, LANE - 4);
      context.font = `${row === followed ? 600 : 400} 12px ${theme.font}`;
      const name = shortened(context, row.name, gutter - LANE - 10);
      write(context, theme, name, LANE + 4, y + LANE / 2 + 0.5, { size: 12, weight: row === followed ? 600 : 400 });
    }
    context.beginPath();
    context.rect(gutter, RULER, width - gutter, height - RULER);
    context.clip();
    context.translate(gutter, 0);
    for (const row of rows) this.drawRow(context, row, RULER + row.number * LANE - top);
    context.restore();
    for (const [x, text] of axis.ticks()) {
      context.fillStyle = theme.line;
      context.fillRect(gutter + x, RULER - 4, 1, 4);
      write(context, theme, text, gutter + x + 3, 8, { colour: theme.quiet });
    }
  }

  drawRow(context, row, y) {
    const { run, axis, theme } = this.panel;
    const [from, to] = axis.seen();
    const last = Math.min(row.until === null ? run.length : row.until, to) - 1;
    const signs = [];
    if (row.since <= last) this.drawWaiting(context, row, Math.max(from, row.since), last, y);
    const first = runBefore(row.cells, from) - 4; // where an answer ends, two begin in one step
    for (let place = Math.max(0, first); place < row.cells.length; place += 4) {
      const [begin, count, state, tokens] = row.cells.slice(place, place + 4);
      if (begin >= to) break;
      const name = run.look.states[state];
      const isSign = name === "preempted" || name === "finished" || name === "ended early";
      if (isSign) signs.push([name, begin]);
      else this.drawRun(context, name, tokens, Math.max(begin, from), Math.min(begin + count, to), y);
    }
    for (const [name, index] of signs) {
      drawState(context, theme, name, 0, axis.x(index), y, axis.cellWidth(index), LANE);
    }
  }

  // The dots of a row that waits lie under all else; what comes on top wipes them away.
  drawWaiting(context, row, from, last, y) {
    const { axis, theme, followed } = this.panel;
    const end = (index) => axis.x(index) + axis.cellWidth(index);
    drawState(context, theme, "waiting", 0, axis.x(from), y, end(last) - axis.x(from), LANE);
    context.fillStyle = row === followed ? theme.soft : theme.card;
    for (let place = Math.max(0, runBefore(row.cells, from)); place < row.cells.length; place += 4) {
      const begin = row.cells[place];
      if (begin > last) break;
      const left = axis.x(begin);
      context.fillRect(left, y, end(Math.min(axis.run.length, begin + row.cells[place + 1]) - 1) - left, LANE);
    }
  }

  // Equal cells next to each other: one by one where there is room for gaps, else as one.
  drawRun(context, state, tokens, from, to, y) {
    const { run, axis, theme } = this.panel;
    const share = Math.min(1, tokens / run.data.facts.max_batch_tokens);
    for (let index = from; index < to; ) {
      const x = axis.x(index);
      let next = index + 1;
      while (next < to && axis.x(next) - x < 3) next += 1;
      const end = axis.x(next - 1) + axis.cellWidth(next - 1);
      const gap = next - index === 1 && end - x > 4 && state !== "held up" && state !== "waiting" ? 1 : 0;
      drawState(context, theme, state, share, x, y, Math.max(1, end - x - gap), LANE);
      index = next;
    }
  }
}

// The chosen step, from top to bottom.
function drawCursor(context, theme, axis, gutter, index, top, bottom) {
  const x = gutter + axis.x(index);
  const width = Math.max(2, axis.cellWidth(index));
  if (x + width < gutter) return;
  context.save();
  context.beginPath();
  context.rect(gutter, top, axis.width, bottom - top);
  context.clip();
  context.globalAlpha = 0.16;
  context.fillStyle = theme.accent;
  context.fillRect(x, top, width, bottom - top);
  context.globalAlpha = 1;
  context.fillRect(x, top, 1, bottom - top);
  context.fillRect(x + width - 1, top, 1, bottom - top);
  context.restore();
}
