// The list of features: a column of fixed-height rows of which only the visible ones exist.

const ROW_HEIGHT = 34;
const SPARE_ROWS = 6;
const SEARCH_MS = 100;
const FEATURE_COLUMNS = [
  {key: "id", label: "id", down: false}, {key: "density", label: "density", down: true},
  {key: "max", label: "max", down: true}, {key: "token", label: "promotes", down: false},
];

// Rows that are all here. Another source of rows has the same four members; its `at` gives null while a row is on
// its way, and `seen` is where it learns which rows are looked at.
class RowsAtHand {
  constructor(rows) { this.rows = rows; }
  get count() { return this.rows.length; }
  at(place) { return this.rows[place] ?? null; }
  placeOf(id) { return this.rows.findIndex((row) => row.id === id); }
  seen() {}
}

class RowList {
  // onSelect(row or null, place) when the reader picks one. How a row looks is in `cells` and `describe`.
  constructor(label, onSelect) {
    this.onSelect = onSelect;
    this.source = new RowsAtHand([]);
    this.selected = null;
    this.drawn = new Map();
    this.canvas = el("div", {class: "canvas", role: "presentation"});
    this.node = el("div", {
      class: "rows", role: "listbox", tabindex: 0, "aria-label": label,
      onscroll: () => this.paint(), onkeydown: (event) => this.key(event), onclick: (event) => this.click(event),
    }, this.canvas);
    if (window.ResizeObserver) new ResizeObserver(() => this.paint()).observe(this.node);
  }

  show(source) {
    this.source = source;
    this.drawn.clear();
    this.canvas.style.height = `${source.count * ROW_HEIGHT}px`;
    this.node.scrollTop = 0;
    this.paint();
  }

  select(id) {
    this.selected = id;
    this.reveal();
    this.paint();
  }

  place() { return this.selected === null ? -1 : this.source.placeOf(this.selected); }

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

  // A row that stays in sight keeps its node, so that a click begun on it ends on it.
  paint() {
    const {count} = this.source;
    const first = Math.max(0, Math.floor(this.node.scrollTop / ROW_HEIGHT) - SPARE_ROWS);
    const last = Math.min(count, Math.ceil((this.node.scrollTop + this.node.clientHeight) / ROW_HEIGHT) + SPARE_ROWS);
    this.source.seen(first, last);
    const kept = this.drawn;
    this.drawn = new Map();
    for (let i = first; i < last; i++) {
      const row = this.source.at(i), chosen = row !== null && row.id === this.selected, before = kept.get(i);
      const same = before !== undefined && before.row === row && before.chosen === chosen;
      this.drawn.set(i, same ? before : {row, chosen, node: this.row(row, i, chosen)});
    }
    this.canvas.replaceChildren(...[...this.drawn.values()].map(({node}) => node));
    const shown = [...this.drawn.values()].some(({chosen}) => chosen);
    fill(this.node, {"aria-activedescendant": shown ? `row-${this.selected}` : ""}, []);
  }

  row(row, i, chosen) {
    const place = {"data-place": i, "aria-setsize": this.source.count, "aria-posinset": i + 1};
    const node = row === null
      ? el("div", {class: "row waiting", role: "option", "aria-selected": "false", "aria-label": "on its way", ...place}, el("span", {class: "blank"}))
      : el("div", {class: "row", role: "option", id: `row-${row.id}`, "aria-selected": String(chosen), ...place, ...this.describe(row)}, this.cells(row));
    node.style.top = `${i * ROW_HEIGHT}px`;
    return node;
  }

  click(event) {
    const row = event.target.closest(".row");
    if (row) this.pick(Number(row.dataset.place));
  }

  pick(place) { this.onSelect(this.source.at(place), place); }

  key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const page = Math.max(1, Math.floor(this.node.clientHeight / ROW_HEIGHT) - 1);
    const move = {ArrowDown: 1, ArrowUp: -1, j: 1, k: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity}[event.key];
    const {count} = this.source;
    if (!move || count === 0) return;
    event.preventDefault();
    this.pick(Math.min(count - 1, Math.max(0, this.place() + move)));
  }
}

class FeatureList extends RowList {
  // table: {vocab, features}; onSelect(feature) when the reader picks a row.
  constructor(table, onSelect) {
    super("Features", onSelect);
    this.table = table;
  }

  describe(feature) {
    const token = topToken(this.table, feature), said = (feature.explanations ?? [])[0];
    return {
      title: said ? visibleLine(said.text) : null,
      "aria-label": `feature ${feature.id}${said ? `, ${visibleLine(said.text)}` : ""}, density ${percent(feature.density)}, maximum ${number(strongest(feature))}` +
        (token === null ? "" : `, promotes ${visibleText(token)}`),
    };
  }

  cells(feature) {
    const token = topToken(this.table, feature);
    return [el("span", {class: "id"}, String(feature.id)), el("span", {class: "num"}, percent(feature.density)),
      el("span", {class: "num"}, feature.density > 0 ? number(strongest(feature)) : "dead"),
      el("span", {class: "top"}, token === null ? "" : tokenChip(token))];
  }
}

// What a list of features shows, and in which order: search, scope, only live, the column. The fields are the state.
class FeatureControls {
  // changed() after every change, after a letter with a little patience; scopes: {value: label}.
  constructor(changed, placeholder, scopes) {
    this.changed = changed;
    this.column = FEATURE_COLUMNS[0];
    this.down = false;
    let timer = 0;
    this.later = () => { clearTimeout(timer); timer = setTimeout(changed, SEARCH_MS); };
    this.search = el("input", {
      type: "search", placeholder, "aria-label": "Search features", autocomplete: "off", spellcheck: "false", oninput: this.later,
    });
    this.scope = el("select", {"aria-label": "Where to search", onchange: changed}, Object.entries(scopes).map(([value, label]) => el("option", {value}, label)));
    this.live = el("input", {type: "checkbox", onchange: changed});
    this.heads = FEATURE_COLUMNS.map((column) => el("button", {type: "button", class: `head ${column.key}`, onclick: () => this.sortBy(column)}));
    this.headRow = el("div", {class: "heads", role: "group", "aria-label": "Sort by"}, this.heads);
    this.name();
  }

  // random(): the reader wants any of the list; more: further fields.
  node(random, ...more) {
    return el("div", {class: "controls"}, this.search,
      el("div", {class: "control-row"}, this.scope, el("label", {class: "check", title: "Hide features that never fired in the scan"}, this.live, "only live"),
        el("button", {type: "button", onclick: random}, "Random")), ...more);
  }

  sortBy(column) {
    this.down = column === this.column ? !this.down : column.down;
    this.column = column;
    this.name();
    this.changed();
  }

  name() {
    FEATURE_COLUMNS.forEach((column, i) => {
      const active = column === this.column;
      this.heads[i].replaceChildren(column.label + (active ? (this.down ? " \u2193" : " \u2191") : ""));
      fill(this.heads[i], {"aria-pressed": String(active), "aria-label": `Sort by ${column.label}` + (active ? (this.down ? ", now descending" : ", now ascending") : "")}, []);
    });
  }

  // The signs that the page shows for white space can be searched for as well.
  query() { return this.search.value.replaceAll("\u00b7", " ").replaceAll("\u21b5", "\n"); }
}

function topToken(table, feature) {
  return feature.top_logits && feature.top_logits.length ? tokenText(table, feature.top_logits[0][0]) : null;
}

// -1 or 1 where the left or right arrow is pressed and nobody types, and the key is then used up; else 0.
function arrowMove(event) {
  const move = {ArrowLeft: -1, ArrowRight: 1}[event.key] ?? 0;
  const typing = event.target.closest && event.target.closest("input, select, textarea, [role=slider]");
  if (!move || typing || event.defaultPrevented || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return 0;
  event.preventDefault();
  return move;
}
