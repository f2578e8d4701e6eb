// Replay: every step's StepRecord again, from what each step changes. It reads what ../steps.py writes, in the same order.

const KEY_FRAME = 16; // steps between two states that are kept, so that every step is near one

class Replay {
  // run: what ../data.py made of a trace.
  constructor(run) {
    this.run = run;
    this.frames = []; // the state before step 0, KEY_FRAME, 2 * KEY_FRAME, ... as far as anybody has come
    this.state = {
      next: 0, // the step that comes next
      progress: new Map(), // who -> {tokens, computed, last, table}
      running: [],
      waiting: [0],
      references: new Array(run.steps.length ? run.facts.num_blocks : 0).fill(0),
      cached: [],
    };
    this.newest = null;
  }

  // The StepRecord of the index-th step: minillm.trace's fields, and `who` beside every request_id and completion.
  at(index) {
    if (this.newest && this.newest.index === index) return this.newest;
    const frame = Math.min(Math.floor(index / KEY_FRAME), this.frames.length - 1);
    if (index < this.state.next || frame * KEY_FRAME > this.state.next) this.state = copied(this.frames[frame]);
    while (this.state.next <= index) this.newest = this.advance();
    this.newest.pool.references = this.state.references.slice(); // which go on changing
    return this.newest;
  }

  advance() {
    const { run, state } = this;
    const index = state.next;
    if (index === this.frames.length * KEY_FRAME) this.frames.push(copied(state));
    const step = run.steps[index];
    const text = (number) => (number < 0 ? null : run.strings[number]);
    const record = {
      index,
      step: run.first + index,
      time: step.time,
      milliseconds: Object.fromEntries(run.stages.map((stage, place) => [stage, step.milliseconds[place]])),
      arrived: (step.arrived || []).map((fields) => arrival(run, fields, text)),
      aborted: (step.aborted || []).map((request) => run.requests[request]),
      admitted: (step.admitted || []).map(([who, num_tokens, num_cached_tokens, after_preemption]) => ({
        ...named(run, who), num_tokens, num_cached_tokens, after_preemption,
      })),
      preempted: (step.preempted || []).map(([who, num_computed]) => ({ ...named(run, who), num_computed })),
      finished: (step.finished || []).map(([who, reason, error]) => ({
        ...named(run, who), reason: text(reason), error: text(error),
      })),
    };
    for (const { who, num_tokens, num_cached_tokens } of record.admitted) {
      Object.assign(this.of(who), { tokens: num_tokens, computed: num_cached_tokens });
    }
    record.running = this.runningIn(step);
    record.chunks = this.chunksIn(step);
    if (step.waiting) state.waiting = step.waiting;
    record.waiting_names = state.waiting.slice(1);
    record.waiting = record.waiting_names.map((name) => run.names[name]);
    record.num_waiting = state.waiting[0];
    record.pool = this.poolIn(step);
    state.next += 1;
    return record;
  }

  of(who) {
    let progress = this.state.progress.get(who);
    if (!progress) this.state.progress.set(who, (progress = { tokens: 0, computed: 0, last: null, table: [] }));
    return progress;
  }

  runningIn(step) {
    if (step.running !== undefined) this.state.running = step.running || [];
    const counts = byPlace(step.counts);
    const tables = byPlace(step.tables);
    return this.state.running.map((who, place) => {
      const progress = this.of(who);
      const count = counts.get(place);
      const table = tables.get(place);
      if (count) [, progress.tokens, progress.computed] = count;
      if (table) progress.table = progress.table.slice(0, table[1]).concat(table.slice(2));
      return {
        ...named(this.run, who), num_tokens: progress.tokens, num_computed: progress.computed,
        block_table: progress.table,
      };
    });
  }

  chunksIn(step) {
    const chunks = [];
    const written = step.chunks || [];
    for (let place = 0; place < written.length; place++) {
      const plain = typeof written[place] === "number";
      chunks.push(plain ? this.plainDecode(written[place], written[++place]) : this.chunk(written[place]));
    }
    return chunks;
  }

  plainDecode(who, token) {
    const progress = this.of(who);
    return this.chunk([who, 1, progress.computed, [progress.last], null, [[this.run.who[who][1], token]]]);
  }

  chunk([who, decodes, start, token_ids, table, sampled]) {
    const { run } = this;
    const progress = this.of(who);
    const chunk = {
      ...named(run, who), phase: decodes ? "decode" : "prefill", start, token_ids,
      block_table: table || progress.table,
      sampled: sampled.map(([completion, token, logprob = null]) => {
        const [token_id, own, text] = run.tokens[token];
        return {
          completion, token_id, text: run.strings[text], logprob, token_text: own < 0 ? null : run.strings[own],
        };
      }),
    };
    const known = progress.tokens;
    progress.computed = start + token_ids.length;
    for (const token of chunk.sampled) {
      let own = progress;
      if (token.completion !== chunk.completion) {
        own = this.of(whoIs(run, run.who[who][0], token.completion));
        own.computed = progress.computed;
        own.table = progress.table;
      }
      own.tokens = known + 1;
      own.last = token.token_id;
    }
    return chunk;
  }

  poolIn(step) {
    const { state } = this;
    const changes = step.references || [];
    for (let place = 0; place < changes.length; place += 2) state.references[changes[place]] = changes[place + 1];
    if (step.cached) {
      const gone = new Set(step.cached[0]);
      state.cached = state.cached.filter((block) => !gone.has(block)).concat(step.cached[1]);
    }
    return {
      references: state.references,
      cached: state.cached,
      evicted: step.evicted || [],
      copies: (step.copies || []).map(([source, target]) => ({ source, target })),
    };
  }
}

// A state that goes on by itself: what is replaced as a whole is shared, what is changed in place is not.
function copied(state) {
  const progress = new Map();
  for (const [who, own] of state.progress) progress.set(who, { ...own });
  return { ...state, progress, references: state.references.slice() };
}

function named(run, who) {
  const [request, completion] = run.who[who];
  return { who, request_id: run.requests[request], completion };
}

// The number of a request's completion.
function whoIs(run, request, completion) {
  if (!run.whoByPair) {
    run.whoByPair = new Map(run.who.map(([request, completion], who) => [`${request}.${completion}`, who]));
  }
  return run.whoByPair.get(`${request}.${completion}`);
}

function byPlace(changes) {
  return new Map((changes || []).map((change) => [change[0], change]));
}

function arrival(run, [who, time, num_prompt_tokens, prompt, params, n, max_tokens, priority, texts], text) {
  return {
    who, request_id: run.requests[run.who[who][0]], time, num_prompt_tokens, prompt: text(prompt), params, n, max_tokens,
    priority, token_texts: texts && texts.map(text),
  };
}
