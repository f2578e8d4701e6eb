// Clock: the current position in the run, or in both runs. One run is navigated step by step. Two runs share a time in
// seconds since the first step of each began, and each shows the step that was in progress at that time.

class Clock {
  constructor(runs) {
    this.runs = runs;
    this.byTime = runs.length > 1;
    this.end = this.byTime ? Math.max(...runs.map((run) => run.duration)) : Math.max(0, runs[0].length - 1);
    const begins = this.byTime ? runs.flatMap((run) => run.begin) : [];
    this.stepTimes = [...new Set([...begins, this.end])].sort((a, b) => a - b); // where a step of either run begins
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
    const clamped = Math.min(this.end, Math.max(0, this.byTime ? now : Math.round(now)));
    if (clamped === this.now) return;
    this.now = clamped;
    for (const listener of this.listeners) listener();
  }

  // Move by a number of steps; with two runs, by a number of step beginnings of either.
  move(steps) {
    if (!this.byTime) return this.set(this.now + steps);
    const current = countUpTo(this.stepTimes, this.now) - 1;
    const target = Math.min(this.stepTimes.length - 1, Math.max(0, current + steps));
    return this.set(this.stepTimes[target]);
  }

  // Go to the beginning of a run's step.
  show(run, index) {
    this.set(this.byTime ? run.begin[index] : index);
  }
}

// Player: advances the clock. Its speed is in steps per second or, with two runs, in seconds of the runs per second.
class Player {
  constructor(clock, onChange) {
    this.clock = clock;
    this.onChange = onChange;
    this.speed = 1;
    this.playing = false;
  }

  toggle() {
    if (this.playing) return this.stop();
    if (this.clock.atEnd) this.clock.set(0);
    this.playing = true;
    this.position = this.clock.now;
    this.lastTick = performance.now();
    requestAnimationFrame((time) => this.tick(time));
    return this.onChange();
  }

  stop() {
    this.playing = false;
    this.onChange();
  }

  tick(time) {
    if (!this.playing) return;
    this.position += (Math.max(0, time - this.lastTick) / 1000) * this.speed;
    this.lastTick = time;
    this.clock.set(this.clock.byTime ? this.position : Math.floor(this.position));
    if (this.clock.atEnd) this.stop();
    else requestAnimationFrame((next) => this.tick(next));
  }
}
