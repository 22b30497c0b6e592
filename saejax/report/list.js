// The list of features: a column of fixed-height rows of which only the visible ones exist.

const ROW_HEIGHT = 34;
const SPARE_ROWS = 6;

class FeatureList {
  // table: {vocab, features}; onSelect(feature) when the reader picks a row.
  constructor(table, onSelect) {
    this.table = table;
    this.onSelect = onSelect;
    this.rows = [];
    this.selected = null;
    this.canvas = el("div", {class: "canvas", role: "presentation"});
    this.node = el("div", {
      class: "rows", role: "listbox", tabindex: 0, "aria-label": "Features",
      onscroll: () => this.paint(), onkeydown: (event) => this.key(event), onclick: (event) => this.click(event),
    }, this.canvas);
    if (window.ResizeObserver) new ResizeObserver(() => this.paint()).observe(this.node);
  }

  show(rows) {
    this.rows = rows;
    this.canvas.style.height = `${rows.length * ROW_HEIGHT}px`;
    this.node.scrollTop = 0;
    this.paint();
  }

  select(feature) {
    this.selected = feature;
    this.reveal();
    this.paint();
  }

  place() { return this.rows.indexOf(this.selected); }

  // Scrolls the list itself, and only it, so that the selected row is in sight.
  reveal() {
    const at = this.place();
    if (at < 0) return;
    const top = at * ROW_HEIGHT, room = this.node.clientHeight;
    const above = this.node.scrollTop - top, below = top + ROW_HEIGHT - this.node.scrollTop - room;
    if (Math.max(above, below) > 2 * ROW_HEIGHT) this.node.scrollTop = top - room / 2;
    else if (above > 0) this.node.scrollTop = Math.max(0, top - ROW_HEIGHT);
    else if (below > 0) this.node.scrollTop = top + 2 * ROW_HEIGHT - room;
  }

  paint() {
    const first = Math.max(0, Math.floor(this.node.scrollTop / ROW_HEIGHT) - SPARE_ROWS);
    const last = Math.min(this.rows.length, Math.ceil((this.node.scrollTop + this.node.clientHeight) / ROW_HEIGHT) + SPARE_ROWS);
    const nodes = [];
    for (let i = first; i < last; i++) nodes.push(this.row(this.rows[i], i));
    this.canvas.replaceChildren(...nodes);
    const shown = this.place() >= first && this.place() < last;
    fill(this.node, {"aria-activedescendant": shown ? `row-${this.selected.id}` : ""}, []);
  }

  row(feature, i) {
    const token = topToken(this.table, feature), said = (feature.explanations ?? [])[0];
    const node = el("div", {
      class: "row", role: "option", id: `row-${feature.id}`, "data-place": i,
      "aria-selected": String(feature === this.selected), "aria-setsize": this.rows.length, "aria-posinset": i + 1,
      title: said ? visibleLine(said.text) : null,
      "aria-label": `feature ${feature.id}${said ? `, ${visibleLine(said.text)}` : ""}, density ${percent(feature.density)}, maximum ${number(strongest(feature))}` +
        (token === null ? "" : `, promotes ${visibleText(token)}`),
    },
    el("span", {class: "id"}, String(feature.id)), el("span", {class: "num"}, percent(feature.density)),
    el("span", {class: "num"}, feature.density > 0 ? number(strongest(feature)) : "dead"),
    el("span", {class: "top"}, token === null ? "" : tokenChip(token)));
    node.style.top = `${i * ROW_HEIGHT}px`;
    return node;
  }

  click(event) {
    const row = event.target.closest(".row");
    if (row) this.onSelect(this.rows[Number(row.dataset.place)]);
  }

  key(event) {
    const page = Math.max(1, Math.floor(this.node.clientHeight / ROW_HEIGHT) - 1);
    const move = {ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity}[event.key];
    if (!move || this.rows.length === 0) return;
    event.preventDefault();
    this.onSelect(this.rows[Math.min(this.rows.length - 1, Math.max(0, this.place() + move))]);
  }
}

function topToken(table, feature) {
  return feature.top_logits && feature.top_logits.length ? tokenText(table, feature.top_logits[0][0]) : null;
}
