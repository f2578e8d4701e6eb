// Axis: where on a canvas each step lies. Timeline and charts share it, which is why the charts are drawn here too.

const WIDEST = 4_000_000; // pixels of the whole run at the highest magnification
const CELL = 7; // pixels of a step to begin with, where they do not all find more room

// Lens: the part of the axis that is seen. Two runs share one, so that a second is as wide in both.
class Lens {
  constructor() {
    this.mode = "step";
    this.zoom = 1; // 1 shows everything
    this.left = 0; // 0 to 1: what lies at the left edge
  }

  magnify(factor, at, most) {
    const seen = this.left + at / this.zoom;
    this.zoom = Math.min(most, Math.max(1, this.zoom * factor));
    this.look(seen - at / this.zoom);
  }

  look(left) {
    this.left = Math.min(1 - 1 / this.zoom, Math.max(0, left));
  }
}

class Axis {
  constructor(run, lens, total) {
    this.run = run;
    this.lens = lens;
    this.seconds = total; // of the longer run
    this.width = 1;
    this.measure();
  }

  // Begin and end of every step, in steps, in tokens or in seconds.
  measure() {
    const { run } = this;
    const last = run.length - 1;
    if (this.lens.mode === "time") {
      this.begin = run.begin;
      this.end = run.begin.map((begin, index) => {
        const end = begin + run.took[index];
        return index < last ? Math.min(end, Math.max(begin, run.begin[index + 1])) : end;
      });
      this.total = this.seconds;
    } else {
      const { prefill, decode } = run.data.columns;
      const tokens = this.lens.mode === "tokens";
      this.begin = [];
      this.end = [];
      let edge = 0;
      for (let index = 0; index <= last; index++) {
        this.begin.push(edge);
        edge += tokens ? Math.max(1, prefill[index] + decode[index]) : 1;
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

  // The steps that are at least in part to be seen: from the first, up to but not the second.
  seen() {
    const left = this.offset / this.scale;
    const right = (this.offset + this.width) / this.scale;
    return [Math.max(0, countUpTo(this.begin, left) - 1), countUpTo(this.begin, right)];
  }

  indexAt(x) {
    const place = countUpTo(this.begin, (x + this.offset) / this.scale) - 1;
    return Math.min(this.run.length - 1, Math.max(0, place));
  }

  // Numbers for the ruler: [x, text], with room between them.
  ticks() {
    const seconds = this.lens.mode === "time";
    if (seconds) {
      const gap = roundUp(90 / this.scale);
      const from = Math.ceil(this.offset / this.scale / gap);
      const count = Math.floor(this.width / (gap * this.scale)) + 1;
      return Array.from({ length: count }, (_, n) => (from + n) * gap).map((at) => [
        at * this.scale - this.offset, `${Number(at.toPrecision(6))} s`,
      ]);
    }
    const [from, to] = this.seen();
    const gap = Math.max(1, roundUp(((to - from) * 70) / this.width));
    const ticks = [];
    let free = -Infinity;
    for (let index = from; index < to; index++) {
      const step = this.run.data.first + index;
      if (step % gap || this.x(index) < Math.max(0, free)) continue;
      ticks.push([this.x(index), String(step)]);
      free = this.x(index) + 40;
    }
    return ticks;
  }
}

// The next of 1, 2, 5, 10, 20, ...
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value || 1));
  return power * [1, 2, 5, 10].find((digit) => digit * power >= value * 0.999);
}
