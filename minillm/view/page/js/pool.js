// PoolView: the KV cache as a map with one tile per block, and the block tables of the followed sequence.

const MAX_MAP_HEIGHT = 300; // pixels; beyond this the tiles shrink
const MAX_TILES = 40_000;
const FREED = -1; // in a block table, in place of a block that no later query can read
const MAX_PATH = 96; // longest table whose path is drawn; longer paths are unreadable

class PoolView {
  constructor(panel, { canvas, detail, heading, table }) {
    Object.assign(this, { panel, canvas, detail, heading, table });
    this.pointed = null; // the block under the pointer
    canvas.addEventListener("pointermove", (event) => this.point(this.blockAt(event)));
    canvas.addEventListener("pointerleave", () => this.point(null));
    canvas.addEventListener("click", (event) => this.choose(this.blockAt(event)));
    table.addEventListener("pointerover", ({ target: { dataset } }) => {
      this.point(dataset.block === undefined ? null : Number(dataset.block));
    });
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
    const { references } = record.pool;
    const numTiles = Math.min(MAX_TILES, references.length);
    const width = canvas.parentElement.clientWidth;
    this.tile = Math.max(6, Math.min(40, Math.floor(Math.sqrt((width * MAX_MAP_HEIGHT) / numTiles))));
    this.columns = Math.max(1, Math.floor(width / this.tile));
    this.owners = blockOwners(run, record);
    const cached = new Set(record.pool.cached);
    const context = resized(canvas, this.columns * this.tile, Math.ceil(numTiles / this.columns) * this.tile);
    const own = record.running.find(({ sequence }) => run.trackOf(sequence, record.index) === followed);
    const tables = own ? own.block_tables : [];
    const indices = new Map(tables.flatMap((table) => [...table.entries()].map(([index, block]) => [block, index])));
    const held = [];
    for (let block = 0; block < numTiles; block++) {
      this.drawTile(context, block, references[block], cached.has(block));
      if (references[block]) held.push(block);
    }
    for (const table of tables) this.drawPath(context, liveBlocks(table)); // above the colours, below the letters
    for (const block of held) this.drawLabel(context, block, references[block], indices.get(block));
    this.outline(context, this.pointed, 2.5);
    this.updateTables(tables, record);
    const total = countOf(references.length, "block");
    const hidden = numTiles < references.length ? `Only the first ${numTiles.toLocaleString("en")} of ${total} are drawn.` : "";
    this.detail.textContent = this.pointed === null ? hidden : this.describe(this.pointed, cached, indices);
    canvas.setAttribute("aria-label",
      `Block pool: ${run.data.columns.held[record.index]} of ${references.length} blocks held, ${cached.size} cached.` +
      (followed ? ` ${followed.name} ${describeTables(tables)}.` : ""));
  }

  corner(block) {
    return [(block % this.columns) * this.tile, Math.floor(block / this.columns) * this.tile];
  }

  drawTile(context, block, references, isCached) {
    const { theme } = this.panel;
    const [x, y] = this.corner(block);
    const size = this.tile - 1;
    if (references) {
      const owner = this.soleOwner(block, references);
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

  // The track that holds a block; null if several do.
  soleOwner(block, references) {
    const owners = this.owners.get(block) || [];
    return references === 1 && owners.length === 1 ? owners[0] : null;
  }

  // Write the owner's letter, or the number of owners; if there is room, also the index in the followed sequence's table.
  drawLabel(context, block, references, index) {
    const { theme } = this.panel;
    if (index !== undefined) this.outline(context, block, this.tile >= 14 ? 2 : 1.5);
    if (this.tile < 14) return;
    const owner = this.soleOwner(block, references);
    const [left, top] = this.corner(block);
    const showsIndex = index !== undefined && this.tile >= 22;
    const x = left + (this.tile - 1) / 2 - (showsIndex ? 4 : 0);
    const y = top + (this.tile - 1) / 2;
    context.fillStyle = owner ? owner.colour : "#ddd"; // hides the path behind the letter
    context.fillRect(x - 5, y - 6, showsIndex ? 15 : 10, 13);
    const text = owner ? owner.letter : String(references);
    drawText(context, theme, text, x, y + 0.5, { size: 11, colour: "#000", weight: 600, align: "center" });
    if (showsIndex) drawText(context, theme, String(index), x + 13, y + 6, { size: 9, colour: "#000", align: "right" });
  }

  outline(context, block, width) {
    if (block === null) return;
    const [x, y] = this.corner(block);
    context.strokeStyle = this.panel.theme.text;
    context.lineWidth = width;
    context.strokeRect(x + width / 2 - 0.5, y + width / 2 - 0.5, this.tile - width, this.tile - width);
  }

  // Connect the blocks of a table in order.
  drawPath(context, blocks) {
    if (blocks.length < 2 || blocks.length > MAX_PATH || this.tile < 9) return;
    const centre = (block) => this.corner(block).map((edge) => edge + (this.tile - 1) / 2);
    context.strokeStyle = this.panel.theme.text;
    context.globalAlpha = 0.45;
    context.lineWidth = 1.25;
    context.beginPath();
    context.moveTo(...centre(blocks[0]));
    for (const block of blocks.slice(1)) context.lineTo(...centre(block));
    context.stroke();
    context.globalAlpha = 1;
  }

  // List the followed sequence's block tables, one after another. The freed blocks of a table are one item.
  updateTables(tables, record) {
    const { followed, run } = this.panel;
    this.heading.textContent = followed ? `Block table${tables.length > 1 ? "s" : ""} of ${followed.name}` : "Block table";
    const { references } = record.pool;
    const key = tables.map((table) => `${table};${liveBlocks(table).map((block) => references[block])}`).join("|");
    if (key === this.key) return;
    this.key = key;
    const { windows } = run.data.facts;
    const items = tables.flatMap((table, group) => [
      ...(windows.length > 1 ? [element("li", "group", groupName(group, windows))] : []),
      ...this.tableItems(table, references),
    ]);
    this.table.replaceChildren(...items);
    if (!tables.length) this.table.append(element("li", "none", "it holds no blocks in this step"));
  }

  tableItems(table, references) {
    const size = this.panel.run.data.facts.block_size;
    const numFreed = table.lastIndexOf(FREED) + 1;
    const items = [];
    if (numFreed) {
      const item = element("li", "freed", `${numFreed} freed`);
      item.title = `no later query can read positions 0 to ${numFreed * size - 1}`;
      items.push(item);
    }
    for (let index = numFreed; index < table.length; index++) {
      const block = table[index];
      const item = element("li", "", String(block));
      item.dataset.block = block;
      item.dataset.index = index;
      item.title = `positions ${index * size} to ${(index + 1) * size - 1} are in block ${block}`;
      if (references[block] > 1) {
        item.classList.add("shared");
        item.append(element("small", "", ` ×${references[block]}`));
      }
      items.push(item);
    }
    return items;
  }

  describe(block, cached, indices) {
    const { references, cached: evictionOrder } = this.record.pool;
    if (references[block]) {
      const owners = this.owners.get(block) || [];
      const names = owners.map((track) => track.name).join(", ") || countOf(references[block], "table");
      return `Block ${block}: held by ${names}${indices.has(block) ? `; index ${indices.get(block)} of the table below` : ""}.`;
    }
    if (!cached.has(block)) return `Block ${block}: free.`;
    return `Block ${block}: cached, number ${evictionOrder.indexOf(block) + 1} in the order of eviction.`;
  }
}

// A KV-cache group in words.
function groupName(group, windows) {
  const window = windows[group];
  return `group ${group}, ${window === null ? "no window" : `window ${window}`}`;
}

// What a sequence holds, in words.
function describeTables(tables) {
  const blocks = tables.flatMap(liveBlocks);
  const numFreed = tables.flat().length - blocks.length;
  return `holds ${blocks.length ? `blocks ${blocks.join(", ")}` : "no blocks"}${numFreed ? ` and has freed ${numFreed}` : ""}`;
}

// The blocks that a table still holds.
function liveBlocks(table) {
  return table.filter((block) => block !== FREED);
}

// For each block, the tracks whose tables list it.
function blockOwners(run, record) {
  const owners = new Map();
  for (const running of record.running) {
    const track = run.trackOf(running.sequence, record.index);
    for (const block of track ? running.block_tables.flatMap(liveBlocks) : []) {
      if (!owners.has(block)) owners.set(block, []);
      owners.get(block).push(track);
    }
  }
  return owners;
}
