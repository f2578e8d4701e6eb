// Axis: the horizontal position of each step. The timeline and the charts share it.

const MAX_WIDTH = 4_000_000; // pixels of the whole run at the highest magnification
const INITIAL_CELL_WIDTH = 7; // pixels per step at first, unless all steps fit with more

// Lens: the visible part of the axis. Two runs share one, so that both have the same scale.
class Lens {
  constructor() {
    this.mode = "step";
    this.zoom = 1; // 1 shows the whole run
    this.left = 0; // the position of the left edge, as a share of the run
  }

  // Zoom by a factor, keeping the point at the share `at` of the visible part in place.
  magnify(factor, at, maxZoom) {
    const fixed = this.left + at / this.zoom;
    this.zoom = Math.min(maxZoom, Math.max(1, this.zoom * factor));
    this.scrollTo(fixed - at / this.zoom);
  }

  scrollTo(left) {
    this.left = Math.min(1 - 1 / this.zoom, Math.max(0, left));
  }
}

class Axis {
  constructor(run, lens, duration) {
    this.run = run;
    this.lens = lens;
    this.duration = duration; // seconds of the longer run
    this.width = 1;
    this.measure();
  }

  // Compute the beginning and the end of every step in steps, tokens or seconds.
  measure() {
    const { run } = this;
    const last = run.length - 1;
    if (this.lens.mode === "time") {
      this.begin = run.begin;
      this.end = run.begin.map((begin, index) => {
        const end = begin + run.durations[index];
        return index < last ? Math.min(end, Math.max(begin, run.begin[index + 1])) : end;
      });
      this.total = this.duration;
    } else {
      const { prefill, decode } = run.data.columns;
      const byTokens = this.lens.mode === "tokens";
      this.begin = [];
      this.end = [];
      let edge = 0;
      for (let index = 0; index <= last; index++) {
        this.begin.push(edge);
        edge += byTokens ? Math.max(1, prefill[index] + decode[index]) : 1;
        this.end.push(edge);
      }
      this.total = edge;
    }
    this.total = this.total || 1;
  }

  get scale() {
    return (this.width * this.lens.zoom) / this.total;
  }

  get offset() {
    return this.lens.left * this.lens.zoom * this.width;
  }

  x(index) {
    return this.begin[index] * this.scale - this.offset;
  }

  cellWidth(index) {
    return (this.end[index] - this.begin[index]) * this.scale;
  }

  // The range of steps that are at least partly visible: [first, end), without the end.
  visibleRange() {
    const left = this.offset / this.scale;
    const right = (this.offset + this.width) / this.scale;
    return [Math.max(0, countUpTo(this.begin, left) - 1), countUpTo(this.begin, right)];
  }

  indexAt(x) {
    const index = countUpTo(this.begin, (x + this.offset) / this.scale) - 1;
    return Math.min(this.run.length - 1, Math.max(0, index));
  }

  // The ruler's labels, [x, text], without overlaps.
  ticks() {
    return this.lens.mode === "time" ? this.timeTicks() : this.stepTicks();
  }

  timeTicks() {
    const gap = roundUp(90 / this.scale);
    const first = Math.ceil(this.offset / this.scale / gap);
    const count = Math.floor(this.width / (gap * this.scale)) + 1;
    return Array.from({ length: count }, (_, number) => (first + number) * gap).map((seconds) => [
      seconds * this.scale - this.offset, `${Number(seconds.toPrecision(6))} s`,
    ]);
  }

  stepTicks() {
    const [from, to] = this.visibleRange();
    const gap = Math.max(1, roundUp(((to - from) * 70) / this.width));
    const ticks = [];
    let nextFree = -Infinity;
    for (let index = from; index < to; index++) {
      const step = this.run.data.first + index;
      if (step % gap || this.x(index) < Math.max(0, nextFree)) continue;
      ticks.push([this.x(index), String(step)]);
      nextFree = this.x(index) + 40;
    }
    return ticks;
  }
}

// The next of 1, 2, 5, 10, 20, ...
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value || 1));
  return power * [1, 2, 5, 10].find((digit) => digit * power >= value * 0.999);
}
