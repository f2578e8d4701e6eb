// Clock: where in the run, or in both runs, we are. One run is walked step by step; two share the seconds since the first
// step of each began, and each shows the step that was under way.

class Clock {
  constructor(runs) {
    this.runs = runs;
    this.byTime = runs.length > 1;
    this.end = this.byTime ? Math.max(...runs.map((run) => run.duration)) : Math.max(0, runs[0].length - 1);
    const begins = this.byTime ? runs.flatMap((run) => run.begin) : [];
    this.moments = [...new Set([...begins, this.end])].sort((a, b) => a - b); // where some step begins
    this.now = 0;
    this.listeners = [];
  }

  // The index of the step that a run shows.
  index(run) {
    return this.byTime ? run.indexAtTime(this.now) : this.now;
  }

  isOver(run) {
    return this.byTime && this.now >= run.duration;
  }

  get atEnd() {
    return this.now >= this.end;
  }

  set(now) {
    const inside = Math.min(this.end, Math.max(0, this.byTime ? now : Math.round(now)));
    if (inside === this.now) return;
    this.now = inside;
    for (const listener of this.listeners) listener();
  }

  // So many steps on, or back; with two runs, so many beginnings of a step of either.
  move(steps) {
    if (!this.byTime) return this.set(this.now + steps);
    const here = countUpTo(this.moments, this.now) - 1;
    const place = Math.min(this.moments.length - 1, Math.max(0, here + steps));
    return this.set(this.moments[place]);
  }

  // To the beginning of a run's step.
  show(run, index) {
    this.set(this.byTime ? run.begin[index] : index);
  }
}

// Player: lets the clock run. Its speeds are steps a second, or seconds of the runs a second.
class Player {
  constructor(clock, changed) {
    this.clock = clock;
    this.changed = changed;
    this.speed = 1;
    this.playing = false;
  }

  toggle() {
    if (this.playing) return this.stop();
    if (this.clock.atEnd) this.clock.set(0);
    this.playing = true;
    this.exact = this.clock.now;
    this.before = performance.now();
    requestAnimationFrame((time) => this.tick(time));
    return this.changed();
  }

  stop() {
    this.playing = false;
    this.changed();
  }

  tick(time) {
    if (!this.playing) return;
    this.exact += (Math.max(0, time - this.before) / 1000) * this.speed;
    this.before = time;
    this.clock.set(this.clock.byTime ? this.exact : Math.floor(this.exact));
    if (this.clock.atEnd) this.stop();
    else requestAnimationFrame((next) => this.tick(next));
  }
}
