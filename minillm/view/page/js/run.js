// Run: one run as the views need it: its tracks and their cells, the answers over time, and the times of the steps.

class Run {
  constructor(data, palette) {
    this.data = data;
    this.palette = palette;
    this.replay = new Replay(data);
    this.length = data.steps.length;
    const start = this.length ? data.steps[0].time : 0;
    this.begin = data.steps.map((step) => step.time - start); // seconds since the first step began
    this.durations = data.steps.map((step) => step.milliseconds.reduce((sum, stage) => sum + stage, 0) / 1000);
    this.duration = this.length ? this.begin[this.length - 1] + this.durations[this.length - 1] : 0;
    this.tracks = data.tracks.map((track, number) => ({
      ...track,
      number,
      nameIndex: track.name,
      name: data.names[track.name],
      colour: palette.owners[number % palette.owners.length],
      arrival: null,
      tokenSteps: [], // for each token of the answer: its step,
      textEnds: [], // the length of the answer's text after it,
      tokenTexts: [], // and the token's own text
      text: "",
    }));
    this.tracksByName = new Map();
    for (const track of this.tracks) {
      if (!this.tracksByName.has(track.nameIndex)) this.tracksByName.set(track.nameIndex, []);
      this.tracksByName.get(track.nameIndex).push(track);
    }
    this.readAnswers();
  }

  recordAt(index) {
    return this.replay.at(index);
  }

  // Go through all steps once, and collect each track's arrival and answer.
  readAnswers() {
    const arrivals = new Map();
    const pieces = this.tracks.map(() => []);
    for (let index = 0; index < this.length; index++) {
      const record = this.recordAt(index);
      for (const arrival of record.arrived) {
        arrivals.set(this.data.sequences[arrival.sequence][0], arrival);
        this.trackOf(arrival.sequence, index).arrival = arrival;
      }
      for (const chunk of record.chunks) {
        const request = this.data.sequences[chunk.sequence][0];
        const track = this.trackOf(chunk.sequence, index);
        track.arrival = track.arrival || arrivals.get(request) || null;
        for (const token of chunk.sampled) {
          const isOwn = chunk.completion === token.completion;
          const sequence = isOwn ? chunk.sequence : sequenceIndex(this.data, request, token.completion);
          const target = this.trackOf(sequence, index);
          target.arrival = target.arrival || track.arrival;
          target.tokenSteps.push(index);
          target.tokenTexts.push(token.token_text);
          pieces[target.number].push(token.text);
          target.textEnds.push((target.textEnds[target.textEnds.length - 1] || 0) + token.text.length);
        }
      }
    }
    for (const track of this.tracks) track.text = pieces[track.number].join("");
  }

  // The track of a sequence as of a step. A request id can be reused after its request has ended.
  trackOf(sequence, index) {
    const tracks = this.tracksByName.get(this.data.sequences[sequence][2]) || [];
    return tracks.findLast((track) => track.created <= index) || tracks[0] || null;
  }

  // The state of a track in a step, {state, tokens}; null before its first step and after its end.
  cell(track, index) {
    const at = lastRun(track.cells, index);
    if (at >= 0 && index < track.cells[at] + track.cells[at + 1]) {
      return { state: this.palette.states[track.cells[at + 2]], tokens: track.cells[at + 3] };
    }
    const isAlive = track.first <= index && (track.end === null || index < track.end);
    return isAlive ? { state: "waiting", tokens: 0 } : null;
  }

  // The answer up to a step: its number of tokens, its text before the step, and the text that the step added.
  answer(track, index) {
    const after = countUpTo(track.tokenSteps, index);
    const before = countUpTo(track.tokenSteps, index - 1);
    const end = (count) => (count ? track.textEnds[count - 1] : 0);
    const [oldEnd, newEnd] = [end(before), end(after)];
    return { tokens: after, text: track.text.slice(0, oldEnd), newText: track.text.slice(oldEnd, newEnd) };
  }

  // The text of the token at a position of a track, or null if the trace does not contain it.
  tokenText(track, position) {
    if (!track || !track.arrival) return null;
    const answerPosition = position - track.arrival.num_prompt_tokens;
    const inPrompt = answerPosition < 0;
    const texts = inPrompt ? track.arrival.token_texts : track.tokenTexts;
    return (texts && texts[inPrompt ? position : answerPosition]) ?? null;
  }

  // The step in progress at a time, in seconds since the first step began.
  indexAtTime(seconds) {
    return Math.max(0, countUpTo(this.begin, seconds) - 1);
  }
}

// How many of the ascending values are at most `limit`.
function countUpTo(values, limit) {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= limit) low = middle + 1;
    else high = middle;
  }
  return low;
}

// The offset in `cells` (four numbers per run) of the last run that begins at step `index` or before; -4 if there is none.
function lastRun(cells, index) {
  let low = 0;
  let high = cells.length / 4;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (cells[middle * 4] <= index) low = middle + 1;
    else high = middle;
  }
  return (low - 1) * 4;
}
