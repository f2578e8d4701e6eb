// Canvas drawing: sharp on every screen, in the theme's colours. States differ in shape as well as in colour.

// Theme: the colours of the style sheet, which depend on light or dark, and the colours of states, which do not.
class Theme {
  constructor(palette) {
    this.palette = palette;
    this.read();
  }

  read() {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["text", "quiet", "line", "card", "soft", "accent", "font"]) {
      this[name] = style.getPropertyValue(`--${name}`).trim();
    }
  }

  stateColour(state) {
    return this.palette.colours[state] || this.quiet;
  }
}

// Clear the canvas and resize it, in CSS pixels. Returns its context.
function resized(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [pixelWidth, pixelHeight] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== pixelWidth || canvas.height !== pixelHeight) {
    canvas.width = pixelWidth;
    canvas.height = pixelHeight;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

function drawText(context, theme, text, x, y, { size = 11, colour = theme.text, weight = 400, align = "left" } = {}) {
  context.font = `${weight} ${size}px ${theme.font}`;
  context.textAlign = align;
  context.textBaseline = "middle";
  context.fillStyle = colour;
  context.fillText(text, x, y);
}

// The longest prefix of a text that fits in a width, with an ellipsis if the text is cut.
function truncated(context, text, width) {
  const maxLetters = Math.ceil(2 * width); // letters are wider than half a pixel, except for combining ones
  if (text.length <= maxLetters && context.measureText(text).width <= width) return text;
  const letters = [...text.slice(0, maxLetters)];
  while (letters.length && context.measureText(`${letters.join("")}…`).width > width) letters.pop();
  return `${letters.join("")}…`;
}

// Hatch a rectangle: for shared blocks and recomputed tokens.
function hatch(context, x, y, width, height, colour, gap = 4) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.beginPath();
  for (let left = x - height - ((x - height) % gap); left < x + width; left += gap) {
    context.moveTo(left, y + height);
    context.lineTo(left + height, y);
  }
  context.stroke();
  context.restore();
}

// A sequence's letter on its colour.
function drawBadge(context, theme, track, x, y, size) {
  context.fillStyle = track.colour;
  context.beginPath();
  context.roundRect(x, y, size, size, 3);
  context.fill();
  drawText(context, theme, track.letter, x + size / 2, y + size / 2 + 0.5, {
    size: size * 0.72, colour: "#000", weight: 600, align: "center",
  });
}

// Draw a sequence's state in one or several steps: a bar for a prefill, a thin bar for a decode, a line for a stalled
// sequence, and a sign for an event. `share` is the chunk's share of the step's budget.
function drawState(context, theme, state, share, { x, y, width, height }) {
  const colour = theme.stateColour(state);
  const middle = y + height / 2;
  context.fillStyle = colour;
  if (state === "prefill" || state === "recompute") {
    const barHeight = Math.max(5, Math.round((height - 4) * (0.45 + 0.55 * share)));
    context.fillRect(x, y + height - 2 - barHeight, width, barHeight);
    if (state === "recompute") hatch(context, x, y + height - 2 - barHeight, width, barHeight, "#000a", 4);
  } else if (state === "decode") {
    context.fillRect(x, middle - 3, width, 6);
  } else if (state === "stalled") {
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
    const half = Math.min(width, 9) / 2; // a preemption precedes the step's computation, an end follows it
    drawSign(context, state, colour, state === "preempted" ? x + half : x + width - half, middle);
  }
}

// Draw a cross for a preemption, a tick for a finish, an exclamation mark for an early end. The disc behind it is
// visible however narrow the cell is.
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

// Layer: a picture that rarely changes, drawn below the parts that change with every step.
class Layer {
  constructor() {
    this.canvas = document.createElement("canvas");
    this.key = null;
  }

  // Redraw the layer if `key`, which stands for everything it depends on, has changed; then copy it onto the context.
  drawOnto(context, width, height, key, draw) {
    if (key !== this.key) {
      this.key = key;
      draw(resized(this.canvas, width, height));
    }
    if (width > 0 && height > 0) context.drawImage(this.canvas, 0, 0, width, height);
  }
}
