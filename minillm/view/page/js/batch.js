// BatchView: the step's input and output tokens, chunk by chunk, in the order of the batch.

const NUM_FIRST = 72; // tokens of a long chunk that are shown at its beginning and at its end
const NUM_LAST = 8;
const MAX_EXPANDED = 4000; // tokens that are shown after a click; further ones are only counted

class BatchView {
  constructor(panel, { strip, list, detail }) {
    Object.assign(this, { panel, strip, list, detail });
    this.expandedStep = null; // the step whose long chunks are shown in full
    list.addEventListener("pointerover", (event) => this.explain(event.target));
    list.addEventListener("pointerleave", () => this.explain(null));
    list.addEventListener("focusin", (event) => this.explain(event.target));
    list.addEventListener("keydown", (event) => this.moveFocus(event));
    list.addEventListener("click", (event) => this.click(event.target));
  }

  draw(record) {
    if (this.record === record && this.drawnTrack === this.panel.followed) return;
    Object.assign(this, { record, drawnTrack: this.panel.followed });
    const focused = this.tokens().indexOf(document.activeElement);
    let numTokens = 0;
    const chunks = record.chunks.map((chunk) => {
      const item = this.chunkElement(chunk, numTokens);
      numTokens += chunk.token_ids.length;
      return item;
    });
    this.list.replaceChildren(...chunks);
    if (!chunks.length) this.list.append(element("li", "none", "nothing was computed in this step"));
    const tokens = this.tokens();
    if (tokens.length) tokens[Math.max(0, Math.min(focused, tokens.length - 1))].tabIndex = 0;
    if (focused >= 0 && tokens.length) tokens[Math.min(focused, tokens.length - 1)].focus({ preventScroll: true });
    else this.explain(null);
    this.drawStrip(record, numTokens);
  }

  tokens() {
    return [...this.list.querySelectorAll(".token")];
  }

  // offset: number of tokens in the batch before the chunk.
  chunkElement(chunk, offset) {
    const { run, followed } = this.panel;
    const track = run.trackOf(chunk.sequence, this.record.index);
    const item = element("li", `chunk ${chunk.phase}`);
    if (track === followed) item.classList.add("followed");
    const stop = chunk.start + chunk.token_ids.length;
    const head = element("button", "sequence");
    head.type = "button";
    head.dataset.track = track.number;
    head.append(letterElement(track), element("bdi", "name", track.name));
    const range = chunk.token_ids.length > 1 ? `${chunk.start}–${stop - 1}` : String(chunk.start);
    item.append(head, element("span", "phase", `${chunk.phase} ${range}`));
    const inputs = element("span", "run");
    const [numFirst, numLast] = this.expandedStep === this.record.index ? [MAX_EXPANDED, 0] : [NUM_FIRST, NUM_LAST];
    const numHidden = chunk.token_ids.length - numFirst - numLast;
    chunk.token_ids.forEach((id, number) => {
      if (numHidden > 0 && number === numFirst) inputs.append(this.hiddenElement(numHidden, numLast > 0));
      if (numHidden > 0 && number >= numFirst && number < numFirst + numHidden) return;
      const position = chunk.start + number;
      const description = `token ${offset + number} of the step, position ${position} of ${track.name}`;
      inputs.append(this.tokenElement(run.tokenText(track, position), id, description));
    });
    item.append(inputs);
    if (chunk.sampled.length) {
      item.append(element("span", "arrow", "→"));
      for (const token of chunk.sampled) {
        const completion = chunk.sampled.length > 1 ? ` for completion ${token.completion}` : "";
        const logprob = token.logprob === null ? "" : `, log-probability ${token.logprob}`;
        const output = this.tokenElement(token.token_text, token.token_id, `sampled${completion}${logprob}`);
        output.classList.add("out");
        item.append(output);
      }
    }
    return item;
  }

  tokenElement(text, id, description) {
    const token = element("span", "token", text === null || text === "" ? `#${id}` : text);
    token.tabIndex = -1;
    token.dataset.description = `“${text ?? ""}”, id ${id}: ${description}.`;
    return token;
  }

  // Stands for hidden tokens. It is a button if a click can show them.
  hiddenElement(numHidden, canExpand) {
    const more = element(canExpand ? "button" : "span", "more", `… ${countOf(numHidden, "more token")} …`);
    if (canExpand) more.type = "button";
    return more;
  }

  click(target) {
    const head = target.closest(".sequence");
    if (head) this.panel.follow(this.panel.run.tracks[head.dataset.track]);
    if (target.matches("button.more")) this.expand(target);
  }

  // Show the step's long chunks in full, and focus the first token that was hidden behind the button.
  expand(more) {
    const chunk = [...this.list.children].indexOf(more.closest(".chunk"));
    this.expandedStep = this.record.index;
    this.drawnTrack = undefined;
    this.draw(this.record);
    this.focusToken(this.list.children[chunk].querySelectorAll(".token")[NUM_FIRST]);
  }

  // Only the focused token is reachable with Tab.
  focusToken(token) {
    for (const other of this.list.querySelectorAll('.token[tabindex="0"]')) other.tabIndex = -1;
    token.tabIndex = 0;
    token.focus();
  }

  explain(target) {
    const description = target && target.dataset && target.dataset.description;
    this.detail.textContent = description || "Point at a token, or focus one with Tab and move with the arrow keys.";
    if (description && document.activeElement === target) target.setAttribute("aria-label", description);
  }

  // Arrow keys move the focus from token to token. They do not move the clock.
  moveFocus(event) {
    if (!event.target.matches(".token") || event.ctrlKey || event.altKey || event.metaKey) return;
    const tokens = this.tokens();
    const current = tokens.indexOf(event.target);
    const next = { ArrowLeft: current - 1, ArrowRight: current + 1, Home: 0, End: tokens.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    this.focusToken(tokens[Math.max(0, Math.min(next, tokens.length - 1))]);
  }

  // Draw the batch to scale: each chunk's share of the step's budget.
  drawStrip(record, numTokens) {
    const { run, theme } = this.panel;
    const width = this.strip.parentElement.clientWidth;
    const context = resized(this.strip, width, 14);
    const budget = run.data.facts.max_batch_tokens;
    const scale = width / Math.max(numTokens, Math.min(budget, 4 * numTokens), 1);
    context.fillStyle = theme.line;
    context.fillRect(0, 0, width, 14);
    let x = 0;
    for (const chunk of record.chunks) {
      const track = run.trackOf(chunk.sequence, record.index);
      const chunkWidth = chunk.token_ids.length * scale;
      context.fillStyle = track.colour;
      context.fillRect(x, 0, Math.max(0.5, chunkWidth - (chunkWidth > 3 ? 1 : 0)), 14);
      if (chunkWidth > 14) {
        const style = { colour: "#000", weight: 600, align: "center" };
        drawText(context, theme, track.letter, x + chunkWidth / 2, 7.5, style);
      }
      x += chunkWidth;
    }
    const sequences = countOf(record.chunks.length, "sequence");
    this.strip.setAttribute("aria-label", `${countOf(numTokens, "token")} of ${sequences}, with a budget of ${budget}.`);
  }
}
