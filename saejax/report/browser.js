// The feature browser: searching, sorting, choosing, and the address of a feature.

const COLUMNS = [
  {key: "id", label: "id", down: false, value: (feature) => feature.id},
  {key: "density", label: "density", down: true, value: (feature) => feature.density},
  {key: "max", label: "max", down: true, value: (feature) => Math.abs(strongest(feature))},
  {key: "token", label: "promotes", down: false, value: (feature, table) => (topToken(table, feature) ?? "\uffff").trim().toLowerCase()},
];
const SCOPES = {
  any: "anywhere", explained: "in explanations", fires: "in tokens it fires on", promotes: "in promoted tokens",
};

// For each scope the lower-case text that a search looks through, built once, at the first search.
function searchText(table, feature) {
  const lists = feature.examples ?? [];
  const passages = lists.map((example) => example.tokens.map((id) => table.vocab[id]).join("")).join("\n\u0000");
  const fires = new Set(lists.flatMap((example) => example.tokens.filter((_, i) => example.activations[i] > 0)));
  const texts = (pairs) => (pairs ?? []).map(([token]) => tokenText(table, token)).join("\u0000");
  const promotes = texts(feature.top_logits);
  const explained = (feature.explanations ?? []).map(({text}) => text).join("\u0000");
  return {
    any: [explained, passages, promotes, texts(feature.bottom_logits)].join("\u0000").toLowerCase(),
    explained: explained.toLowerCase(),
    fires: [...fires].map((id) => table.vocab[id]).join("\u0000").toLowerCase(),
    promotes: promotes.toLowerCase(),
  };
}

class FeatureBrowser {
  constructor(table) {
    this.table = table;
    this.byId = new Map(table.features.map((feature) => [feature.id, feature]));
    this.dead = table.features.filter((feature) => !(feature.density > 0)).length;
    this.state = {query: "", scope: "any", column: COLUMNS[0], down: false, live: this.dead > 0 && this.dead < table.features.length};
    this.rows = [];
    this.list = new FeatureList(table, (feature) => this.choose(feature, true));
    this.count = el("p", {class: "count", role: "status"});
    this.detail = el("div", {class: "detail-body"});
    this.name = el("h3", {tabindex: -1});
    this.node = el("div", {class: "browser"}, this.side(), this.pane());
    document.addEventListener("keydown", (event) => this.key(event));
    window.addEventListener("hashchange", () => this.follow());
  }

  side() {
    let timer = 0;
    const search = el("input", {
      type: "search", placeholder: "Search explanations, text, tokens or an id", "aria-label": "Search features", autocomplete: "off", spellcheck: "false",
      oninput: () => { clearTimeout(timer); timer = setTimeout(() => this.set({query: search.value}), 100); },
    });
    const scope = el("select", {"aria-label": "Where to search", onchange: () => this.set({scope: scope.value})},
      Object.entries(SCOPES).map(([value, label]) => el("option", {value}, label)));
    const live = el("input", {type: "checkbox", onchange: () => this.set({live: live.checked})});
    live.checked = this.state.live;
    this.heads = COLUMNS.map((column) => el("button", {type: "button", class: `head ${column.key}`, onclick: () => this.sortBy(column)}));
    return el("div", {class: "side"},
      el("div", {class: "controls"}, search, el("div", {class: "control-row"}, scope,
        el("label", {class: "check", title: "Hide features that never fired in the scan"}, live, "only live"),
        el("button", {type: "button", onclick: () => this.random()}, "Random"))),
      this.count, el("div", {class: "heads", role: "group", "aria-label": "Sort by"}, this.heads), this.list.node);
  }

  pane() {
    const step = (move, label, sign) => el("button", {type: "button", "aria-label": label, title: `${label} (${sign} key)`, onclick: () => this.step(move)}, sign);
    this.link = el("a", {class: "permalink", title: "The address of this feature"}, "link");
    this.article = el("article", {class: "detail"},
      el("header", {}, this.name, this.link, el("span", {class: "spread"}),
        step(-1, "Previous feature", "\u2190"), step(1, "Next feature", "\u2192")), this.detail);
    return this.article;
  }

  start() {
    this.refresh();
    if (!this.follow()) this.choose(this.rows[0] ?? this.table.features[0], false);
  }

  set(change) {
    Object.assign(this.state, change);
    this.refresh();
  }

  sortBy(column) {
    this.set({column, down: column === this.state.column ? !this.state.down : column.down});
  }

  refresh() {
    const rows = this.sorted(this.matching());
    this.rows = rows;
    this.list.show(new RowsAtHand(rows));
    this.count.replaceChildren(`${integer(rows.length)} of ${integer(this.table.features.length)} features`,
      this.dead > 0 ? `, ${integer(this.dead)} dead` : "");
    COLUMNS.forEach((column, i) => {
      const active = column === this.state.column;
      const arrow = active ? (this.state.down ? " \u2193" : " \u2191") : "";
      this.heads[i].replaceChildren(column.label + arrow);
      fill(this.heads[i], {"aria-pressed": String(active), "aria-label": `Sort by ${column.label}` +
        (active ? (this.state.down ? ", now descending" : ", now ascending") : "")}, []);
    });
  }

  matching() {
    const {live, scope} = this.state;
    // The signs that the page shows for white space can be searched for as well.
    const query = this.state.query.toLowerCase().replaceAll("\u00b7", " ").replaceAll("\u21b5", "\n");
    const rows = this.table.features.filter((feature) => !live || feature.density > 0);
    if (query.trim() === "" && !query.includes("\n")) return rows;
    this.texts ??= new Map(this.table.features.map((feature) => [feature, searchText(this.table, feature)]));
    const id = query.trim().replace(/^#/, "");
    return rows.filter((feature) => String(feature.id) === id || this.texts.get(feature)[scope].includes(query));
  }

  sorted(rows) {
    const {column, down} = this.state;
    const sign = down ? -1 : 1;
    const keyed = rows.map((feature) => [column.value(feature, this.table), feature]);
    keyed.sort(([a, one], [b, other]) => (a < b ? -sign : a > b ? sign : one.id - other.id));
    return keyed.map(([, feature]) => feature);
  }

  // byHand: the reader picked it in the list; on a phone the detail is below and comes into view.
  choose(feature, byHand) {
    if (!feature) return;
    this.list.select(feature.id);
    this.name.replaceChildren(`Feature ${feature.id}`);
    fill(this.link, {href: `#feature=${feature.id}`}, []);
    this.detail.replaceChildren(...featureDetail(this.table, feature).filter(Boolean));
    if (!byHand) return;
    history.replaceState(null, "", `#feature=${feature.id}`);
    if (window.matchMedia("(max-width: 860px)").matches) this.article.scrollIntoView({behavior: "instant"});
  }

  step(move) {
    const {rows} = this, at = this.list.place();
    if (rows.length > 0) this.choose(rows[at < 0 ? 0 : (at + move + rows.length) % rows.length], true);
  }

  random() {
    const {rows} = this;
    if (rows.length > 0) this.choose(rows[Math.floor(Math.random() * rows.length)], true);
  }

  // Opens the feature that the address names; false when it names none.
  follow() {
    const named = /^#feature=(\d+)$/.exec(location.hash);
    const feature = named ? this.byId.get(Number(named[1])) : undefined;
    if (feature === undefined) return false;
    this.choose(feature, false);
    this.node.scrollIntoView({behavior: "instant"});
    return true;
  }

  key(event) {
    if (event.key === "Escape" && event.target.type === "search") leaveField(event.target);
    const move = arrowMove(event);
    if (move) this.step(move);
  }
}
