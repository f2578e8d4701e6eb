// PoolView: the KV cache as a map, a tile a block, and the followed sequence's block table drawn into it.

const TALLEST = 300; // pixels of the map before its tiles get smaller
const MOST_TILES = 40_000;
const GIVEN_BACK = -1; // in a block table, a group's first blocks, once no query reaches them any more
const MOST_LEGS = 96; // of the path through a block table; more would be a tangle

class PoolView {
  constructor(panel, { canvas, detail, heading, table }) {
    Object.assign(this, { panel, canvas, detail, heading, table });
    this.pointed = null; // a block
    canvas.addEventListener("pointermove", (event) => this.point(this.blockAt(event)));
    canvas.addEventListener("pointerleave", () => this.point(null));
    canvas.addEventListener("click", (event) => this.choose(this.blockAt(event)));
    const over = (event) => this.point(event.target.dataset.block === undefined ? null : Number(event.target.dataset.block));
    table.addEventListener("pointerover", over);
    table.addEventListener("pointerleave", () => this.point(null));
  }

  blockAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.tile);
    const block = Math.floor((event.clientY - box.top) / this.tile) * this.columns + column;
    return column < this.columns && block < this.record.pool.references.length ? block : null;
  }

  point(block) {
    if (block === this.pointed) return;
    this.pointed = block;
    this.draw(this.record);
  }

  choose(block) {
    const owners = this.owners.get(block);
    if (owners) this.panel.follow(owners[0]);
  }

  draw(record) {
    this.record = record;
    const { panel, canvas } = this;
    const { run, followed } = panel;
    const blocks = Math.min(MOST_TILES, record.pool.references.length);
    const width = canvas.parentElement.clientWidth;
    this.tile = Math.max(6, Math.min(40, Math.floor(Math.sqrt((width * TALLEST) / blocks))));
    this.columns = Math.max(1, Math.floor(width / this.tile));
    this.owners = ownersOf(run, record);
    const cached = new Set(record.pool.cached);
    const context = fitted(canvas, this.columns * this.tile, Math.ceil(blocks / this.columns) * this.tile);
    const own = record.running.find((part) => run.rowOf(part.who, record.index) === followed);
    const table = own ? own.block_table : [];
    const holds = held(table);
    const gone = table.length - holds.length;
    const places = new Map(table.map((block, place) => [block, place])); // one that is given back is never asked for
    const { references } = record.pool;
    const labelled = [];
    for (let block = 0; block < blocks; block++) {
      this.drawTile(context, block, references[block], cached.has(block));
      if (references[block]) labelled.push(block);
    }
    this.drawPath(context, holds); // over the colours, and under the letters
    for (const block of labelled) this.label(context, block, references[block], places.get(block));
    this.outline(context, this.pointed, 2.5);
    this.sayTable(table, record);
    const all = count(references.length, "block");
    const left = blocks < references.length ? `Drawn are the first ${blocks.toLocaleString("en")} of ${all}.` : "";
    this.detail.textContent = this.pointed === null ? left : this.describe(this.pointed, cached, places);
    canvas.setAttribute("aria-label",
      `Block pool: ${run.data.columns.held[record.index]} of ${references.length} blocks held, ${cached.size} cached. ` +
      (followed ? `${followed.name} holds ${holds.length ? `blocks ${holds.join(", ")}` : "none"}` : "") +
      (followed && gone ? `, and has given back ${gone}` : "") + (followed ? "." : ""));
  }

  corner(block) {
    return [(block % this.columns) * this.tile, Math.floor(block / this.columns) * this.tile];
  }

  drawTile(context, block, references, isCached) {
    const { theme } = this.panel;
    const [x, y] = this.corner(block);
    const size = this.tile - 1;
    if (references) {
      const owner = this.ownerOf(block, references);
      context.fillStyle = owner ? owner.colour : "#ddd";
      context.fillRect(x, y, size, size);
      if (!owner) hatch(context, x, y, size, size, "#777", 4);
    } else if (isCached) {
      context.strokeStyle = theme.quiet;
      context.lineWidth = 1;
      context.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
      context.fillStyle = theme.quiet;
      context.fillRect(x + size / 2 - 1.5, y + size / 2 - 1.5, 3, 3);
    } else {
      context.fillStyle = theme.line;
      context.fillRect(x, y, size, size);
    }
  }

  // The one row that holds it; null if it is shared.
  ownerOf(block, references) {
    const owners = this.owners.get(block) || [];
    return references === 1 && owners.length === 1 ? owners[0] : null;
  }

  // Who holds it, or how many do; where there is room, also which block of the followed sequence's table it is.
  label(context, block, references, place) {
    const { theme } = this.panel;
    if (place !== undefined) this.outline(context, block, this.tile >= 14 ? 2 : 1.5);
    if (this.tile < 14) return;
    const owner = this.ownerOf(block, references);
    const [left, top] = this.corner(block);
    const numbered = place !== undefined && this.tile >= 22;
    const x = left + (this.tile - 1) / 2 - (numbered ? 4 : 0);
    const y = top + (this.tile - 1) / 2;
    context.fillStyle = owner ? owner.colour : "#ddd"; // so that no line runs through the letter
    context.fillRect(x - 5, y - 6, numbered ? 15 : 10, 13);
    const text = owner ? owner.letter : String(references);
    write(context, theme, text, x, y + 0.5, { size: 11, colour: "#000", weight: 600, align: "center" });
    if (numbered) write(context, theme, String(place), x + 13, y + 6, { size: 9, colour: "#000", align: "right" });
  }

  outline(context, block, width) {
    if (block === null) return;
    const [x, y] = this.corner(block);
    context.strokeStyle = this.panel.theme.text;
    context.lineWidth = width;
    context.strokeRect(x + width / 2 - 0.5, y + width / 2 - 0.5, this.tile - width, this.tile - width);
  }

  // From block to block, in the table's order.
  drawPath(context, table) {
    if (table.length < 2 || table.length > MOST_LEGS || this.tile < 9) return;
    const centre = (block) => this.corner(block).map((edge) => edge + (this.tile - 1) / 2);
    context.strokeStyle = this.panel.theme.text;
    context.globalAlpha = 0.45;
    context.lineWidth = 1.25;
    context.beginPath();
    context.moveTo(...centre(table[0]));
    for (const block of table.slice(1)) context.lineTo(...centre(block));
    context.stroke();
    context.globalAlpha = 1;
  }

  // The block table as a list of block numbers, row after row; what it has given back is one item, in words.
  sayTable(table, record) {
    const { followed, run } = this.panel;
    this.heading.textContent = followed ? `Block table of ${followed.name}` : "Block table";
    const holds = held(table);
    const gone = table.length - holds.length;
    const says = [table, holds.map((block) => record.pool.references[block])].join(";");
    if (says === this.says) return;
    this.says = says;
    const { block_size: size, windows } = run.data.facts;
    const groups = windows.length;
    const kept = [...table.keys()].filter((place) => table[place] !== GIVEN_BACK);
    this.table.replaceChildren(...kept.map((place) => {
      const block = table[place];
      const row = Math.floor(place / groups);
      const item = element("li", "", String(block));
      item.dataset.block = block;
      item.dataset.place = place;
      item.title = `positions ${row * size} to ${(row + 1) * size - 1}${ofGroup(place % groups, windows)} lie in block ${block}`;
      const holders = record.pool.references[block];
      if (holders > 1) {
        item.classList.add("shared");
        item.append(element("small", "", ` ×${holders}`));
      }
      return item;
    }));
    if (gone) {
      const item = element("li", "gone", `${gone} given back`);
      item.title = windows.map((window, group) => {
        const rows = table.filter((block, place) => block === GIVEN_BACK && place % groups === group).length;
        return rows ? `no query reaches positions 0 to ${rows * size - 1}${ofGroup(group, windows)} any more` : "";
      }).filter(Boolean).join("; ");
      this.table.prepend(item);
    }
    if (!table.length) this.table.append(element("li", "none", "it holds no blocks in this step"));
  }

  describe(block, cached, places) {
    const owners = this.owners.get(block) || [];
    const held = owners.map((row) => row.name).join(", ") || count(this.record.pool.references[block], "table");
    const place = places.has(block) ? `; number ${places.get(block)} of the table below` : "";
    if (this.record.pool.references[block]) return `Block ${block}: held by ${held}${place}.`;
    return cached.has(block) ? `Block ${block}: cached, number ${this.record.pool.cached.indexOf(block) + 1} to be evicted.` : `Block ${block}: free.`;
  }
}

// Which layers a block of a table is of, in words, where there is more than one group of them.
function ofGroup(group, windows) {
  if (windows.length === 1) return "";
  const window = windows[group];
  return ` of group ${group} of the layers (${window === null ? "which see all" : `with a window of ${window}`})`;
}

// The blocks that a table still names.
function held(table) {
  return table.filter((block) => block !== GIVEN_BACK);
}

// For each block: the rows whose tables name it.
function ownersOf(run, record) {
  const owners = new Map();
  for (const part of record.running) {
    const row = run.rowOf(part.who, record.index);
    for (const block of row ? held(part.block_table) : []) {
      if (!owners.has(block)) owners.set(block, []);
      owners.get(block).push(row);
    }
  }
  return owners;
}
