// Where the units stand: a column for each token, a row for each layer, embeddings below and outputs on top.

const CELL = {step: 17, least: 34, pad: 12, pill: 26, row: 46, most: 12};
// Few layers are drawn farther apart, up to this height in all.
const TALL = 330;
const OUTPUT_ROW = 58, TOKEN_ROW = 30, MARGIN = 10, LETTER = 6.7;

function pillWidth(unit) {
  return 22 + LETTER * [...pillText(unit)].length;
}

function pillText(unit) { return shortened(unit.title, 19); }

function shortened(text, most) {
  const letters = [...text];
  return letters.length > most ? `${letters.slice(0, Math.max(1, most - 1)).join("")}\u2026` : text;
}

// {x, y} of every unit is set; returns {width, height, columns: [{from, to}], rows: [{top, height}]}.
function layOut(units, nColumns, nRows, room) {
  const cells = new Map(), outputs = [];
  for (const unit of units) {
    if (unit.kind === "logit") { outputs.push(unit); continue; }
    const key = unit.row * nColumns + unit.column;
    if (!cells.has(key)) cells.set(key, {row: unit.row, column: unit.column, nodes: [], pills: []});
    cells.get(key)[unit.title ? "pills" : "nodes"].push(unit);
  }
  const widths = columnWidths([...cells.values()], nColumns, room - 2 * MARGIN);
  const columns = [];
  let at = MARGIN;
  for (const width of widths) { columns.push({from: at, to: at + width}); at += width; }
  const width = Math.max(room, at + MARGIN, outputs.length * 46 + 2 * MARGIN);
  const heights = new Array(nRows).fill(Math.max(CELL.row, Math.min(78, TALL / Math.max(1, nRows - 2))));
  heights[0] = TOKEN_ROW;
  heights[nRows - 1] = OUTPUT_ROW;
  for (const cell of cells.values()) {
    cell.perLine = Math.max(1, Math.floor((widths[cell.column] - CELL.pad) / CELL.step));
    cell.lines = Math.ceil(cell.nodes.length / cell.perLine);
    heights[cell.row] = Math.max(heights[cell.row], cell.lines * CELL.step + cell.pills.length * CELL.pill + 14);
  }
  const rows = [];
  let top = MARGIN;
  for (let row = nRows - 1; row >= 0; row--) { rows[row] = {top, height: heights[row]}; top += heights[row]; }
  for (const cell of cells.values()) placeCell(cell, columns[cell.column], rows[cell.row]);
  placeOutputs(outputs, columns, rows[nRows - 1], width);
  return {width, height: top + MARGIN, columns, rows};
}

// As many nodes side by side as the room allows; what is left over goes to all columns alike.
function columnWidths(cells, nColumns, room) {
  for (let most = CELL.most; ; most--) {
    const widths = new Array(nColumns).fill(CELL.least);
    for (const {column, nodes, pills} of cells) {
      const pill = Math.max(0, ...pills.map(pillWidth));
      widths[column] = Math.max(widths[column], pill + CELL.pad, Math.min(most, nodes.length) * CELL.step + CELL.pad);
    }
    const sum = widths.reduce((total, width) => total + width, 0);
    if (sum <= room) return widths.map((width) => width + (room - sum) / nColumns);
    if (most === 2) return widths;
  }
}

function placeCell(cell, {from, to}, {top, height}) {
  const centre = (from + to) / 2, filled = cell.lines * CELL.step + cell.pills.length * CELL.pill;
  let y = top + (height - filled) / 2;
  for (const unit of cell.pills) {
    Object.assign(unit, {x: centre, y: y + CELL.pill / 2});
    y += CELL.pill;
  }
  cell.nodes.sort((a, b) => (a.node.influence ?? 0) - (b.node.influence ?? 0));
  cell.nodes.forEach((unit, i) => {
    const line = Math.floor(i / cell.perLine), inLine = Math.min(cell.perLine, cell.nodes.length - line * cell.perLine);
    unit.x = centre + ((i % cell.perLine) - (inLine - 1) / 2) * CELL.step;
    unit.y = y + (line + 0.5) * CELL.step;
  });
}

// The likeliest first, the last one above the last token.
function placeOutputs(outputs, columns, {top}, width) {
  outputs.sort((a, b) => b.node.probability - a.node.probability);
  const right = Math.max(columns.length ? columns[columns.length - 1].to : 0, width - MARGIN);
  const gap = outputs.length ? Math.min(92, (right - MARGIN) / outputs.length) : 0;
  outputs.forEach((unit, i) => Object.assign(unit, {x: right - (outputs.length - i - 0.5) * gap, y: top + 40, gap}));
}

// The unit nearest to a point, at most `reach` pixels away; a pill counts over its whole width.
function nearestUnit(units, x, y, reach) {
  let best = null, least = reach;
  for (const unit of units) {
    const half = unit.title ? pillWidth(unit) / 2 : 0;
    const distance = Math.hypot(Math.max(0, Math.abs(x - unit.x) - half), y - unit.y);
    if (distance < least) { least = distance; best = unit; }
  }
  return best;
}

// The unit that an arrow key leads to: the next of its row, or the nearest of the next row that has any.
function neighbour(units, from, key) {
  if (key === "ArrowLeft" || key === "ArrowRight") {
    const sign = key === "ArrowLeft" ? -1 : 1;
    const order = units.filter((unit) => unit.row === from.row).sort((a, b) => a.x - b.x || a.y - b.y);
    return order[order.indexOf(from) + sign] ?? from;
  }
  const sign = key === "ArrowUp" ? 1 : -1;
  const beyond = units.filter((unit) => (unit.row - from.row) * sign > 0);
  if (beyond.length === 0) return from;
  const row = beyond.reduce((best, unit) => (Math.abs(unit.row - from.row) < Math.abs(best - from.row) ? unit.row : best), beyond[0].row);
  return beyond.filter((unit) => unit.row === row).reduce((best, unit) => (Math.abs(unit.x - from.x) < Math.abs(best.x - from.x) ? unit : best));
}
