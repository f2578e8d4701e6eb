// Panel: the views of one run. They all show the same step and follow the same sequence.

const GUTTER = { wide: 132, narrow: 74 }; // pixels for the names of tracks
const NARROW_PANEL_WIDTH = 460;

class Panel {
  constructor(run, clock, lens, theme, root, duration) {
    Object.assign(this, { run, clock, lens, theme, root });
    this.axis = new Axis(run, lens, duration);
    this.followed = run.tracks[0] || null;
    this.version = 0; // changes whenever the pictures below the cursor must be redrawn
    this.listeners = [];
    const find = (name) => root.querySelector(`.${name}`);
    this.find = find;
    this.showFacts();
    if (!run.length) return;
    this.timeline = new TimelineView(this, find("tracks"));
    this.charts = new ChartsView(this, find("charts"));
    this.batch = new BatchView(this, { strip: find("strip"), list: find("tokens"), detail: find("token-detail") });
    this.pool = new PoolView(this, {
      canvas: find("map"), detail: find("block-detail"), heading: find("table-heading"), table: find("block-table"),
    });
    this.requests = new RequestTable(this, find("requests-table"));
    this.scrollbar = find("xscroll");
    this.scrollbar.addEventListener("scroll", () => this.scrolled());
    for (const canvas of [this.timeline.canvas, this.charts.canvas]) this.addGestures(canvas);
    this.drawLegend();
  }

  showFacts() {
    const { facts, name } = this.run.data;
    this.find("name").textContent = name;
    const items = [
      ["model", facts.model], ["policy", facts.policy], ["admission", facts.admission],
      ["steps", this.run.length.toLocaleString("en")], ["sequences", this.run.tracks.length.toLocaleString("en")],
      ["duration", `${this.run.duration.toFixed(2)} s`],
      ["KV cache", `${facts.num_blocks.toLocaleString("en")} blocks of ${facts.block_size}`],
      ["budget", `${facts.max_batch_tokens} tokens and ${facts.max_sequences} sequences per step`],
      ["prefix caching", facts.prefix_caching ? "on" : "off"], ["watermark", String(facts.watermark)],
    ];
    this.find("facts").append(...items.map(([term, value]) => {
      const pair = element("div");
      const description = element("dd");
      description.append(element("bdi", "", value));
      pair.append(element("dt", "", term), description);
      return pair;
    }));
    this.find("estimate").textContent = `Best time per step: ${this.run.data.estimate.source}`;
    this.find("empty").hidden = this.run.length > 0;
    this.find("views").hidden = this.run.length === 0;
  }

  follow(track) {
    this.followed = track;
    if (this.timeline) this.timeline.reveal(track);
    this.changed();
  }

  // Follow the sequence that is `offset` tracks below.
  followNext(offset) {
    const { tracks } = this.run;
    if (!tracks.length) return;
    const current = this.followed ? this.followed.number : 0;
    this.follow(tracks[Math.min(tracks.length - 1, Math.max(0, current + offset))]);
  }

  changed() {
    for (const listener of this.listeners) listener();
  }

  explain(text) {
    this.find("cell-detail").textContent = text;
  }

  // Update the layout after a change of size, theme or axis.
  arrange() {
    if (!this.run.length) return;
    this.width = this.find("plot").clientWidth;
    this.gutter = this.width < NARROW_PANEL_WIDTH ? GUTTER.narrow : GUTTER.wide;
    this.axis.width = Math.max(1, this.width - this.gutter);
    this.axis.measure();
    this.scrollbar.style.marginLeft = `${this.gutter}px`;
    this.scrollbar.firstElementChild.style.width = `${this.axis.width * this.lens.zoom}px`;
    this.scrollbar.hidden = this.lens.zoom <= 1;
    this.scrollbar.scrollLeft = this.axis.offset;
    this.version += 1;
    if (this.batch) this.batch.drawnTrack = undefined;
  }

  scrolled() {
    if (Math.abs(this.scrollbar.scrollLeft - this.axis.offset) < 1) return;
    this.lens.scrollTo(this.scrollbar.scrollLeft / (this.axis.width * this.lens.zoom));
    this.lens.onChange();
  }

  addGestures(canvas) {
    canvas.addEventListener("wheel", (event) => {
      if (event.ctrlKey) {
        event.preventDefault();
        const pointer = (event.clientX - canvas.getBoundingClientRect().left - this.gutter) / this.axis.width;
        this.lens.magnify(Math.exp(-event.deltaY / 300), Math.min(1, Math.max(0, pointer)), MAX_WIDTH / this.axis.width);
        this.lens.onChange();
      } else if (event.deltaX || event.shiftKey) {
        event.preventDefault();
        this.scrollbar.scrollLeft += event.deltaX || event.deltaY;
      }
    }, { passive: false });
  }

  // Scroll so that the chosen step is visible. Returns whether the axis has moved.
  reveal(index) {
    const { axis, lens } = this;
    const position = (this.clock.byTime ? this.clock.now : axis.begin[index]) * axis.scale;
    const x = position - axis.offset;
    if (x >= -0.5 && x + Math.min(axis.cellWidth(index), 8) <= axis.width + 8) return false;
    lens.scrollTo((position - axis.width * 0.25) / (axis.width * lens.zoom));
    return true;
  }

  draw() {
    if (!this.run.length) return;
    const index = this.clock.index(this.run);
    const record = this.run.recordAt(index);
    this.find("summary").textContent = stepSummary(this.run, record) + (this.clock.isOver(this.run) ? " The run has ended." : "");
    this.timeline.draw(index);
    this.timeline.canvas.setAttribute("aria-label", this.describeTracks(index));
    this.charts.draw(index);
    this.batch.draw(record);
    this.pool.draw(record);
    this.requests.draw(index);
    this.updateFollowed(record);
    const stages = Object.entries(record.milliseconds).map(([stage, duration]) => `${stage} ${milliseconds(duration)}`);
    this.find("stages").textContent = stages.join(" · ");
    const lines = eventTexts(this.run, record).map((line) => element("li", "", line));
    this.find("events").replaceChildren(...(lines.length ? lines : [element("li", "none", "no events")]));
  }

  describeTracks(index) {
    const { run } = this;
    const states = run.tracks.map((track) => run.cell(track, index)).filter(Boolean).map((cell) => cell.state);
    const counts = run.palette.states.map((state) => [state, states.filter((each) => each === state).length]);
    const present = counts.filter(([, number]) => number).map(([state, number]) => `${number} ${state}`).join(", ");
    return `Timeline of ${countOf(run.tracks.length, "sequence")}. In this step: ${present || "none"}.`;
  }

  // Show the followed sequence: its state, and its text so far.
  updateFollowed(record) {
    const { run, followed } = this;
    const heading = this.find("followed-heading");
    heading.replaceChildren("Following ");
    if (!followed) return;
    heading.append(letterElement(followed), element("bdi", "", followed.name));
    const cell = run.cell(followed, record.index);
    const { tokens, text, newText } = run.answer(followed, record.index);
    const { arrival } = followed;
    const ended = followed.end !== null && record.index >= followed.end;
    const limit = arrival ? ` of at most ${arrival.max_tokens}` : "";
    this.find("followed-state").textContent =
      `${ended ? `ended: ${followed.finish_reason}` : cell ? cell.state : "not arrived"}; ${countOf(tokens, "output token")}${limit}`;
    const hasArrived = record.index >= followed.created;
    const substitute = arrival ? `(${countOf(arrival.num_prompt_tokens, "prompt token")})` : "(it arrived before this trace began)";
    setText(this.find("prompt"), !hasArrived ? "" : arrival && arrival.prompt !== null ? arrival.prompt : substitute);
    setText(this.find("answer"), text);
    setText(this.find("new-text"), newText);
    const box = this.find("text");
    box.scrollTop = box.scrollHeight;
  }

  drawLegend() {
    const legend = this.find("legend");
    for (const state of this.run.palette.states) {
      const item = element("li");
      const swatch = element("canvas");
      swatch.setAttribute("aria-hidden", "true");
      drawState(resized(swatch, 18, 16), this.theme, state, 1, { x: 2, y: 0, width: 14, height: 16 });
      item.append(swatch, state);
      legend.append(item);
    }
  }
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
