// The view of a dictionary's features: the list, the feature, the text, and how they follow each other.

const FEATURE_SCOPES = {
  any: "anywhere", explained: "in explanations and labels", fires: "in tokens it fires on", promotes: "in promoted tokens", label: "in labels",
};
const FEATURE_TABS = {examples: "Examples", similar: "Similar", steer: "Steer", origin: "Where from"};
const KEPT_FEATURES = 60;
const KEPT_VIEWS = 3;
const PHONE = "(max-width: 860px)";

// The features that were looked at, and those beside them: promises of the server's answers, the oldest dropped.
class FeatureCache {
  constructor(dictionary) { this.path = inPath(dictionary); this.answers = new Map(); }

  get(id) {
    const answer = this.answers.get(id) ?? api(`/api/feature/${this.path}?id=${id}`);
    this.answers.delete(id);
    this.answers.set(id, answer);
    answer.catch(() => this.answers.delete(id));
    while (this.answers.size > KEPT_FEATURES) this.answers.delete(this.answers.keys().next().value);
    return answer;
  }

  annotate(id, note) {
    const before = this.answers.get(id);
    if (before !== undefined) this.answers.set(id, before.then((answer) => ({...answer, note})));
  }
}

// The controls of the list, with bounds of the density besides.
class ServedControls extends FeatureControls {
  constructor(changed) {
    super(changed, "Search text, tokens, labels or an id", FEATURE_SCOPES);
    this.live.checked = true;
    const bound = (label, placeholder) => el("input", {
      type: "text", inputmode: "decimal", "aria-label": `${label} density in percent of tokens`, placeholder, autocomplete: "off", oninput: this.later,
    });
    this.low = bound("Lowest", "0");
    this.high = bound("Highest", "100");
    this.density = el("fieldset", {class: "control-row density-range"}, el("legend", {class: "skip"}, "Density"),
      el("span", {"aria-hidden": "true"}, "density"), this.low, el("span", {"aria-hidden": "true"}, "to"), this.high, el("span", {"aria-hidden": "true"}, "% of tokens"));
  }

  // Without examples nothing is known of where features fire: only their ids and decoders are there.
  known(examples) {
    for (const field of [this.live, this.low, this.high, ...this.heads.slice(1, 3)]) field.disabled = !examples;
  }

  inOrderOfIds() { return this.column.key === "id" && !this.down && this.query().trim() === ""; }

  parameters() {
    const asked = new URLSearchParams({sort: this.column.key, down: this.down ? "1" : "0", live: this.live.checked ? "1" : "0"});
    if (this.query() !== "") { asked.set("q", this.query()); asked.set("scope", this.scope.value); }
    for (const [name, field] of [["low", this.low], ["high", this.high]]) {
      const value = Number(field.value.replace("%", "").replace(",", ".")), wrong = !(value >= 0 && value <= 100);
      field.setAttribute("aria-invalid", String(wrong));
      if (field.value.trim() !== "" && !wrong) asked.set(name, String(value / 100));
    }
    return asked.toString();
  }
}

// One feature: its name, the reader's label and note, and what is known of it, on four tabs.
class FeaturePane {
  constructor(view) {
    this.view = view;
    this.tab = "examples";
    this.shown = null;
    this.name = el("h3", {tabindex: -1}, "\u00a0");
    this.link = el("a", {class: "permalink", title: "The address of this feature"}, "link");
    const step = (move, label, sign) => el("button", {type: "button", "aria-label": label, title: `${label} (${sign} key)`, onclick: () => view.step(move)}, sign);
    this.notes = new NoteEditor(view.dictionary, (id, note) => view.annotated(id, note));
    this.examples = el("div", {class: "detail-body"});
    this.panels = {
      examples: {node: this.examples},
      similar: new SimilarPanel(view.dictionary, (id) => view.open(id), () => view.dictionaries()),
      steer: new SteerPanel(view.dictionary), origin: new ProvenancePanel(view.dictionary),
    };
    const back = el("button", {type: "button", class: "back", "aria-label": "Back to the list", onclick: () => view.toList()}, "\u2039 List");
    this.node = el("article", {class: "detail empty"},
      el("header", {}, back, this.name, this.link, el("span", {class: "spread"}), step(-1, "Previous feature", "\u2190"), step(1, "Next feature", "\u2192")),
      this.notes.node, this.tabs(), Object.entries(this.panels).map(([key, panel]) =>
        fill(panel.node, {id: `panel-${key}`, role: "tabpanel", "aria-labelledby": `tab-${key}`, hidden: key !== this.tab}, [])));
  }

  tabs() {
    this.buttons = Object.entries(FEATURE_TABS).map(([key, label]) => el("button", {
      type: "button", role: "tab", id: `tab-${key}`, "aria-controls": `panel-${key}`, "aria-selected": String(key === this.tab), tabindex: key === this.tab ? 0 : -1,
      onclick: () => this.turn(key),
    }, label));
    return el("div", {class: "tabs", role: "tablist", "aria-label": "About this feature", onkeydown: (event) => {
      const keys = Object.keys(FEATURE_TABS), move = {ArrowLeft: -1, ArrowRight: 1}[event.key];
      if (!move) return;
      event.preventDefault();
      const key = keys[(keys.indexOf(this.tab) + move + keys.length) % keys.length];
      this.turn(key);
      document.getElementById(`tab-${key}`).focus();
    }}, this.buttons);
  }

  turn(tab) {
    this.tab = tab;
    for (const button of this.buttons) fill(button, {"aria-selected": String(button.id === `tab-${tab}`), tabindex: button.id === `tab-${tab}` ? 0 : -1}, []);
    for (const [key, panel] of Object.entries(this.panels)) panel.node.hidden = key !== tab;
    if (this.shown !== null && tab !== "examples") this.panels[tab].show(this.shown);
  }

  announce(id) {
    this.name.replaceChildren(`Feature ${id}`);
    fill(this.link, {href: featureAddress(this.view.dictionary, id)}, []);
    this.node.setAttribute("aria-busy", "true");
  }

  show({id, vocab, feature, note}) {
    this.node.removeAttribute("aria-busy");
    this.node.classList.remove("empty");
    this.shown = {id, vocab, most: feature.max === null ? null : strongest(feature), examples: feature.examples ?? []};
    this.notes.show(id, note);
    this.examples.replaceChildren(...this.detail({vocab}, feature).filter(Boolean));
    if (this.tab !== "examples") this.panels[this.tab].show(this.shown);
  }

  detail(table, feature) {
    if (feature.density !== null) return featureDetail(table, feature, (i) => this.origin(i));
    return [...explanations(feature), el("div", {class: "logit-pair"}, logits(table, feature)),
      missing("Nobody has looked for passages on which this dictionary's features fire; they come with", `saejax report --config=... --sae=${this.view.dictionary}`)].flat();
  }

  origin(i) {
    return el("button", {type: "button", class: "origin-button", title: "Document, store, shard, model and run of this passage", onclick: () => {
      this.panels.origin.show(this.shown, i);
      this.turn("origin");
    }}, "where from");
  }

  fail(error) {
    this.node.removeAttribute("aria-busy");
    this.examples.replaceChildren(el("p", {class: "note warn", role: "alert"}, error.message));
    this.turn("examples");
  }
}

class FeatureView {
  constructor(dictionary) {
    this.dictionary = dictionary;
    this.id = null;
    this.scrolled = 0;
    this.turns = 0;
    this.picks = 0;
    this.timers = {ahead: 0};
    this.cache = new FeatureCache(dictionary);
    this.controls = new ServedControls(() => this.refresh());
    this.list = new ServedList((row, place) => this.pick(place));
    this.count = el("p", {class: "count", role: "status"}, "\u00a0");
    this.text = new TextPanel(dictionary, (id) => this.open(id));
    this.pane = new FeaturePane(this);
    this.onKey = (event) => this.key(event);
    this.node = el("div", {class: "features-view", "data-showing": "list"}, this.head(), this.text.node,
      el("div", {class: "browser"},
        el("div", {class: "side"}, this.controls.node(() => this.random(), this.controls.density), this.count, this.controls.headRow, this.list.node), this.pane.node));
  }

  head() {
    const open = () => { location.hash = featureAddress(select.value, null); };
    const select = el("select", {"aria-label": "Dictionary", onchange: open}, el("option", {value: this.dictionary}, this.dictionary));
    this.about = el("p", {class: "eyebrow"}, "\u00a0");
    this.dictionaries().then((names) => {
      const all = names.includes(this.dictionary) ? names : [this.dictionary, ...names];
      select.replaceChildren(...all.map((name) => el("option", {value: name}, name)));
      select.value = this.dictionary;
    });
    return el("header", {class: "features-head"}, el("div", {}, el("h1", {}, "Features"), this.about), select);
  }

  // The names of all dictionaries that the server has; only this one where it cannot say.
  dictionaries() {
    this.names ??= api("/api/overview").then(({runs, dictionaries}) =>
      [...runs.filter((run) => run.has_coder).map((run) => run.name), ...dictionaries.map((one) => one.name)], () => [this.dictionary]);
    return this.names;
  }

  // Into the page, at the feature with this id, or where the reader was.
  enter(host, id) {
    host.replaceChildren(this.node);
    document.addEventListener("keydown", this.onKey);
    this.text.start();
    if (this.windows === undefined) this.refresh();
    if (id !== null && id !== this.id) this.choose(id, false);
    this.present(id === null && this.phone() ? "list" : "detail");
    this.list.node.scrollTop = this.scrolled;
    if (id === null && this.id !== null && !this.phone()) history.replaceState(null, "", featureAddress(this.dictionary, this.id));
  }

  leave() {
    this.scrolled = this.list.node.scrollTop;
    document.removeEventListener("keydown", this.onKey);
    for (const timer of Object.values(this.timers)) clearTimeout(timer);
    this.text.stop();
    if (this.pane.notes.changed()) this.pane.notes.save();
  }

  phone() { return window.matchMedia(PHONE).matches; }

  present(showing) {
    this.node.dataset.showing = showing;
    if (showing === "list") this.list.reveal();
    this.list.paint();
  }

  toList() {
    history.replaceState(null, "", featureAddress(this.dictionary, null));
    this.present("list");
    this.list.node.focus({preventScroll: true});
  }

  // Asks for the rows anew. The old ones stay until the new ones are here.
  async refresh() {
    const turn = ++this.turns, asked = this.controls.parameters();
    const path = `/api/features/${inPath(this.dictionary)}?${asked}`;
    if (this.asking) this.asking.abort();
    const beginning = this.asking = new AbortController();
    const windows = new FeatureWindows((offset, limit, signal) => api(`${path}&offset=${offset}&limit=${limit}`, {signal: signal ?? beginning.signal}), {
      changed: () => { if (windows === this.windows) this.list.paint(); }, failed: (error) => this.complain(error),
    });
    try {
      const answer = await windows.begin();
      if (turn === this.turns) this.show(windows, answer);
    } catch (error) {
      if (turn === this.turns && !wasAborted(error)) this.complain(error);
    }
  }

  complain(error) {
    this.count.className = "count warn";
    this.count.replaceChildren(error.message);
    if (this.id === null) this.pane.fail(error);
  }

  show(windows, answer) {
    this.controls.known(answer.has_examples);
    // Where no feature is known to be alive, hiding the others would leave nothing.
    if (answer.total === 0 && this.controls.live.checked && this.controls.query() === "" && (!answer.has_examples || answer.dead === answer.all)) {
      this.controls.live.checked = false;
      return this.refresh();
    }
    const before = this.windows;
    if (before !== undefined) before.stop();
    this.windows = windows;
    this.list.show(windows);
    this.count.className = "count";
    this.count.replaceChildren(`${integer(answer.total)} of ${integer(answer.all)} features`, answer.dead > 0 ? `, ${integer(answer.dead)} dead` : "");
    const head = windows.at(0);
    if (this.id === null && head === null) this.pane.fail(new Error("The dictionary has no feature that could be shown."));
    else if (this.pane.shown === null) this.choose(this.id ?? head.id, false);
    // Another order begins at its top; only the first list goes to the feature of the address.
    else if (before === undefined) this.seek(this.id);
  }

  // The row of a feature in sight, wherever it lies: in the order of ids its window can be found.
  async seek(id) {
    this.list.select(id);
    const {windows} = this;
    if (windows === undefined || this.list.place() >= 0 || !this.controls.inOrderOfIds()) return;
    await windows.find(id).catch(() => -1);
    if (this.id === id && windows === this.windows) this.list.select(id);
  }

  // The reader picked a row; its window may still be on its way.
  async pick(place) {
    const pick = ++this.picks, row = this.windows.at(place) ?? await this.windows.rowAt(place).catch(() => null);
    if (row !== null && pick === this.picks) this.open(row.id);
  }

  open(id) { this.choose(id, true); }

  // byHand: the reader picked it here, so that the address follows; on a phone the feature takes the list's place.
  async choose(id, byHand) {
    this.id = id;
    const listed = this.phone() && byHand && this.node.dataset.showing === "list";
    if (byHand) history[listed ? "pushState" : "replaceState"](null, "", featureAddress(this.dictionary, id));
    if (byHand) this.present("detail");
    if (listed) this.pane.node.scrollIntoView({behavior: "instant"});
    this.pane.announce(id);
    this.seek(id);
    try {
      const answer = await this.cache.get(id);
      if (this.id === id) this.draw(answer);
    } catch (error) {
      if (this.id === id) this.pane.fail(error);
    }
  }

  draw(answer) {
    this.pane.show(answer);
    const {hook_point: hook, model, feature} = answer;
    this.about.replaceChildren(...[model, hook].filter(Boolean).map((text) => el("bdi", {}, `${visibleLine(text)} `)));
    this.text.choose({id: answer.id, most: feature.max === null ? null : strongest(feature)});
    clearTimeout(this.timers.ahead);
    this.timers.ahead = setTimeout(() => this.lookAhead(), 60);
  }

  // The features beside the chosen one, so that a step shows them at once.
  lookAhead() {
    const place = this.list.place();
    if (place < 0) return;
    for (const row of [this.windows.at(place + 1), place > 0 ? this.windows.at(place - 1) : null]) {
      if (row !== null) this.cache.get(row.id).catch(() => {});
    }
  }

  annotated(id, note) {
    this.cache.annotate(id, note);
    this.cache.get(id).then(({feature}) => {
      const said = (feature.explanations ?? [])[0];
      if (this.windows !== undefined) this.windows.relabel(id, (note && note.label) || (said ? said.text : null));
    }, () => {});
  }

  step(move) {
    const {count} = this.windows ?? {count: 0}, at = this.list.place();
    if (count > 0) this.pick(at < 0 ? 0 : (at + move + count) % count);
  }

  random() {
    const {count} = this.windows ?? {count: 0};
    if (count > 0) this.pick(Math.floor(Math.random() * count));
  }

  key(event) {
    const move = arrowMove(event);
    if (move) this.step(move);
  }
}

// Views that were left, so that going back finds list, search and feature as they were.
const FEATURE_VIEWS = new Map();

function featureView(dictionary) {
  const view = FEATURE_VIEWS.get(dictionary) ?? new FeatureView(dictionary);
  FEATURE_VIEWS.delete(dictionary);
  FEATURE_VIEWS.set(dictionary, view);
  while (FEATURE_VIEWS.size > KEPT_VIEWS) FEATURE_VIEWS.delete(FEATURE_VIEWS.keys().next().value);
  return view;
}

// Without a name: the dictionary of the run that moved last, one with examples where there is any.
async function anyDictionary(host) {
  host.replaceChildren(el("p", {class: "note", role: "status"}, "Looking for a dictionary\u2026"));
  const {runs, dictionaries} = await api("/api/overview");
  const last = (some) => some.sort((one, other) => (other.updated ?? 0) - (one.updated ?? 0))[0];
  const found = last(runs.filter((run) => run.has_features)) ?? last(runs.filter((run) => run.has_coder)) ?? dictionaries[0];
  if (found) location.replace(featureAddress(found.name, null));
  else host.replaceChildren(el("p", {class: "note"}, "No run here has learnt anything yet. ", el("a", {href: "#/start"}, "Start a training")));
}

VIEWS.set("features", {
  title: (rest) => (rest === "" ? "Features" : `Features of ${rest}`),
  draw(host, rest, query) {
    if (rest === "") {
      let left = false;
      anyDictionary(host).catch((error) => { if (!left) host.replaceChildren(el("p", {class: "note warn", role: "alert"}, error.message)); });
      return () => { left = true; };
    }
    const view = featureView(rest), id = query.get("id");
    view.enter(host, id !== null && /^\d+$/.test(id) ? Number(id) : null);
    return () => view.leave();
  },
});
