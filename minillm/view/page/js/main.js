// The page: its runs, controls and keys. All changes between two animation frames are drawn together.

const { palette, runs: runData } = JSON.parse(document.getElementById("data").textContent);
const theme = new Theme(palette);
const runs = runData.map((data) => new Run(data, palette));
const clock = new Clock(runs);
const lens = new Lens();
const byId = (id) => document.getElementById(id);
const longestDuration = Math.max(...runs.map((run) => run.duration));
const panels = runs.map((run) => {
  const root = byId("panel").content.firstElementChild.cloneNode(true);
  byId("runs").append(root);
  return new Panel(run, clock, lens, theme, root, longestDuration);
});
const player = new Player(clock, () => updatePlayButton());
const maxSteps = Math.max(...runs.map((run) => run.length));
const SLIDER_MAX = 10_000; // positions of the slider over the duration of two runs
let active = panels[0]; // the panel that the up and down keys act on
let redrawQueued = false;
let announceTimer = 0;

function redraw() {
  if (redrawQueued) return;
  redrawQueued = true;
  requestAnimationFrame(() => {
    redrawQueued = false;
    frame();
  });
}

function frame() {
  const moved = panels.map((panel) => panel.run.length > 0 && panel.reveal(clock.index(panel.run))).some(Boolean);
  if (moved) panels.forEach((panel) => panel.arrange());
  panels.forEach((panel) => panel.draw());
  const slider = byId("slider");
  slider.value = clock.byTime ? (clock.now / (clock.end || 1)) * SLIDER_MAX : clock.now;
  const position = clock.byTime
    ? `${clock.now.toFixed(3)} of ${clock.end.toFixed(3)} s`
    : `step ${runs[0].data.first + clock.now} (${runs[0].data.first} to ${runs[0].data.first + clock.end})`;
  slider.setAttribute("aria-valuetext", position);
  byId("position").textContent = position;
}

// Announce the step to screen readers, but not while the run is playing.
function announce() {
  clearTimeout(announceTimer);
  if (player.playing) return;
  announceTimer = setTimeout(() => {
    const summaries = panels.filter((panel) => panel.run.length).map((panel) => {
      const name = panels.length > 1 ? `${panel.run.data.name}, ` : "";
      return name + stepSummary(panel.run, panel.run.recordAt(clock.index(panel.run)));
    });
    byId("live").textContent = summaries.join(" ");
  }, 300);
}

function updatePlayButton() {
  const button = byId("play");
  button.classList.toggle("playing", player.playing);
  button.setAttribute("aria-label", player.playing ? "pause" : "play");
  announce();
}

function rearrange() {
  theme.read();
  panels.forEach((panel) => panel.arrange());
  redraw();
}

// Set the initial zoom: cells of INITIAL_CELL_WIDTH, or the whole run if the axis shows time.
function resetZoom() {
  const [panel] = panels;
  panel.arrange();
  const zoom = lens.mode === "time" ? 1 : (maxSteps * INITIAL_CELL_WIDTH) / panel.axis.width;
  lens.zoom = Math.max(1, Math.min(zoom, MAX_WIDTH / panel.axis.width));
  lens.scrollTo(0);
  rearrange();
}

function magnify(factor) {
  const { axis } = panels[0];
  const cursor = axis.x(clock.index(panels[0].run)) / axis.width;
  lens.magnify(factor, Math.min(1, Math.max(0, cursor)), MAX_WIDTH / axis.width);
  rearrange();
}

function setUpControls() {
  const slider = byId("slider");
  slider.max = clock.byTime ? SLIDER_MAX : clock.end;
  slider.addEventListener("input", () => {
    clock.set(clock.byTime ? (Number(slider.value) / SLIDER_MAX) * clock.end : Number(slider.value));
  });
  const actions = {
    first: () => clock.set(0), back: () => clock.move(-1), play: () => player.toggle(), next: () => clock.move(1),
    last: () => clock.set(clock.end), zoomIn: () => magnify(2), zoomOut: () => magnify(0.5),
    theme: () => toggleTheme(),
  };
  for (const [id, action] of Object.entries(actions)) byId(id).addEventListener("click", action);
  const speeds = clock.byTime ? [0.05, 0.1, 0.25, 0.5, 1, 2, 5] : [2, 5, 10, 25, 50, 100];
  const speed = byId("speed");
  for (const value of speeds) {
    const option = element("option", "", clock.byTime ? `×${value}` : `${value} steps/s`);
    option.value = value;
    speed.append(option);
  }
  const preferred = clock.byTime ? clock.end / 20 : maxSteps / 30; // plays the whole run in 20 or 30 seconds
  speed.value = speeds.reduce((best, each) => (Math.abs(each - preferred) < Math.abs(best - preferred) ? each : best));
  player.speed = Number(speed.value);
  speed.addEventListener("change", () => (player.speed = Number(speed.value)));
  lens.mode = clock.byTime ? "time" : "step";
  byId("width").value = lens.mode;
  byId("width").closest("label").hidden = clock.byTime; // two runs share one time axis
  byId("width").addEventListener("change", (event) => {
    lens.mode = event.target.value;
    resetZoom();
  });
  lens.onChange = rearrange;
}

const KEYS = {
  ArrowLeft: () => clock.move(-1),
  ArrowRight: () => clock.move(1),
  PageUp: () => clock.move(-Math.max(10, Math.round(maxSteps / 20))),
  PageDown: () => clock.move(Math.max(10, Math.round(maxSteps / 20))),
  Home: () => clock.set(0),
  End: () => clock.set(clock.end),
  ArrowUp: () => active.followNext(-1),
  ArrowDown: () => active.followNext(1),
  " ": () => player.toggle(),
  "+": () => magnify(2),
  "-": () => magnify(0.5),
};

function onKey(event) {
  const { target } = event;
  if (event.ctrlKey || event.altKey || event.metaKey || target.matches("select")) return;
  if (target.matches("button") && event.key === " ") return; // the key presses the button
  if (target.matches(".scrolls") && /^(Arrow|Page)(Up|Down)$/.test(event.key)) return; // the key scrolls
  const action = KEYS[event.key];
  if (!action) return;
  event.preventDefault();
  action();
}

function toggleTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  rearrange();
}

document.title = `${runs.map((run) => run.data.name).join(" and ")} – minillm trace`;
document.body.classList.toggle("two", runs.length > 1);
if (runs.length > 1) {
  byId("comparison").hidden = false;
  compareRuns(byId("comparison-table"), runs);
}
panels.forEach((panel) => {
  panel.listeners.push(redraw);
  panel.root.addEventListener("focusin", () => (active = panel));
  panel.root.addEventListener("pointerdown", () => (active = panel));
});
clock.listeners.push(redraw, announce, () => {
  for (const { run, timeline } of panels) if (run.length) timeline.revealRunning(run.recordAt(clock.index(run)));
});
setUpControls();
document.addEventListener("keydown", onKey);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", rearrange);
let lastWidth = 0;
new ResizeObserver(([{ contentRect }]) => {
  if (contentRect.width !== lastWidth) rearrange(); // the height changes with every step and does not matter
  lastWidth = contentRect.width;
}).observe(byId("runs"));
resetZoom();
frame();

// For the browser's console: recordAt(0, 17) is the StepRecord of the first trace's 18th step.
window.minillm = { recordAt: (trace, index) => runs[trace].recordAt(index), Replay, clock, panels, frame };
