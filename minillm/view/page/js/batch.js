// BatchView: the step's tokens in and out, chunk after chunk, as they lay in the batch.

const SHOWN_FIRST = 72; // tokens of a long chunk that are shown, before it is opened,
const SHOWN_LAST = 8;
const MOST_OPEN = 4000; // and after; of a longer one the rest is only counted

class BatchView {
  constructor(panel, { strip, list, detail }) {
    Object.assign(this, { panel, strip, list, detail });
    this.opened = null; // the step whose long chunks are shown in full
    list.addEventListener("pointerover", (event) => this.explain(event.target));
    list.addEventListener("pointerleave", () => this.explain(null));
    list.addEventListener("focusin", (event) => this.explain(event.target));
    list.addEventListener("keydown", (event) => this.walk(event));
    list.addEventListener("click", (event) => this.click(event.target));
  }

  draw(record) {
    if (this.record === record && this.drawn === this.panel.followed) return;
    Object.assign(this, { record, drawn: this.panel.followed });
    const focused = this.tokens().indexOf(document.activeElement);
    let place = 0;
    const groups = record.chunks.map((chunk) => {
      const group = this.group(chunk, place);
      place += chunk.token_ids.length;
      return group;
    });
    this.list.replaceChildren(...groups);
    if (!groups.length) this.list.append(element("li", "none", "nothing was computed in this step"));
    const tokens = this.tokens();
    if (tokens.length) tokens[Math.max(0, Math.min(focused, tokens.length - 1))].tabIndex = 0;
    if (focused >= 0 && tokens.length) tokens[Math.min(focused, tokens.length - 1)].focus({ preventScroll: true });
    else this.explain(null);
    this.drawStrip(record, place);
  }

  tokens() {
    return [...this.list.querySelectorAll(".token")];
  }

  group(chunk, place) {
    const { run, followed } = this.panel;
    const row = run.rowOf(chunk.who, this.record.index);
    const group = element("li", `chunk ${chunk.phase}`);
    if (row === followed) group.classList.add("followed");
    const stop = chunk.start + chunk.token_ids.length;
    const head = element("button", "who");
    head.type = "button";
    head.dataset.row = row.number;
    head.append(lettered(row), element("bdi", "name", row.name));
    const range = chunk.token_ids.length > 1 ? `${chunk.start}–${stop - 1}` : String(chunk.start);
    group.append(head, element("span", "phase", `${chunk.phase} ${range}`));
    const text = element("span", "run");
    const [first, last] = this.opened === this.record.index ? [MOST_OPEN, 0] : [SHOWN_FIRST, SHOWN_LAST];
    const left = chunk.token_ids.length - first - last;
    chunk.token_ids.forEach((id, number) => {
      if (left > 0 && number === first) text.append(this.rest(left, last > 0));
      if (left > 0 && number >= first && number < first + left) return;
      const position = chunk.start + number;
      text.append(this.token(run.tokenText(row, position), id, `token ${place + number} of the step, position ${position} of ${row.name}`));
    });
    group.append(text);
    if (chunk.sampled.length) {
      group.append(element("span", "arrow", "→"));
      for (const token of chunk.sampled) {
        const whose = chunk.sampled.length > 1 ? `, for completion ${token.completion}` : "";
        const logprob = token.logprob === null ? "" : `, log-probability ${token.logprob}`;
        const out = this.token(token.token_text, token.token_id, `comes out${whose}${logprob}`);
        out.classList.add("out");
        group.append(out);
      }
    }
    return group;
  }

  token(text, id, says) {
    const token = element("span", "token", text === null || text === "" ? `#${id}` : text);
    token.tabIndex = -1;
    token.dataset.says = `“${text ?? ""}”, id ${id}: ${says}.`;
    return token;
  }

  // What stands for so many tokens: a button that shows them, if it can.
  rest(left, opens) {
    const more = element(opens ? "button" : "span", "more", `… ${count(left, "more token")} …`);
    if (opens) more.type = "button";
    return more;
  }

  click(target) {
    const head = target.closest(".who");
    if (head) this.panel.follow(this.panel.run.rows[head.dataset.row]);
    if (target.matches("button.more")) this.open(target);
  }

  // Show the step's long chunks in full, and go on at the first token that stood behind the opener.
  open(more) {
    const chunk = [...this.list.children].indexOf(more.closest(".chunk"));
    this.opened = this.record.index;
    this.drawn = undefined;
    this.draw(this.record);
    this.stepOn(this.list.children[chunk].querySelectorAll(".token")[SHOWN_FIRST]);
  }

  // The one token that Tab reaches is the one that has the focus.
  stepOn(token) {
    for (const other of this.list.querySelectorAll('.token[tabindex="0"]')) other.tabIndex = -1;
    token.tabIndex = 0;
    token.focus();
  }

  explain(target) {
    const says = target && target.dataset && target.dataset.says;
    this.detail.textContent = says || "Point at a token, or step in with Tab and walk with the arrow keys.";
    if (says && document.activeElement === target) target.setAttribute("aria-label", says);
  }

  // Arrow keys inside the row go from token to token, and do not move the clock.
  walk(event) {
    if (!event.target.matches(".token") || event.ctrlKey || event.altKey || event.metaKey) return;
    const tokens = this.tokens();
    const here = tokens.indexOf(event.target);
    const to = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: tokens.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    this.stepOn(tokens[Math.max(0, Math.min(to, tokens.length - 1))]);
  }

  // The whole row to scale: what each chunk takes of the step's budget.
  drawStrip(record, total) {
    const { run, theme } = this.panel;
    const width = this.strip.parentElement.clientWidth;
    const context = fitted(this.strip, width, 14);
    const budget = run.data.facts.max_batch_tokens;
    const scale = width / Math.max(total, Math.min(budget, 4 * total), 1);
    context.fillStyle = theme.line;
    context.fillRect(0, 0, width, 14);
    let x = 0;
    for (const chunk of record.chunks) {
      const row = run.rowOf(chunk.who, record.index);
      const wide = chunk.token_ids.length * scale;
      context.fillStyle = row.colour;
      context.fillRect(x, 0, Math.max(0.5, wide - (wide > 3 ? 1 : 0)), 14);
      if (wide > 14) write(context, theme, row.letter, x + wide / 2, 7.5, { colour: "#000", weight: 600, align: "center" });
      x += wide;
    }
    this.strip.setAttribute("aria-label", `${count(total, "token")} of ${count(record.chunks.length, "sequence")}, of a budget of ${budget}.`);
  }
}
