// Charts: four numbers of every step, under the timeline and on its axis, with its cursor. A charting library would bring
// an axis of its own, so these are drawn here: a few rectangles each.

const GRAPH = 54; // pixels that a chart takes
const HEAD = 20; // and what is written over it: a line, or two where it is narrow
const NARROW_HEAD = 36;
const NARROW_CHART = 700;

class ChartsView {
  constructor(panel, canvas) {
    this.panel = panel;
    this.canvas = canvas;
    this.layer = new Layer();
    this.charts = charts(panel.run);
    canvas.addEventListener("click", (event) => {
      const x = event.clientX - canvas.getBoundingClientRect().left - panel.gutter;
      if (x >= 0) panel.clock.show(panel.run, panel.axis.indexAt(x));
    });
  }

  draw(index) {
    const { panel, charts } = this;
    const width = panel.width;
    this.narrow = width < NARROW_CHART;
    this.head = this.narrow ? NARROW_HEAD : HEAD;
    const band = this.head + GRAPH;
    const height = charts.length * band;
    const context = fitted(this.canvas, width, height);
    this.layer.onto(context, width, height, [panel.version, width].join(), (under) => {
      charts.forEach((chart, number) => this.drawChart(under, chart, number * band, width));
    });
    charts.forEach((chart, number) => {
      drawCursor(context, panel.theme, panel.axis, panel.gutter, index, number * band + this.head, (number + 1) * band - 4);
      const said = chart.say(index);
      write(context, panel.theme, said, width - 2, number * band + 10, { weight: 600, align: "right" });
    });
    this.canvas.setAttribute("aria-label", `Charts over the steps. At this one: ${this.say(index)}.`);
  }

  say(index) {
    return this.charts.map((chart) => `${chart.title}: ${chart.say(index)}`).join("; ");
  }

  drawChart(context, chart, top, width) {
    const { axis, gutter, theme } = this.panel;
    const floor = top + this.head + GRAPH - 4;
    const room = GRAPH - 8;
    const scale = room / (chart.most || 1);
    write(context, theme, chart.title, gutter, top + 10, { colour: theme.quiet });
    context.font = `400 11px ${theme.font}`;
    let x = gutter + (this.narrow ? 0 : context.measureText(chart.title).width + 12);
    const line = top + (this.narrow ? 26 : 10);
    for (const series of chart.series) {
      drawSwatch(context, theme, series, x, line - 5);
      write(context, theme, series.name, x + 16, line, { colour: theme.quiet });
      x += context.measureText(series.name).width + 30;
    }
    write(context, theme, chart.unit(chart.most), gutter - 5, floor - room + 3, { size: 10, colour: theme.quiet, align: "right" });
    write(context, theme, "0", gutter - 5, floor - 3, { size: 10, colour: theme.quiet, align: "right" });
    context.save();
    context.beginPath();
    context.rect(gutter, top + this.head - 2, width - gutter, GRAPH);
    context.clip();
    context.translate(gutter, 0);
    const [from, to] = axis.seen();
    const floors = new Map(); // of stacked series
    for (const series of chart.series) {
      if (series.kind === "level") this.drawLevel(context, series, floor - series.value * scale);
      else this.drawSeries(context, series, from, to, floor, scale, floors);
    }
    context.restore();
    context.fillStyle = theme.line;
    context.fillRect(gutter, floor, width - gutter, 1);
  }

  drawLevel(context, series, y) {
    context.strokeStyle = this.panel.theme.text;
    context.lineWidth = 1;
    context.setLineDash([5, 4]);
    context.beginPath();
    context.moveTo(0, y);
    context.lineTo(this.panel.axis.width, y);
    context.stroke();
    context.setLineDash([]);
  }

  drawSeries(context, series, from, to, floor, scale, floors) {
    const { axis, theme } = this.panel;
    const colour = series.colour(theme);
    context.strokeStyle = colour;
    context.lineWidth = 1.75;
    context.setLineDash(series.dashed ? [4, 3] : []);
    context.beginPath();
    for (let index = from; index < to; index++) {
      const value = series.values[index];
      if (value === null) continue;
      const x = axis.x(index);
      const width = axis.cellWidth(index);
      if (series.kind === "line") {
        const y = floor - value * scale;
        if (index === from || series.values[index - 1] === null) context.moveTo(x, y);
        context.lineTo(x, y);
        context.lineTo(x + width, y);
        continue;
      }
      const below = floors.get(index) || 0;
      const gap = width > 4 ? 1 : 0;
      context.fillStyle = colour;
      context.fillRect(x, floor - (below + value) * scale, Math.max(0.6, width - gap), value * scale);
      floors.set(index, below + value);
    }
    context.stroke();
    context.setLineDash([]);
    if (series.hatched) this.drawHatching(context, series, from, to, floor, scale, floors);
  }

  drawHatching(context, series, from, to, floor, scale, floors) {
    const { axis } = this.panel;
    context.save();
    context.beginPath();
    for (let index = from; index < to; index++) {
      const tall = series.values[index] * scale;
      context.rect(axis.x(index), floor - floors.get(index) * scale, axis.cellWidth(index), tall);
    }
    context.clip();
    hatch(context, 0, floor - GRAPH, axis.width, GRAPH, this.panel.theme.card, 5);
    context.restore();
  }
}

function drawSwatch(context, theme, series, x, y) {
  const colour = series.kind === "level" ? theme.text : series.colour(theme);
  if (series.kind === "bar") {
    context.fillStyle = colour;
    context.fillRect(x, y, 11, 10);
    if (series.hatched) hatch(context, x, y, 11, 10, theme.card, 5);
    return;
  }
  context.strokeStyle = colour;
  context.lineWidth = 1.75;
  context.setLineDash(series.kind === "level" || series.dashed ? [4, 3] : []);
  context.beginPath();
  context.moveTo(x, y + 5);
  context.lineTo(x + 12, y + 5);
  context.stroke();
  context.setLineDash([]);
}

// The four of them: titles, series, and what each says at a step.
function charts(run) {
  const { columns, estimate, facts } = run.data;
  const whole = (value) => String(Math.round(value));
  const blue = (theme) => theme.state("decode");
  const orange = (theme) => theme.state("prefill");
  const budget = facts.max_batch_tokens;
  const tokens = columns.prefill.map((prefill, index) => prefill + columns.decode[index]);
  const times = run.took.map((seconds) => seconds * 1000);
  const best = estimate.milliseconds;
  const most = (...lists) => lists.reduce((high, list) => list.reduce((a, b) => Math.max(a, b || 0), high), 0);
  const budgetSeen = budget <= 4 * most(tokens);
  return [
    {
      title: "tokens a step", most: budgetSeen ? Math.max(budget, most(tokens)) : most(tokens), unit: whole,
      series: [
        { name: "decode", kind: "bar", values: columns.decode, colour: blue },
        { name: "prefill, on top", kind: "bar", values: columns.prefill, colour: orange, hatched: true },
        ...(budgetSeen ? [{ name: "budget", kind: "level", value: budget }] : []),
      ],
      say: (index) => `${columns.prefill[index]} prefill, ${columns.decode[index]} decode`,
    },
    {
      title: "sequences", most: most(columns.running, columns.waiting), unit: whole,
      series: [
        { name: "running", kind: "line", values: columns.running, colour: (theme) => theme.accent },
        { name: "waiting", kind: "line", values: columns.waiting, colour: (theme) => theme.quiet, dashed: true },
      ],
      say: (index) => `${columns.running[index]} running, ${columns.waiting[index]} waiting`,
    },
    {
      title: "KV blocks", most: facts.num_blocks, unit: whole,
      series: [
        { name: "held", kind: "bar", values: columns.held, colour: (theme) => theme.state("finished") },
        { name: "cached", kind: "bar", values: columns.cached, colour: (theme) => theme.state("finished"), hatched: true },
      ],
      say: (index) => `${columns.held[index]} held, ${columns.cached[index]} cached, of ${facts.num_blocks}`,
    },
    {
      title: "time a step", most: ceiling(times), unit: (value) => milliseconds(value),
      series: [
        { name: "took", kind: "bar", values: times, colour: (theme) => theme.quiet },
        ...(best ? [{ name: "at best (roofline)", kind: "line", values: best, colour: (theme) => theme.state("preempted") }] : []),
      ],
      say: (index) => {
        const known = best && best[index] !== null;
        return `${milliseconds(times[index])}${known ? `, at best ${milliseconds(best[index])}` : ""}`;
      },
    },
  ];
}

// The highest value, unless it stands far above nearly all others: it would press them flat, and is cut off instead.
function ceiling(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const most = sorted[sorted.length - 1] || 0;
  const nearly = sorted[Math.floor(sorted.length * 0.98)] || most;
  return most > 3 * nearly ? 1.5 * nearly : most;
}
