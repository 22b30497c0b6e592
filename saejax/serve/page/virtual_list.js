// The list of features on this page: its rows lie at the server and come in windows as the list comes upon them.

const WINDOW_ROWS = 200;
const KEPT_WINDOWS = 12;
const SPARE_WINDOW_ROWS = 60;
// A list that is dragged along asks this often, and only for where it is.
const SETTLE_MS = 30;

function featureAddress(dictionary, id) {
  return address("features", dictionary, id === null ? "" : `?id=${id}`);
}

function wasAborted(error) {
  return error.name === "AbortError";
}

// A source of rows for RowList. ask(offset, limit, signal) gives the server's answer; changed() is told of rows that
// came, failed(error) of an answer that did not.
class FeatureWindows {
  constructor(ask, {changed, failed}) {
    this.ask = ask;
    this.changed = changed;
    this.failed = failed;
    this.count = 0;
    this.windows = new Map();
    this.pending = new Map();
    this.places = new Map();
    this.wanted = [0, 0];
    this.timer = 0;
  }

  // The first window, with what the server says of all of them.
  async begin() {
    const answer = await this.ask(0, WINDOW_ROWS, null);
    this.count = answer.total;
    this.keep(0, answer.rows);
    return answer;
  }

  stop() {
    clearTimeout(this.timer);
    this.pending.forEach(({controller}) => controller.abort());
    this.pending.clear();
  }

  at(place) {
    const rows = this.windows.get(Math.floor(place / WINDOW_ROWS));
    return rows === undefined ? null : rows[place % WINDOW_ROWS] ?? null;
  }

  placeOf(id) { return this.places.get(id) ?? -1; }

  // The list shows the places from `first` to before `last`; theirs are the windows that stay.
  seen(first, last) {
    this.wanted = [Math.max(0, first - SPARE_WINDOW_ROWS), Math.min(this.count, last + SPARE_WINDOW_ROWS)];
    const there = this.around().filter((index) => this.windows.has(index));
    for (const index of there) this.touch(index);
    if (there.length === this.around().length || this.timer !== 0) return;
    this.timer = setTimeout(() => { this.timer = 0; this.fetchWanted(); }, SETTLE_MS);
  }

  around() {
    const [first, last] = this.wanted, indices = [];
    for (let i = Math.floor(first / WINDOW_ROWS); i * WINDOW_ROWS < last; i++) indices.push(i);
    return indices;
  }

  fetchWanted() {
    const around = this.around();
    // What is given up is forgotten at once: a list that comes back to it asks anew.
    for (const [index, {controller, held}] of [...this.pending]) {
      if (held || around.includes(index)) continue;
      this.pending.delete(index);
      controller.abort();
    }
    for (const index of around) this.load(index, false).catch(() => {});
  }

  touch(index) {
    const rows = this.windows.get(index);
    this.windows.delete(index);
    this.windows.set(index, rows);
  }

  keep(index, rows) {
    this.windows.set(index, rows);
    rows.forEach((row, i) => this.places.set(row.id, index * WINDOW_ROWS + i));
    while (this.windows.size > KEPT_WINDOWS) this.windows.delete(this.windows.keys().next().value);
  }

  // The rows of one window. `held`: somebody waits for it, wherever the list goes meanwhile.
  load(index, held) {
    if (this.windows.has(index)) return Promise.resolve(this.windows.get(index));
    const before = this.pending.get(index);
    if (before !== undefined) {
      before.held ||= held;
      return before.rows;
    }
    const controller = new AbortController();
    const rows = this.ask(index * WINDOW_ROWS, WINDOW_ROWS, controller.signal).then((answer) => {
      this.keep(index, answer.rows);
      this.changed();
      return answer.rows;
    });
    const entry = {controller, held, rows};
    this.pending.set(index, entry);
    const done = () => { if (this.pending.get(index) === entry) this.pending.delete(index); };
    rows.then(done, (error) => { done(); if (!wasAborted(error)) this.failed(error); });
    return rows;
  }

  async rowAt(place) {
    await this.load(Math.floor(place / WINDOW_ROWS), true);
    return this.at(place);
  }

  // The place of a feature in rows that ascend by id, or -1: by halves, from where it is when no row is left out.
  async find(id) {
    let low = 0, high = Math.ceil(this.count / WINDOW_ROWS) - 1;
    let index = Math.min(high, Math.floor(id / WINDOW_ROWS));
    while (low <= high && this.placeOf(id) < 0) {
      const rows = await this.load(index, true);
      if (rows.length === 0 || (id > rows[0].id && id < rows[rows.length - 1].id)) break;
      if (id < rows[0].id) high = index - 1; else low = index + 1;
      index = (low + high) >> 1;
    }
    return this.placeOf(id);
  }

  // A feature has another label: in its row, where that is here.
  relabel(id, label) {
    const place = this.placeOf(id), row = place < 0 ? null : this.at(place);
    if (row === null) return;
    this.windows.get(Math.floor(place / WINDOW_ROWS))[place % WINDOW_ROWS] = {...row, label};
    this.changed();
  }
}

class ServedList extends RowList {
  constructor(onSelect) { super("Features", onSelect); }

  describe({id, density, max, token, label}) {
    const said = label ? visibleLine(label) : null;
    return {
      title: said,
      "aria-label": `feature ${id}${said ? `, ${said}` : ""}` + (density === null ? "" : `, density ${percent(density)}, maximum ${number(max)}`) +
        (token === null ? "" : `, promotes ${visibleText(token)}`),
    };
  }

  cells({id, density, max, token, label}) {
    return [el("span", {class: "id"}, String(id)), el("span", {class: "num"}, density === null ? "" : percent(density)),
      el("span", {class: "num"}, density === null ? "" : density > 0 ? number(max) : "dead"),
      el("span", {class: "top"}, label ? el("bdi", {class: "label"}, visibleLine(label)) : token === null ? "" : tokenChip(token))];
  }
}
