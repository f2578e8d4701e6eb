// Tables: the metrics of every request, sortable, and the metrics of two runs side by side.

const COLUMNS = [ // heading, meaning, number format; in the order of REQUEST_METRICS in ../data.py
  ["prompt", "tokens of the prompt", "count"],
  ["cached", "prompt tokens found in the prefix cache", "count"],
  ["out", "tokens generated, in all completions", "count"],
  ["queue", "time from arrival to admission", "milliseconds"],
  ["TTFT", "time to first token", "milliseconds"],
  ["TPOT", "time per output token after the first", "milliseconds"],
  ["total", "time from arrival to end", "milliseconds"],
  ["preempted", "number of preemptions", "count"],
  ["recomputed", "tokens computed again after preemptions", "count"],
];

class RequestTable {
  constructor(panel, table) {
    this.panel = panel;
    this.table = table;
    this.sorted = { column: null, descending: false };
    const { request_metrics: metrics, requests, sequences } = panel.run.data;
    const tracks = new Map(); // of each request's first completion; if its id was reused, of the last request
    for (const track of panel.run.tracks) {
      if (track.arrival && track.nameIndex === sequences[track.arrival.sequence][2]) {
        tracks.set(sequences[track.arrival.sequence][0], track);
      }
    }
    this.lines = metrics.map(([request, reason, ...values], number) => ({
      number, name: requests[request], reason: reason || "", values, track: tracks.get(request) || null,
    }));
    this.body = element("tbody");
    this.lines.forEach((line) => (line.element = this.lineElement(line)));
    table.append(this.headElement(), this.body);
    this.sort(null);
    this.body.addEventListener("click", (event) => {
      const line = this.lines.find((each) => each.element.contains(event.target));
      if (line && line.track) panel.follow(line.track);
    });
  }

  headElement() {
    const row = element("tr");
    const columns = [
      ["request", "in order of arrival"], ["state", "in the chosen step"], ...COLUMNS, ["reason", "finish reason"],
    ];
    this.headings = columns.map(([heading, meaning], column) => {
      const cell = element("th");
      cell.scope = "col";
      const button = element("button", "", heading);
      button.type = "button";
      button.title = meaning;
      button.addEventListener("click", () => this.sort(column));
      cell.append(button);
      row.append(cell);
      return cell;
    });
    const head = element("thead");
    head.append(row);
    return head;
  }

  lineElement(line) {
    const row = element("tr");
    const name = element("th");
    name.scope = "row";
    const button = element("button", "sequence");
    button.type = "button";
    if (line.track) button.append(letterElement(line.track));
    button.append(element("bdi", "name", line.name));
    name.append(button);
    line.state = element("td", "state");
    row.append(name, line.state);
    COLUMNS.forEach(([, , format], number) => {
      row.append(element("td", "number", formatted(format, line.values[number])));
    });
    row.append(element("td", "", line.reason));
    return row;
  }

  // Sort by a column; a second click on the same column reverses the order. Missing values come last.
  sort(column) {
    const { sorted } = this;
    sorted.descending = column !== null && column === sorted.column ? !sorted.descending : false;
    sorted.column = column;
    const value = (line) => {
      if (column === null) return line.number;
      if (column === 0) return line.name;
      if (column === 1) return line.state.textContent;
      return column < COLUMNS.length + 2 ? line.values[column - 2] : line.reason;
    };
    const ordered = [...this.lines].sort((a, b) => compare(value(a), value(b), sorted.descending) || a.number - b.number);
    this.body.replaceChildren(...ordered.map((line) => line.element));
    this.headings.forEach((heading, number) => {
      const order = sorted.descending ? "descending" : "ascending";
      heading.setAttribute("aria-sort", number === column ? order : "none");
    });
  }

  draw(index) {
    const { run, followed } = this.panel;
    for (const line of this.lines) {
      const { track } = line;
      const cell = track && run.cell(track, index);
      const state = cell ? cell.state : track && track.end !== null && index >= track.end ? "ended" : "not arrived";
      if (line.state.textContent !== state) line.state.textContent = state;
      const chosen = track && track === followed;
      if (line.chosen !== chosen) line.element.classList.toggle("chosen", (line.chosen = chosen));
      line.element.setAttribute("aria-current", chosen ? "true" : "false");
    }
  }
}

function compare(a, b, descending) {
  const isMissing = (value) => value === null || value === "";
  if (isMissing(a) || isMissing(b)) return isMissing(a) - isMissing(b);
  const order = typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true });
  return descending ? -order : order;
}

// Fill a table with the metrics of two runs, one line per run.
function compareRuns(table, runs) {
  const head = element("tr");
  head.append(headingElement("col", "run"), ...runs[0].data.run_metrics.map(([label]) => headingElement("col", label)));
  const lines = runs.map((run) => {
    const line = element("tr");
    const cells = run.data.run_metrics.map(([, format, value]) => element("td", "number", formatted(format, value)));
    line.append(headingElement("row", run.data.name), ...cells);
    return line;
  });
  const [top, body] = [element("thead"), element("tbody")];
  top.append(head);
  body.append(...lines);
  table.append(top, body);
}

function headingElement(scope, text) {
  const cell = element("th", "", text);
  cell.scope = scope;
  return cell;
}
