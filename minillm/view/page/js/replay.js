// Replay: rebuilds every step's StepRecord from the changes that ../steps.py writes, in the same order.

const KEY_FRAME_INTERVAL = 16; // steps between two saved states, so that every step is close to one

class Replay {
  // run: the data that ../data.py made from a trace.
  constructor(run) {
    this.run = run;
    this.keyFrames = []; // the states before steps 0, KEY_FRAME_INTERVAL, 2 * KEY_FRAME_INTERVAL, ... visited so far
    this.state = {
      next: 0, // index of the next step
      sequences: new Map(), // sequence index -> {numTokens, numComputed, lastToken, blockTables}
      running: [],
      waiting: [0],
      references: new Array(run.steps.length ? run.facts.num_blocks : 0).fill(0),
      cached: [],
    };
    this.newest = null;
  }

  // The StepRecord of a step, with the fields of minillm.trace and a `sequence` index beside every request_id and
  // completion.
  at(index) {
    if (this.newest && this.newest.index === index) return this.newest;
    const frame = Math.min(Math.floor(index / KEY_FRAME_INTERVAL), this.keyFrames.length - 1);
    if (index < this.state.next || frame * KEY_FRAME_INTERVAL > this.state.next) {
      this.state = copyState(this.keyFrames[frame]);
    }
    while (this.state.next <= index) this.newest = this.advance();
    this.newest.pool.references = this.state.references.slice(); // the state's array changes in place
    return this.newest;
  }

  advance() {
    const { run, state } = this;
    const index = state.next;
    if (index === this.keyFrames.length * KEY_FRAME_INTERVAL) this.keyFrames.push(copyState(state));
    const step = run.steps[index];
    const text = (number) => (number < 0 ? null : run.strings[number]);
    const record = {
      index,
      step: run.first + index,
      time: step.time,
      milliseconds: Object.fromEntries(run.stages.map((stage, number) => [stage, step.milliseconds[number]])),
      arrived: (step.arrived || []).map((fields) => arrivalRecord(run, fields, text)),
      aborted: (step.aborted || []).map((request) => run.requests[request]),
      admitted: (step.admitted || []).map(([sequence, num_tokens, num_cached_tokens, after_preemption]) => ({
        ...sequenceFields(run, sequence), num_tokens, num_cached_tokens, after_preemption,
      })),
      preempted: (step.preempted || []).map(([sequence, num_computed]) => ({
        ...sequenceFields(run, sequence), num_computed,
      })),
      finished: (step.finished || []).map(([sequence, reason, error]) => ({
        ...sequenceFields(run, sequence), reason: text(reason), error: text(error),
      })),
    };
    for (const { sequence, num_tokens, num_cached_tokens } of record.admitted) {
      Object.assign(this.stateOf(sequence), { numTokens: num_tokens, numComputed: num_cached_tokens });
    }
    record.running = this.readRunning(step);
    record.chunks = this.readChunks(step);
    if (step.waiting) state.waiting = step.waiting;
    record.waiting_names = state.waiting.slice(1);
    record.waiting = record.waiting_names.map((name) => run.names[name]);
    record.num_waiting = state.waiting[0];
    record.pool = this.readPool(step);
    state.next += 1;
    return record;
  }

  stateOf(sequence) {
    const { sequences } = this.state;
    if (!sequences.has(sequence)) {
      const blockTables = this.run.facts.windows.map(() => []); // one per KV-cache group
      sequences.set(sequence, { numTokens: 0, numComputed: 0, lastToken: null, blockTables });
    }
    return sequences.get(sequence);
  }

  readRunning(step) {
    if (step.running !== undefined) this.state.running = step.running || [];
    const counts = new Map((step.counts || []).map((count) => [count[0], count]));
    for (const [index, group, numKept, ...blocks] of step.tables || []) {
      const own = this.stateOf(this.state.running[index]);
      own.blockTables = own.blockTables.slice();
      own.blockTables[group] = own.blockTables[group].slice(0, numKept).concat(blocks);
    }
    return this.state.running.map((sequence, index) => {
      const own = this.stateOf(sequence);
      const count = counts.get(index);
      if (count) [, own.numTokens, own.numComputed] = count;
      return {
        ...sequenceFields(this.run, sequence), num_tokens: own.numTokens, num_computed: own.numComputed,
        block_tables: own.blockTables,
      };
    });
  }

  readChunks(step) {
    const chunks = [];
    const written = step.chunks || [];
    for (let position = 0; position < written.length; position++) {
      const isPlain = typeof written[position] === "number";
      chunks.push(isPlain ? this.plainDecode(written[position], written[++position]) : this.chunk(written[position]));
    }
    return chunks;
  }

  plainDecode(sequence, token) {
    const { numComputed, lastToken } = this.stateOf(sequence);
    return this.chunk([sequence, 1, numComputed, [lastToken], null, [[this.run.sequences[sequence][1], token]]]);
  }

  chunk([sequence, isDecode, start, token_ids, tables, sampled]) {
    const { run } = this;
    const own = this.stateOf(sequence);
    const chunk = {
      ...sequenceFields(run, sequence), phase: isDecode ? "decode" : "prefill", start, token_ids,
      block_tables: tables || own.blockTables,
      sampled: sampled.map(([completion, token, logprob = null]) => {
        const [token_id, tokenText, text] = run.tokens[token];
        return {
          completion, token_id, text: run.strings[text], logprob,
          token_text: tokenText < 0 ? null : run.strings[tokenText],
        };
      }),
    };
    const numTokens = own.numTokens;
    own.numComputed = start + token_ids.length;
    for (const token of chunk.sampled) {
      let target = own;
      if (token.completion !== chunk.completion) { // a fork of the chunk's sequence
        target = this.stateOf(sequenceIndex(run, run.sequences[sequence][0], token.completion));
        target.numComputed = own.numComputed;
        target.blockTables = own.blockTables;
      }
      target.numTokens = numTokens + 1;
      target.lastToken = token.token_id;
    }
    return chunk;
  }

  readPool(step) {
    const { state } = this;
    const changes = step.references || [];
    for (let position = 0; position < changes.length; position += 2) {
      state.references[changes[position]] = changes[position + 1];
    }
    if (step.cached) {
      const [removed, added] = step.cached;
      const isRemoved = new Set(removed);
      state.cached = state.cached.filter((block) => !isRemoved.has(block)).concat(added);
    }
    return {
      references: state.references,
      cached: state.cached,
      evicted: step.evicted || [],
      copies: (step.copies || []).map(([source, target]) => ({ source, target })),
    };
  }
}

// An independent copy of a state. Values that are only ever replaced are shared; values that change in place are copied.
function copyState(state) {
  const sequences = new Map();
  for (const [sequence, own] of state.sequences) sequences.set(sequence, { ...own });
  return { ...state, sequences, references: state.references.slice() };
}

function sequenceFields(run, sequence) {
  const [request, completion] = run.sequences[sequence];
  return { sequence, request_id: run.requests[request], completion };
}

// The index of the sequence that is a given completion of a request.
function sequenceIndex(run, request, completion) {
  if (!run.sequenceByKey) {
    run.sequenceByKey = new Map(run.sequences.map(([request, completion], index) => [`${request}.${completion}`, index]));
  }
  return run.sequenceByKey.get(`${request}.${completion}`);
}

function arrivalRecord(run, fields, text) {
  const [sequence, time, num_prompt_tokens, prompt, params, n, max_tokens, priority, texts] = fields;
  return {
    sequence, request_id: run.requests[run.sequences[sequence][0]], time, num_prompt_tokens, prompt: text(prompt), params,
    n, max_tokens, priority, token_texts: texts && texts.map(text),
  };
}
