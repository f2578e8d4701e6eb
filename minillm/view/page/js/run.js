// Run: what the views ask of a whole run. Lanes with their cells, answers as they grew, when each step was.

class Run {
  constructor(data, look) {
    this.data = data;
    this.look = look;
    this.replay = new Replay(data);
    this.length = data.steps.length;
    const start = this.length ? data.steps[0].time : 0;
    this.begin = data.steps.map((step) => step.time - start); // seconds since the first step began
    this.took = data.steps.map((step) => step.milliseconds.reduce((sum, stage) => sum + stage, 0) / 1000);
    this.duration = this.length ? this.begin[this.length - 1] + this.took[this.length - 1] : 0;
    this.rows = data.rows.map((row, number) => ({
      ...row,
      number,
      nameNumber: row.name,
      name: data.names[row.name],
      colour: look.owners[number % look.owners.length],
      arrival: null,
      at: [], // the step of each token of its answer,
      ends: [], // how much of the answer's text there is after it,
      own: [], // and the token's own text
      text: "",
    }));
    this.rowsByName = new Map();
    for (const row of this.rows) {
      if (!this.rowsByName.has(row.nameNumber)) this.rowsByName.set(row.nameNumber, []);
      this.rowsByName.get(row.nameNumber).push(row);
    }
    this.readAnswers();
  }

  stateAt(index) {
    return this.replay.at(index);
  }

  // Once through all steps: which arrival each row goes back to, and how its answer grew.
  readAnswers() {
    const arrivals = new Map();
    const pieces = this.rows.map(() => []);
    for (let index = 0; index < this.length; index++) {
      const record = this.stateAt(index);
      for (const arrival of record.arrived) {
        arrivals.set(this.data.who[arrival.who][0], arrival);
        this.rowOf(arrival.who, index).arrival = arrival;
      }
      for (const chunk of record.chunks) {
        const request = this.data.who[chunk.who][0];
        const row = this.rowOf(chunk.who, index);
        row.arrival = row.arrival || arrivals.get(request) || null;
        for (const token of chunk.sampled) {
          const own = chunk.completion === token.completion ? chunk.who : whoIs(this.data, request, token.completion);
          const grown = this.rowOf(own, index);
          grown.arrival = grown.arrival || row.arrival;
          grown.at.push(index);
          grown.own.push(token.token_text);
          pieces[grown.number].push(token.text);
          grown.ends.push((grown.ends[grown.ends.length - 1] || 0) + token.text.length);
        }
      }
    }
    for (const row of this.rows) row.text = pieces[row.number].join("");
  }

  // The row of a completion, or of a name, as of a step: an id may be used again after its request has ended.
  rowOf(who, index) {
    return this.rowNamed(this.data.who[who][2], index);
  }

  rowNamed(name, index) {
    const rows = this.rowsByName.get(name) || [];
    return rows.findLast((row) => row.came <= index) || rows[0] || null;
  }

  // What a step meant to a row: {state, tokens}, or null before it came and after it ended.
  cell(row, index) {
    const place = runBefore(row.cells, index);
    if (place >= 0 && index < row.cells[place] + row.cells[place + 1]) {
      return { state: this.look.states[row.cells[place + 2]], tokens: row.cells[place + 3] };
    }
    const there = row.since <= index && (row.until === null || index < row.until);
    return there ? { state: "waiting", tokens: 0 } : null;
  }

  // Up to a step: tokens of the answer, its text before the step, and what the step brought.
  answer(row, index) {
    const after = countUpTo(row.at, index);
    const before = countUpTo(row.at, index - 1);
    const end = (count) => (count ? row.ends[count - 1] : 0);
    return { tokens: after, text: row.text.slice(0, end(before)), fresh: row.text.slice(end(before), end(after)) };
  }

  // The text of the token at a position of a row, or null where the trace does not tell it.
  tokenText(row, position) {
    if (!row || !row.arrival) return null;
    const answered = position - row.arrival.num_prompt_tokens;
    const texts = answered < 0 ? row.arrival.token_texts : row.own;
    return (texts && texts[answered < 0 ? position : answered]) ?? null;
  }

  // The step under way at a time, in seconds since the first began.
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

// Where in the flat list of runs the last one begins that begins at `index` or before; -4 if there is none.
function runBefore(cells, index) {
  let low = 0;
  let high = cells.length / 4;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (cells[middle * 4] <= index) low = middle + 1;
    else high = middle;
  }
  return (low - 1) * 4;
}
