// Drawing on canvases: sharp on every screen, in the theme's colours; each state in a shape of its own as well.

// Theme: the colours that the style sheet has for light and dark, and those of states, which are the same in both.
class Theme {
  constructor(look) {
    this.look = look;
    this.read();
  }

  read() {
    const style = getComputedStyle(document.documentElement);
    const of = (name) => style.getPropertyValue(`--${name}`).trim();
    this.text = of("text");
    this.quiet = of("quiet");
    this.line = of("line");
    this.card = of("card");
    this.soft = of("soft");
    this.accent = of("accent");
    this.font = of("font");
  }

  state(state) {
    return this.look.colours[state] || this.quiet;
  }
}

// Make the canvas as large as asked for, in CSS pixels, and empty; returns its context.
function fitted(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

function write(context, theme, text, x, y, { size = 11, colour = theme.text, weight = 400, align = "left" } = {}) {
  context.font = `${weight} ${size}px ${theme.font}`;
  context.textAlign = align;
  context.textBaseline = "middle";
  context.fillStyle = colour;
  context.fillText(text, x, y);
}

// The beginning of a text, as much as finds room in so many pixels.
function shortened(context, text, width) {
  const most = Math.ceil(2 * width); // letters: all but those that lie on others are wider than half a pixel
  if (text.length <= most && context.measureText(text).width <= width) return text;
  const letters = [...text.slice(0, most)];
  while (letters.length && context.measureText(`${letters.join("")}…`).width > width) letters.pop();
  return `${letters.join("")}…`;
}

// Slanted lines over a rectangle: what is shared, or computed again.
function hatch(context, x, y, width, height, colour, gap = 4) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.beginPath();
  for (let at = x - height - ((x - height) % gap); at < x + width; at += gap) {
    context.moveTo(at, y + height);
    context.lineTo(at + height, y);
  }
  context.stroke();
  context.restore();
}

// The letter of a sequence on its colour.
function badge(context, theme, row, x, y, size) {
  context.fillStyle = row.colour;
  context.beginPath();
  context.roundRect(x, y, size, size, 3);
  context.fill();
  write(context, theme, row.letter, x + size / 2, y + size / 2 + 0.5, {
    size: size * 0.72, colour: "#000", weight: 600, align: "center",
  });
}

// A sequence in a step, or in several alike: a block for what was computed at once, half of one for a decode, a line for
// who got nothing, and a sign for what happened.
function drawState(context, theme, state, share, x, y, width, height) {
  const colour = theme.state(state);
  const middle = y + height / 2;
  context.fillStyle = colour;
  if (state === "prefill" || state === "recompute") {
    const tall = Math.max(5, Math.round((height - 4) * (0.45 + 0.55 * share)));
    context.fillRect(x, y + height - 2 - tall, width, tall);
    if (state === "recompute") hatch(context, x, y + height - 2 - tall, width, tall, "#000a", 4);
  } else if (state === "decode") {
    context.fillRect(x, middle - 3, width, 6);
  } else if (state === "held up") {
    context.fillRect(x, middle - 1, width, 2);
  } else if (state === "waiting") {
    context.save();
    context.strokeStyle = colour;
    context.setLineDash([1.5, 3]);
    context.lineWidth = 1.5;
    context.beginPath();
    context.moveTo(x, middle);
    context.lineTo(x + width, middle);
    context.stroke();
    context.restore();
  } else {
    const half = Math.min(width, 9) / 2; // a preemption comes before the step computes, an end after it
    drawSign(context, state, colour, state === "preempted" ? x + half : x + width - half, middle);
  }
}

// A cross for a preemption, a tick for an end, a bar for an end before its time: on a disc, however narrow the cell.
function drawSign(context, state, colour, x, y) {
  context.fillStyle = colour;
  context.beginPath();
  context.arc(x, y, 5.5, 0, 7);
  context.fill();
  context.strokeStyle = "#fff";
  context.lineWidth = 1.6;
  context.beginPath();
  if (state === "preempted") {
    context.moveTo(x - 2.2, y - 2.2);
    context.lineTo(x + 2.2, y + 2.2);
    context.moveTo(x + 2.2, y - 2.2);
    context.lineTo(x - 2.2, y + 2.2);
  } else if (state === "finished") {
    context.moveTo(x - 2.7, y);
    context.lineTo(x - 0.8, y + 2.2);
    context.lineTo(x + 2.8, y - 2.2);
  } else {
    context.moveTo(x, y - 3);
    context.lineTo(x, y + 0.8);
    context.moveTo(x, y + 2.4);
    context.lineTo(x, y + 3.4);
  }
  context.stroke();
}

// A picture that changes seldom, under what changes with every step.
class Layer {
  constructor() {
    this.canvas = document.createElement("canvas");
    this.key = null;
  }

  // Draw it anew, if what it depends on has changed; and put it on the context.
  onto(context, width, height, key, draw) {
    if (key !== this.key) {
      this.key = key;
      draw(fitted(this.canvas, width, height));
    }
    if (width > 0 && height > 0) context.drawImage(this.canvas, 0, 0, width, height);
  }
}
