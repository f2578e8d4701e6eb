// TimelineView: one track per sequence, one cell per step.

const TRACK_HEIGHT = 18;
const RULER_HEIGHT = 18;

class TimelineView {
  // scroller: the element that scrolls vertically. It holds the canvas and a spacer as high as all tracks.
  constructor(panel, scroller) {
    this.panel = panel;
    this.scroller = scroller;
    this.spacer = scroller.querySelector(".spacer");
    this.canvas = scroller.querySelector("canvas");
    this.layer = new Layer();
    this.spacer.style.height = `${panel.run.tracks.length * TRACK_HEIGHT + RULER_HEIGHT}px`;
    scroller.addEventListener("scroll", () => panel.changed());
    this.canvas.addEventListener("click", (event) => this.choose(event));
    this.canvas.addEventListener("pointermove", (event) => this.explain(event));
    this.canvas.addEventListener("pointerleave", () => panel.explain(""));
  }

  // The track and the step under the pointer.
  target(event) {
    const box = this.canvas.getBoundingClientRect();
    const number = Math.floor((event.clientY - box.top - RULER_HEIGHT + this.scroller.scrollTop) / TRACK_HEIGHT);
    const x = event.clientX - box.left - this.panel.gutter;
    return { track: this.panel.run.tracks[number] || null, index: x >= 0 ? this.panel.axis.indexAt(x) : null };
  }

  choose(event) {
    const { track, index } = this.target(event);
    if (track) this.panel.follow(track);
    if (index !== null) this.panel.clock.show(this.panel.run, index);
  }

  explain(event) {
    const { track, index } = this.target(event);
    const cell = track && index !== null && this.panel.run.cell(track, index);
    const computed = cell && cell.tokens ? `, ${countOf(cell.tokens, "token")}` : "";
    const step = this.panel.run.data.first + index;
    this.panel.explain(cell ? `${track.name}, step ${step}: ${cell.state}${computed}` : track ? track.name : "");
  }

  reveal(track) {
    const top = track.number * TRACK_HEIGHT;
    const room = this.scroller.clientHeight - RULER_HEIGHT;
    if (top < this.scroller.scrollTop) this.scroller.scrollTop = top;
    else if (top + TRACK_HEIGHT > this.scroller.scrollTop + room) this.scroller.scrollTop = top + TRACK_HEIGHT - room;
  }

  // If no running sequence is visible, scroll the first one to the top.
  revealRunning(record) {
    const tracks = record.running.map(({ sequence }) => this.panel.run.trackOf(sequence, record.index)).filter(Boolean);
    const top = this.scroller.scrollTop;
    const bottom = top + this.scroller.clientHeight - RULER_HEIGHT;
    const isVisible = ({ number }) => number * TRACK_HEIGHT >= top && (number + 1) * TRACK_HEIGHT <= bottom;
    if (tracks.length && !tracks.some(isVisible)) this.scroller.scrollTop = tracks[0].number * TRACK_HEIGHT;
  }

  draw(index) {
    const { panel, canvas, scroller } = this;
    const { theme, axis, gutter, followed } = panel;
    const width = panel.width;
    const height = scroller.clientHeight;
    const top = scroller.scrollTop;
    const context = resized(canvas, width, height);
    const key = [panel.version, width, height, top, followed && followed.number].join();
    this.layer.drawOnto(context, width, height, key, (layerContext) => this.drawTracks(layerContext, width, height, top));
    drawCursor(context, panel, index, RULER_HEIGHT, height);
    const step = panel.run.data.first + index;
    const label = panel.clock.byTime ? `${panel.run.begin[index].toFixed(3)} s` : String(step);
    const x = Math.min(width - 26, Math.max(gutter + 14, gutter + axis.x(index) + axis.cellWidth(index) / 2));
    context.fillStyle = theme.accent;
    context.beginPath();
    context.roundRect(x - 4 - label.length * 3.3, 2, label.length * 6.6 + 8, 14, 4);
    context.fill();
    drawText(context, theme, label, x, 9.5, { colour: theme.card, weight: 600, align: "center" });
  }

  drawTracks(context, width, height, top) {
    const { run, axis, gutter, theme, followed } = this.panel;
    const first = Math.max(0, Math.floor(top / TRACK_HEIGHT));
    const tracks = run.tracks.slice(first, Math.ceil((top + height - RULER_HEIGHT) / TRACK_HEIGHT));
    context.save();
    context.beginPath();
    context.rect(0, RULER_HEIGHT, width, height - RULER_HEIGHT);
    context.clip();
    for (const track of tracks) {
      const y = RULER_HEIGHT + track.number * TRACK_HEIGHT - top;
      if (track === followed) {
        context.fillStyle = theme.soft;
        context.fillRect(0, y, width, TRACK_HEIGHT);
      }
      drawBadge(context, theme, track, 2, y + 2, TRACK_HEIGHT - 4);
      const weight = track === followed ? 600 : 400;
      context.font = `${weight} 12px ${theme.font}`;
      const name = truncated(context, track.name, gutter - TRACK_HEIGHT - 10);
      drawText(context, theme, name, TRACK_HEIGHT + 4, y + TRACK_HEIGHT / 2 + 0.5, { size: 12, weight });
    }
    context.beginPath();
    context.rect(gutter, RULER_HEIGHT, width - gutter, height - RULER_HEIGHT);
    context.clip();
    context.translate(gutter, 0);
    for (const track of tracks) this.drawTrack(context, track, RULER_HEIGHT + track.number * TRACK_HEIGHT - top);
    context.restore();
    for (const [x, text] of axis.ticks()) {
      context.fillStyle = theme.line;
      context.fillRect(gutter + x, RULER_HEIGHT - 4, 1, 4);
      drawText(context, theme, text, gutter + x + 3, 8, { colour: theme.quiet });
    }
  }

  drawTrack(context, track, y) {
    const { run, axis, theme } = this.panel;
    const [from, to] = axis.visibleRange();
    const last = Math.min(track.end === null ? run.length : track.end, to) - 1;
    const signs = [];
    if (track.first <= last) this.drawWaiting(context, track, Math.max(from, track.first), last, y);
    const firstRun = lastRun(track.cells, from) - 4; // one run earlier: two runs begin in the step where an answer ends
    for (let at = Math.max(0, firstRun); at < track.cells.length; at += 4) {
      const [begin, length, state, tokens] = track.cells.slice(at, at + 4);
      if (begin >= to) break;
      const name = run.palette.states[state];
      const isSign = name === "preempted" || name === "finished" || name === "ended early";
      if (isSign) signs.push([name, begin]);
      else this.drawCells(context, name, tokens, Math.max(begin, from), Math.min(begin + length, to), y);
    }
    for (const [name, index] of signs) {
      drawState(context, theme, name, 0, { x: axis.x(index), y, width: axis.cellWidth(index), height: TRACK_HEIGHT });
    }
  }

  // Draw a waiting line over the whole track, and erase it in the steps that have other cells.
  drawWaiting(context, track, from, last, y) {
    const { axis, theme, followed } = this.panel;
    const end = (index) => axis.x(index) + axis.cellWidth(index);
    const box = { x: axis.x(from), y, width: end(last) - axis.x(from), height: TRACK_HEIGHT };
    drawState(context, theme, "waiting", 0, box);
    context.fillStyle = track === followed ? theme.soft : theme.card;
    for (let at = Math.max(0, lastRun(track.cells, from)); at < track.cells.length; at += 4) {
      const begin = track.cells[at];
      if (begin > last) break;
      const left = axis.x(begin);
      context.fillRect(left, y, end(Math.min(axis.run.length, begin + track.cells[at + 1]) - 1) - left, TRACK_HEIGHT);
    }
  }

  // Draw equal adjacent cells: one by one if there is room for gaps, else several as one box.
  drawCells(context, state, tokens, from, to, y) {
    const { run, axis, theme } = this.panel;
    const share = Math.min(1, tokens / run.data.facts.max_batch_tokens);
    for (let index = from; index < to; ) {
      const x = axis.x(index);
      let next = index + 1;
      while (next < to && axis.x(next) - x < 3) next += 1;
      const end = axis.x(next - 1) + axis.cellWidth(next - 1);
      const gap = next - index === 1 && end - x > 4 && state !== "stalled" && state !== "waiting" ? 1 : 0;
      drawState(context, theme, state, share, { x, y, width: Math.max(1, end - x - gap), height: TRACK_HEIGHT });
      index = next;
    }
  }
}

// Mark the chosen step between two heights.
function drawCursor(context, { theme, axis, gutter }, index, top, bottom) {
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
