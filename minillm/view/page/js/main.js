// The page: its runs, its controls and its keys. A frame is drawn once, however much has changed since the last.

const { look, runs: parts } = JSON.parse(document.getElementById("data").textContent);
const theme = new Theme(look);
const runs = parts.map((part) => new Run(part, look));
const clock = new Clock(runs);
const lens = new Lens();
const byId = (id) => document.getElementById(id);
const total = Math.max(...runs.map((run) => run.duration));
const panels = runs.map((run) => {
  const root = byId("panel").content.firstElementChild.cloneNode(true);
  byId("runs").append(root);
  return new Panel(run, clock, lens, theme, root, total);
});
const player = new Player(clock, () => sayPlaying());
const longest = Math.max(...runs.map((run) => run.length));
const SLIDER = 10_000; // places of the slider over the seconds of two runs
let active = panels[0]; // whom up and down are for
let queued = false;
let spoken = 0;

function redraw() {
  if (queued) return;
  queued = true;
  requestAnimationFrame(() => {
    queued = false;
    frame();
  });
}

function frame() {
  const moved = panels.map((panel) => panel.run.length > 0 && panel.reveal(clock.index(panel.run))).some(Boolean);
  if (moved) panels.forEach((panel) => panel.arrange());
  panels.forEach((panel) => panel.draw());
  const slider = byId("slider");
  slider.value = clock.byTime ? (clock.now / (clock.end || 1)) * SLIDER : clock.now;
  const here = clock.byTime
    ? `${clock.now.toFixed(3)} of ${clock.end.toFixed(3)} s`
    : `step ${runs[0].data.first + clock.now} of ${runs[0].data.first} to ${runs[0].data.first + clock.end}`;
  slider.setAttribute("aria-valuetext", here);
  byId("here").textContent = here;
}

// Tell who listens rather than looks, but not every frame of a film.
function speak() {
  clearTimeout(spoken);
  if (player.playing) return;
  spoken = setTimeout(() => {
    const said = panels.filter((panel) => panel.run.length).map((panel) => {
      const whose = panels.length > 1 ? `${panel.run.data.name}, ` : "";
      return whose + sentence(panel.run, panel.run.stateAt(clock.index(panel.run)));
    });
    byId("live").textContent = said.join(" ");
  }, 300);
}

function sayPlaying() {
  const button = byId("play");
  button.classList.toggle("playing", player.playing);
  button.setAttribute("aria-label", player.playing ? "pause" : "play");
  speak();
}

function rearrange() {
  theme.read();
  panels.forEach((panel) => panel.arrange());
  redraw();
}

// Every step wide enough to be seen apart, if that is asked for; else all of the run.
function fit() {
  const [panel] = panels;
  panel.arrange();
  const wanted = lens.mode === "time" ? 1 : (longest * CELL) / panel.axis.width;
  lens.zoom = Math.max(1, Math.min(wanted, WIDEST / panel.axis.width));
  lens.look(0);
  rearrange();
}

function magnify(factor) {
  const { axis } = panels[0];
  const at = axis.x(clock.index(panels[0].run)) / axis.width;
  lens.magnify(factor, Math.min(1, Math.max(0, at)), WIDEST / axis.width);
  rearrange();
}

function setUpControls() {
  const slider = byId("slider");
  slider.max = clock.byTime ? SLIDER : clock.end;
  slider.addEventListener("input", () => {
    clock.set(clock.byTime ? (Number(slider.value) / SLIDER) * clock.end : Number(slider.value));
  });
  const actions = {
    first: () => clock.set(0), back: () => clock.move(-1), play: () => player.toggle(), next: () => clock.move(1),
    last: () => clock.set(clock.end), closer: () => magnify(2), farther: () => magnify(0.5),
    theme: () => switchTheme(),
  };
  for (const [id, action] of Object.entries(actions)) byId(id).addEventListener("click", action);
  const speeds = clock.byTime ? [0.05, 0.1, 0.25, 0.5, 1, 2, 5] : [2, 5, 10, 25, 50, 100];
  const speed = byId("speed");
  for (const value of speeds) {
    const option = element("option", "", clock.byTime ? `×${value}` : `${value} steps/s`);
    option.value = value;
    speed.append(option);
  }
  const wanted = clock.byTime ? clock.end / 20 : longest / 30; // the whole run in half a minute
  speed.value = speeds.reduce((best, each) => (Math.abs(each - wanted) < Math.abs(best - wanted) ? each : best));
  player.speed = Number(speed.value);
  speed.addEventListener("change", () => (player.speed = Number(speed.value)));
  lens.mode = clock.byTime ? "time" : "step";
  byId("width").value = lens.mode;
  byId("width").closest("label").hidden = clock.byTime; // on one clock, a second is as wide in both
  byId("width").addEventListener("change", (event) => {
    lens.mode = event.target.value;
    fit();
  });
  lens.moved = rearrange;
}

const KEYS = {
  ArrowLeft: () => clock.move(-1),
  ArrowRight: () => clock.move(1),
  PageUp: () => clock.move(-Math.max(10, Math.round(longest / 20))),
  PageDown: () => clock.move(Math.max(10, Math.round(longest / 20))),
  Home: () => clock.set(0),
  End: () => clock.set(clock.end),
  ArrowUp: () => active.followNext(-1),
  ArrowDown: () => active.followNext(1),
  " ": () => player.toggle(),
  "+": () => magnify(2),
  "-": () => magnify(0.5),
};

function pressed(event) {
  const inside = event.target;
  if (event.ctrlKey || event.altKey || event.metaKey || inside.matches("select")) return;
  if (inside.matches("button") && event.key === " ") return; // it presses the button
  if (inside.matches(".scrolls") && /^(Arrow|Page)(Up|Down)$/.test(event.key)) return; // it scrolls
  const action = KEYS[event.key];
  if (!action) return;
  event.preventDefault();
  action();
}

function switchTheme() {
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
clock.listeners.push(redraw, speak, () => {
  for (const panel of panels) if (panel.run.length) panel.timeline.revealRunning(panel.run.stateAt(clock.index(panel.run)));
});
setUpControls();
document.addEventListener("keydown", pressed);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", rearrange);
let widthBefore = 0;
new ResizeObserver(([{ contentRect }]) => {
  if (contentRect.width !== widthBefore) rearrange(); // heights change with every step
  widthBefore = contentRect.width;
}).observe(byId("runs"));
fit();
frame();

// For whoever wants to look closer, from the browser's console: the StepRecord of a step, as all views draw it.
window.minillm = { stateAt: (trace, index) => runs[trace].stateAt(index), Replay, clock, panels, frame };
