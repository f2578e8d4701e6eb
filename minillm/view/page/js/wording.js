// Wording: number formats, and sentences that describe a step.

function element(tag, className = "", text = "") {
  const created = document.createElement(tag);
  if (className) created.className = className;
  if (text) created.textContent = text;
  return created;
}

// An element with a track's letter on its colour.
function letterElement(track) {
  const letter = element("span", "letter", track.letter);
  letter.style.background = track.colour;
  letter.setAttribute("aria-hidden", "true");
  return letter;
}

function countOf(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
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

function formatted(format, value) {
  return value === null ? "–" : FORMATS[format](value);
}

// The events of a step, one sentence each.
function eventTexts(run, record) {
  const name = (event) => sequenceName(run, event);
  const { evicted, copies } = record.pool;
  return [
    ...record.arrived.map((event) => `${name(event)} arrived with ${countOf(event.num_prompt_tokens, "prompt token")}, ${requestText(event)}`),
    ...record.aborted.map((request) => `${request} was aborted`),
    ...record.admitted.map((event) => {
      const cached = event.num_cached_tokens ? `, ${event.num_cached_tokens} of them cached` : "";
      return `${name(event)} was ${event.after_preemption ? "readmitted" : "admitted"} with ${countOf(event.num_tokens, "token")}${cached}`;
    }),
    ...record.preempted.map((event) => `${name(event)} was preempted with ${countOf(event.num_computed, "token")} computed`),
    ...record.finished.map((event) => `${name(event)} ended: ${event.error ? `${event.reason}, ${event.error}` : event.reason}`),
    ...copies.map(({ source, target }) => `block ${source} was copied to ${target} before a write`),
    ...(evicted.length ? [`${evicted.length === 1 ? "block" : "blocks"} ${evicted.join(", ")} evicted from the cache`] : []),
  ];
}

// The limits of a request, and its parameters that differ from the defaults.
function requestText(arrival) {
  const params = Object.entries(arrival.params).map(([name, value]) => `${name} ${typeof value === "object" ? JSON.stringify(value) : value}`);
  const details = [
    arrival.n === 1 ? "" : countOf(arrival.n, "completion"),
    arrival.priority ? `priority ${arrival.priority}` : "",
    ...params,
  ].filter(Boolean);
  return `at most ${countOf(arrival.max_tokens, "output token")}${details.length ? ` (${details.join(", ")})` : ""}`;
}

function sequenceName(run, event) {
  return run.data.names[run.data.sequences[event.sequence][2]];
}

// A summary of the step in one sentence.
function stepSummary(run, record) {
  const { prefill, decode, held } = run.data.columns;
  const { index } = record;
  const computed = [
    prefill[index] ? countOf(prefill[index], "prefill token") : "",
    decode[index] ? countOf(decode[index], "decode token") : "",
  ].filter(Boolean);
  return `Step ${record.step}: ${computed.join(" and ") || "nothing computed"}; ${record.running.length} running, ` +
    `${record.num_waiting} waiting; ${held[index]} of ${record.pool.references.length} blocks held; ` +
    `${milliseconds(run.durations[index] * 1000)}.`;
}
