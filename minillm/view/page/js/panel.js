// Panel: one run's views, which all show the same step and follow the same sequence.

const LABELS = { wide: 132, narrow: 74 }; // pixels for the names of lanes
const NARROW = 460;

class Panel {
  constructor(run, clock, lens, theme, root, total) {
    Object.assign(this, { run, clock, lens, theme, root });
    this.axis = new Axis(run, lens, total);
    this.followed = run.rows[0] || null;
    this.version = 0; // of what the pictures under the cursor depend on
    this.listeners = [];
    const find = (name) => root.querySelector(`.${name}`);
    this.find = find;
    this.sayFacts();
    if (!run.length) return;
    this.timeline = new TimelineView(this, find("lanes"));
    this.charts = new ChartsView(this, find("charts"));
    this.batch = new BatchView(this, { strip: find("strip"), list: find("tokens"), detail: find("token-detail") });
    this.pool = new PoolView(this, {
      canvas: find("map"), detail: find("block-detail"), heading: find("table-heading"), table: find("block-table"),
    });
    this.requests = new RequestTable(this, find("requests-table"));
    this.scrolling = find("xscroll");
    this.scrolling.addEventListener("scroll", () => this.scrolled());
    for (const canvas of [this.timeline.canvas, this.charts.canvas]) this.takeGestures(canvas);
    this.drawLegend();
  }

  sayFacts() {
    const { facts, name } = this.run.data;
    this.find("name").textContent = name;
    const said = [
      ["model", facts.model], ["policy", facts.policy], ["admission", facts.admission],
      ["steps", this.run.length.toLocaleString("en")], ["sequences", this.run.rows.length.toLocaleString("en")],
      ["took", `${this.run.duration.toFixed(2)} s`],
      ["KV cache", `${facts.num_blocks.toLocaleString("en")} blocks of ${facts.block_size}`],
      ["budget", `${facts.max_batch_tokens} tokens, ${facts.max_sequences} sequences a step`],
      ["prefix caching", facts.prefix_caching ? "on" : "off"], ["watermark", String(facts.watermark)],
    ];
    this.find("facts").append(...said.map(([term, value]) => {
      const pair = element("div");
      const described = element("dd");
      described.append(element("bdi", "", value));
      pair.append(element("dt", "", term), described);
      return pair;
    }));
    this.find("estimate").textContent = `At best: ${this.run.data.estimate.source}`;
    this.find("empty").hidden = this.run.length > 0;
    this.find("views").hidden = this.run.length === 0;
  }

  follow(row) {
    this.followed = row;
    if (this.timeline) this.timeline.reveal(row);
    this.changed();
  }

  // The sequence so many lanes further down.
  followNext(lanes) {
    const { rows } = this.run;
    if (!rows.length) return;
    const at = this.followed ? this.followed.number : 0;
    this.follow(rows[Math.min(rows.length - 1, Math.max(0, at + lanes))]);
  }

  changed() {
    for (const listener of this.listeners) listener();
  }

  explain(text) {
    this.find("cell-detail").textContent = text;
  }

  // After a change of size, theme, or what the axis shows.
  arrange() {
    if (!this.run.length) return;
    this.width = this.find("plot").clientWidth;
    this.gutter = this.width < NARROW ? LABELS.narrow : LABELS.wide;
    this.axis.width = Math.max(1, this.width - this.gutter);
    this.axis.measure();
    this.scrolling.style.marginLeft = `${this.gutter}px`;
    this.scrolling.firstElementChild.style.width = `${this.axis.width * this.lens.zoom}px`;
    this.scrolling.hidden = this.lens.zoom <= 1;
    this.scrolling.scrollLeft = this.axis.offset;
    this.version += 1;
    if (this.batch) this.batch.drawn = undefined;
  }

  scrolled() {
    if (Math.abs(this.scrolling.scrollLeft - this.axis.offset) < 1) return;
    this.lens.look(this.scrolling.scrollLeft / (this.axis.width * this.lens.zoom));
    this.lens.moved();
  }

  takeGestures(canvas) {
    canvas.addEventListener("wheel", (event) => {
      if (event.ctrlKey) {
        event.preventDefault();
        const at = (event.clientX - canvas.getBoundingClientRect().left - this.gutter) / this.axis.width;
        this.lens.magnify(Math.exp(-event.deltaY / 300), Math.min(1, Math.max(0, at)), WIDEST / this.axis.width);
        this.lens.moved();
      } else if (event.deltaX || event.shiftKey) {
        event.preventDefault();
        this.scrolling.scrollLeft += event.deltaX || event.deltaY;
      }
    }, { passive: false });
  }

  // Scroll so that the chosen step is to be seen.
  reveal(index) {
    const { axis, lens } = this;
    const at = (this.clock.byTime ? this.clock.now : axis.begin[index]) * axis.scale;
    const x = at - axis.offset;
    if (x >= -0.5 && x + Math.min(axis.cellWidth(index), 8) <= axis.width + 8) return false;
    lens.look((at - axis.width * 0.25) / (axis.width * lens.zoom));
    return true;
  }

  draw() {
    if (!this.run.length) return;
    const index = this.clock.index(this.run);
    const record = this.run.stateAt(index);
    this.find("sentence").textContent = sentence(this.run, record) + (this.clock.isOver(this.run) ? " The run is over." : "");
    this.timeline.draw(index);
    this.timeline.canvas.setAttribute("aria-label", this.sayLanes(index));
    this.charts.draw(index);
    this.batch.draw(record);
    this.pool.draw(record);
    this.requests.draw(index);
    this.sayStory(record);
    const stages = Object.entries(record.milliseconds).map(([stage, took]) => `${stage} ${milliseconds(took)}`);
    this.find("stages").textContent = stages.join(" · ");
    const lines = happened(this.run, record).map((line) => element("li", "", line));
    this.find("happened").replaceChildren(...(lines.length ? lines : [element("li", "none", "nothing but computing")]));
  }

  sayLanes(index) {
    const states = this.run.rows.map((row) => this.run.cell(row, index)).filter(Boolean).map((cell) => cell.state);
    const told = this.run.look.states.map((state) => [state, states.filter((each) => each === state).length]);
    const here = told.filter(([, number]) => number).map(([state, number]) => `${number} ${state}`).join(", ");
    return `Timeline of ${count(this.run.rows.length, "sequence")}. In this step: ${here || "none"}.`;
  }

  // The followed sequence: what the step means to it, and its text so far.
  sayStory(record) {
    const { run, followed } = this;
    const heading = this.find("story-heading");
    heading.replaceChildren("Following ");
    if (!followed) return;
    heading.append(lettered(followed), element("bdi", "", followed.name));
    const cell = run.cell(followed, record.index);
    const { tokens, text, fresh } = run.answer(followed, record.index);
    const { arrival } = followed;
    const ended = followed.until !== null && record.index >= followed.until;
    const most = arrival ? ` of at most ${arrival.max_tokens}` : "";
    this.find("story-state").textContent =
      `${ended ? `ended: ${followed.reason}` : cell ? cell.state : "not there yet"}; ${count(tokens, "token")} out${most}`;
    const come = record.index >= followed.came;
    const unknown = arrival ? `(${count(arrival.num_prompt_tokens, "prompt token")})` : "(its prompt came before this trace)";
    setText(this.find("prompt"), come ? (arrival && arrival.prompt !== null ? arrival.prompt : unknown) : "");
    setText(this.find("answer"), text);
    setText(this.find("fresh"), fresh);
    const box = this.find("text");
    box.scrollTop = box.scrollHeight;
  }

  drawLegend() {
    const legend = this.find("legend");
    for (const state of this.run.look.states) {
      const item = element("li");
      const swatch = element("canvas");
      swatch.setAttribute("aria-hidden", "true");
      drawState(fitted(swatch, 18, 16), this.theme, state, 1, 2, 0, 14, 16);
      item.append(swatch, state);
      legend.append(item);
    }
  }
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
