// Charts: four quantities over the steps, below the timeline, with the same axis and cursor. They are drawn here because a
// charting library would have an axis of its own.

const GRAPH_HEIGHT = 54; // pixels
const HEAD_HEIGHT = 20; // the title and the legend: one line, or two if the chart is narrow
const NARROW_HEAD_HEIGHT = 36;
const NARROW_CHART_WIDTH = 700;

class ChartsView {
  constructor(panel, canvas) {
    this.panel = panel;
    this.canvas = canvas;
    this.layer = new Layer();
    this.charts = chartsOf(panel.run);
    canvas.addEventListener("click", (event) => {
      const x = event.clientX - canvas.getBoundingClientRect().left - panel.gutter;
      if (x >= 0) panel.clock.show(panel.run, panel.axis.indexAt(x));
    });
  }

  draw(index) {
    const { panel, charts } = this;
    const width = panel.width;
    this.narrow = width < NARROW_CHART_WIDTH;
    this.head = this.narrow ? NARROW_HEAD_HEIGHT : HEAD_HEIGHT;
    const band = this.head + GRAPH_HEIGHT;
    const height = charts.length * band;
    const context = resized(this.canvas, width, height);
    this.layer.drawOnto(context, width, height, [panel.version, width].join(), (layerContext) => {
      charts.forEach((chart, number) => this.drawChart(layerContext, chart, number * band, width));
    });
    charts.forEach((chart, number) => {
      drawCursor(context, panel, index, number * band + this.head, (number + 1) * band - 4);
      drawText(context, panel.theme, chart.describe(index), width - 2, number * band + 10, { weight: 600, align: "right" });
    });
    this.canvas.setAttribute("aria-label", `Charts over the steps. In this step: ${this.describe(index)}.`);
  }

  describe(index) {
    return this.charts.map((chart) => `${chart.title}: ${chart.describe(index)}`).join("; ");
  }

  drawChart(context, chart, top, width) {
    const { axis, gutter, theme } = this.panel;
    const floor = top + this.head + GRAPH_HEIGHT - 4;
    const room = GRAPH_HEIGHT - 8;
    const scale = room / (chart.max || 1);
    drawText(context, theme, chart.title, gutter, top + 10, { colour: theme.quiet });
    context.font = `400 11px ${theme.font}`;
    let x = gutter + (this.narrow ? 0 : context.measureText(chart.title).width + 12);
    const line = top + (this.narrow ? 26 : 10);
    for (const series of chart.series) {
      drawSwatch(context, theme, series, x, line - 5);
      drawText(context, theme, series.name, x + 16, line, { colour: theme.quiet });
      x += context.measureText(series.name).width + 30;
    }
    drawText(context, theme, chart.format(chart.max), gutter - 5, floor - room + 3, { size: 10, colour: theme.quiet, align: "right" });
    drawText(context, theme, "0", gutter - 5, floor - 3, { size: 10, colour: theme.quiet, align: "right" });
    context.save();
    context.beginPath();
    context.rect(gutter, top + this.head - 2, width - gutter, GRAPH_HEIGHT);
    context.clip();
    context.translate(gutter, 0);
    const [from, to] = axis.visibleRange();
    const stacked = new Map(); // heights of stacked series, by step
    for (const series of chart.series) {
      if (series.kind === "level") this.drawLevel(context, series, floor - series.value * scale);
      else this.drawSeries(context, series, from, to, floor, scale, stacked);
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

  drawSeries(context, series, from, to, floor, scale, stacked) {
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
      const base = stacked.get(index) || 0;
      const gap = width > 4 ? 1 : 0;
      context.fillStyle = colour;
      context.fillRect(x, floor - (base + value) * scale, Math.max(0.6, width - gap), value * scale);
      stacked.set(index, base + value);
    }
    context.stroke();
    context.setLineDash([]);
    if (series.hatched) this.drawHatching(context, series, from, to, floor, scale, stacked);
  }

  drawHatching(context, series, from, to, floor, scale, stacked) {
    const { axis } = this.panel;
    context.save();
    context.beginPath();
    for (let index = from; index < to; index++) {
      const barHeight = series.values[index] * scale;
      context.rect(axis.x(index), floor - stacked.get(index) * scale, axis.cellWidth(index), barHeight);
    }
    context.clip();
    hatch(context, 0, floor - GRAPH_HEIGHT, axis.width, GRAPH_HEIGHT, this.panel.theme.card, 5);
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

// The four charts: for each its title, its series, and a description of one step.
function chartsOf(run) {
  const { columns, estimate, facts } = run.data;
  const integer = (value) => String(Math.round(value));
  const decodeColour = (theme) => theme.stateColour("decode");
  const prefillColour = (theme) => theme.stateColour("prefill");
  const budget = facts.max_batch_tokens;
  const tokens = columns.prefill.map((prefill, index) => prefill + columns.decode[index]);
  const times = run.durations.map((seconds) => seconds * 1000);
  const best = estimate.milliseconds;
  const max = (...lists) => lists.reduce((highest, list) => list.reduce((a, b) => Math.max(a, b || 0), highest), 0);
  const showsBudget = budget <= 4 * max(tokens);
  return [
    {
      title: "tokens per step", max: showsBudget ? Math.max(budget, max(tokens)) : max(tokens), format: integer,
      series: [
        { name: "decode", kind: "bar", values: columns.decode, colour: decodeColour },
        { name: "prefill, on top", kind: "bar", values: columns.prefill, colour: prefillColour, hatched: true },
        ...(showsBudget ? [{ name: "budget", kind: "level", value: budget }] : []),
      ],
      describe: (index) => `${columns.prefill[index]} prefill, ${columns.decode[index]} decode`,
    },
    {
      title: "sequences", max: max(columns.running, columns.waiting), format: integer,
      series: [
        { name: "running", kind: "line", values: columns.running, colour: (theme) => theme.accent },
        { name: "waiting", kind: "line", values: columns.waiting, colour: (theme) => theme.quiet, dashed: true },
      ],
      describe: (index) => `${columns.running[index]} running, ${columns.waiting[index]} waiting`,
    },
    {
      title: "KV blocks", max: facts.num_blocks, format: integer,
      series: [
        { name: "held", kind: "bar", values: columns.held, colour: (theme) => theme.stateColour("finished") },
        { name: "cached", kind: "bar", values: columns.cached, colour: (theme) => theme.stateColour("finished"), hatched: true },
      ],
      describe: (index) => `${columns.held[index]} held, ${columns.cached[index]} cached, of ${facts.num_blocks}`,
    },
    {
      title: "time per step", max: axisMaximum(times), format: (value) => milliseconds(value),
      series: [
        { name: "measured", kind: "bar", values: times, colour: (theme) => theme.quiet },
        ...(best ? [{ name: "at best (roofline)", kind: "line", values: best, colour: (theme) => theme.stateColour("preempted") }] : []),
      ],
      describe: (index) => {
        const hasEstimate = best && best[index] !== null;
        return `${milliseconds(times[index])}${hasEstimate ? `, at best ${milliseconds(best[index])}` : ""}`;
      },
    },
  ];
}

// The highest value. If it is more than three times the 98th percentile, the axis ends lower and cuts it off, because the
// other values would be too small to see.
function axisMaximum(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const highest = sorted[sorted.length - 1] || 0;
  const p98 = sorted[Math.floor(sorted.length * 0.98)] || highest;
  return highest > 3 * p98 ? 1.5 * p98 : highest;
}
