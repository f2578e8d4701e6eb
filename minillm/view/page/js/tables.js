// Tables: how every request fared, sortable; and two runs beside each other in numbers.

const COLUMNS = [ // heading, what it means, how it is written; in the order in which ../data.py has the fields
  ["prompt", "tokens of the prompt", "count"],
  ["cached", "prompt tokens found in the cache", "count"],
  ["out", "tokens generated, of all its completions", "count"],
  ["queue", "time from arrival to admission", "milliseconds"],
  ["TTFT", "time to first token", "milliseconds"],
  ["TPOT", "time per output token after the first", "milliseconds"],
  ["total", "time from arrival to end", "milliseconds"],
  ["preempted", "how often it lost its blocks", "count"],
  ["again", "tokens computed again after that", "count"],
];

class RequestTable {
  constructor(panel, table) {
    this.panel = panel;
    this.table = table;
    this.sorted = { column: null, down: false };
    const { metrics, requests, who } = panel.run.data;
    const rows = new Map(); // of each request's first completion; where its id was used again, the last that bears it
    for (const row of panel.run.rows) {
      if (row.arrival && row.nameNumber === who[row.arrival.who][2]) rows.set(who[row.arrival.who][0], row);
    }
    this.lines = metrics.map(([request, reason, ...values], number) => ({
      number, name: requests[request], reason: reason || "", values, row: rows.get(request) || null,
    }));
    this.body = element("tbody");
    this.lines.forEach((line) => (line.element = this.line(line)));
    table.append(this.head(), this.body);
    this.sort(null);
    this.body.addEventListener("click", (event) => {
      const line = this.lines.find((each) => each.element.contains(event.target));
      if (line && line.row) panel.follow(line.row);
    });
  }

  head() {
    const row = element("tr");
    const all = [["request", "in order of arrival"], ["now", "at the chosen step"], ...COLUMNS, ["ended", "why it ended"]];
    this.heads = all.map(([heading, meaning], column) => {
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

  line(line) {
    const row = element("tr");
    const name = element("th");
    name.scope = "row";
    const button = element("button", "who");
    button.type = "button";
    if (line.row) button.append(lettered(line.row));
    button.append(element("bdi", "name", line.name));
    name.append(button);
    line.now = element("td", "now");
    row.append(name, line.now);
    COLUMNS.forEach(([, , kind], number) => row.append(element("td", "number", formatted(kind, line.values[number]))));
    row.append(element("td", "", line.reason));
    return row;
  }

  // By a column; the same one once more turns the order round. What has no value comes last.
  sort(column) {
    const { sorted } = this;
    sorted.down = column !== null && column === sorted.column ? !sorted.down : false;
    sorted.column = column;
    const value = (line) => {
      if (column === null) return line.number;
      if (column === 0) return line.name;
      if (column === 1) return line.now.textContent;
      return column < COLUMNS.length + 2 ? line.values[column - 2] : line.reason;
    };
    const ordered = [...this.lines].sort((a, b) => compare(value(a), value(b), sorted.down) || a.number - b.number);
    this.body.replaceChildren(...ordered.map((line) => line.element));
    this.heads.forEach((head, number) => {
      head.setAttribute("aria-sort", number === column ? (sorted.down ? "descending" : "ascending") : "none");
    });
  }

  draw(index) {
    const { run, followed } = this.panel;
    for (const line of this.lines) {
      const { row } = line;
      const cell = row && run.cell(row, index);
      const now = cell ? cell.state : row && row.until !== null && index >= row.until ? "ended" : "to come";
      if (line.now.textContent !== now) line.now.textContent = now;
      const chosen = row && row === followed;
      if (line.chosen !== chosen) line.element.classList.toggle("chosen", (line.chosen = chosen));
      line.element.setAttribute("aria-current", chosen ? "true" : "false");
    }
  }
}

function compare(a, b, down) {
  const missing = (value) => value === null || value === "";
  if (missing(a) || missing(b)) return missing(a) - missing(b);
  const order = typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true });
  return down ? -order : order;
}

// Two runs in numbers, a line each.
function compareRuns(table, runs) {
  const head = element("tr");
  head.append(heading("col", "run"), ...runs[0].data.run.map(([label]) => heading("col", label)));
  const lines = runs.map((run) => {
    const line = element("tr");
    const cells = run.data.run.map(([, kind, value]) => element("td", "number", formatted(kind, value)));
    line.append(heading("row", run.data.name), ...cells);
    return line;
  });
  const [top, body] = [element("thead"), element("tbody")];
  top.append(head);
  body.append(...lines);
  table.append(top, body);
}

function heading(scope, text) {
  const cell = element("th", "", text);
  cell.scope = scope;
  return cell;
}
