// Words: numbers as people write them, and what happened in a step.

function element(tag, name = "", text = "") {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text) made.textContent = text;
  return made;
}

// A row's letter on its colour.
function lettered(row) {
  const letter = element("span", "letter", row.letter);
  letter.style.background = row.colour;
  letter.setAttribute("aria-hidden", "true");
  return letter;
}

function count(number, word) {
  return `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;
}

function milliseconds(value) {
  if (value === 0) return "0 ms";
  if (value >= 10_000) return `${(value / 1000).toPrecision(4)} s`;
  return `${value >= 100 ? value.toFixed(0) : value >= 1 ? value.toFixed(1) : value.toPrecision(2)} ms`;
}

const FORMATS = {
  count: (value) => value.toLocaleString("en"),
  rate: (value) => value.toFixed(1),
  share: (value) => `${(value * 100).toFixed(1)} %`,
  seconds: (value) => `${value.toFixed(3)} s`,
  milliseconds: (value) => milliseconds(value * 1000),
};

function formatted(kind, value) {
  return value === null ? "–" : FORMATS[kind](value);
}

// What happened in a step besides computing, a line each.
function happened(run, record) {
  const name = (part) => nameOf(run, part);
  const { evicted, copies } = record.pool;
  return [
    ...record.arrived.map((part) => `${name(part)} arrived with ${count(part.num_prompt_tokens, "prompt token")}${asked(part)}`),
    ...record.aborted.map((request) => `${request} was aborted`),
    ...record.admitted.map((part) => {
      const found = part.num_cached_tokens ? `; ${part.num_cached_tokens} were in the cache` : "";
      return `${name(part)} was ${part.after_preemption ? "readmitted" : "admitted"} with ${count(part.num_tokens, "token")}${found}`;
    }),
    ...record.preempted.map((part) => `${name(part)} was preempted with ${count(part.num_computed, "token")} computed`),
    ...record.finished.map((part) => `${name(part)} ended: ${part.error ? `${part.reason}, ${part.error}` : part.reason}`),
    ...copies.map(({ source, target }) => `block ${source} was copied to ${target}, to be written`),
    ...(evicted.length ? [`${evicted.length === 1 ? "block" : "blocks"} ${evicted.join(", ")} evicted from the cache`] : []),
  ];
}

// What a request asked for that is not the default.
function asked(arrival) {
  const params = Object.entries(arrival.params).map(([name, value]) => `${name} ${typeof value === "object" ? JSON.stringify(value) : value}`);
  const more = [
    arrival.n === 1 ? "" : count(arrival.n, "completion"),
    arrival.priority ? `priority ${arrival.priority}` : "",
    ...params,
  ].filter(Boolean);
  return `, at most ${arrival.max_tokens} to come${more.length ? ` (${more.join(", ")})` : ""}`;
}

function nameOf(run, part) {
  return run.data.names[run.data.who[part.who][2]];
}

// The step in one sentence.
function sentence(run, record) {
  const { prefill, decode, held } = run.data.columns;
  const { index } = record;
  const computed = [
    prefill[index] ? `${count(prefill[index], "prefill token")}` : "",
    decode[index] ? `${count(decode[index], "decode")}` : "",
  ].filter(Boolean);
  return `Step ${record.step}: ${computed.join(" and ") || "nothing computed"}; ${record.running.length} running, ` +
    `${record.num_waiting} waiting; ${held[index]} of ${record.pool.references.length} blocks held; ` +
    `${milliseconds(run.took[index] * 1000)}.`;
}
