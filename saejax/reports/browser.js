// The feature browser: searching, sorting, choosing, and the address of a feature.

// A feature's place in the order of a column.
const SORT_VALUES = {
  id: (feature) => feature.id,
  density: (feature) => feature.density,
  max: (feature) => Math.abs(strongest(feature)),
  token: (feature, table) => (topToken(table, feature) ?? "\uffff").trim().toLowerCase(),
};
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
    this.controls = new FeatureControls(() => this.refresh(), "Search explanations, text, tokens or an id", SCOPES);
    this.controls.live.checked = this.dead > 0 && this.dead < table.features.length;
    this.rows = [];
    this.list = new FeatureList(table, (feature) => this.choose(feature, true));
    this.count = el("p", {class: "count", role: "status"});
    this.detail = el("div", {class: "detail-body"});
    this.name = el("h3", {tabindex: -1});
    const side = el("div", {class: "side"}, this.controls.node(() => this.random()), this.count, this.controls.headRow, this.list.node);
    this.node = el("div", {class: "browser"}, side, this.pane());
    document.addEventListener("keydown", (event) => this.key(event));
    window.addEventListener("hashchange", () => this.follow());
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

  refresh() {
    const rows = this.sorted(this.matching());
    this.rows = rows;
    this.list.show(new RowsAtHand(rows));
    this.count.replaceChildren(`${integer(rows.length)} of ${integer(this.table.features.length)} features`,
      this.dead > 0 ? `, ${integer(this.dead)} dead` : "");
  }

  matching() {
    const {live, scope} = this.controls, query = this.controls.query().toLowerCase();
    const rows = this.table.features.filter((feature) => !live.checked || feature.density > 0);
    if (query.trim() === "" && !query.includes("\n")) return rows;
    this.texts ??= new Map(this.table.features.map((feature) => [feature, searchText(this.table, feature)]));
    const id = query.trim().replace(/^#/, "");
    return rows.filter((feature) => String(feature.id) === id || this.texts.get(feature)[scope.value].includes(query));
  }

  sorted(rows) {
    const {column, down} = this.controls, sign = down ? -1 : 1;
    const keyed = rows.map((feature) => [SORT_VALUES[column.key](feature, this.table), feature]);
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
