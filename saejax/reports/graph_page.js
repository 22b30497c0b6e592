// The page of one graph: its parts, and how a click in one reaches the others.

class GraphPage {
  constructor(data) {
    this.data = data;
    this.model = new GraphModel(data);
    this.model.heads = new GraphHeads(data.heads);
    this.view = new GraphView(this.model, (unit) => this.pick(unit));
    this.panel = new UnitPanel(this.model, {onLook: (unit) => this.look(unit), onPin: (unit) => this.pin(unit), onUngroup: (group) => { this.model.ungroup(group); this.changed(); }});
    this.tools = new Toolbar(this.model, {changed: () => this.changed(), look: (id) => this.lookAt(id)});
    const pointing = {onRing: (ids) => { this.view.ringed = new Set(ids); this.view.paint(); }, onLook: (id) => { this.lookAt(id); this.graph.scrollIntoView({block: "start"}); }};
    const effects = data.effects.rows.length ? new Effects(this.model, data.effects, pointing) : null;
    const heads = data.heads.scores.length ? new HeadScores(this.model, data.heads.scores, pointing) : null;
    const faithful = data.faithful.rows.length ? faithfulSection(data.faithful) : null;
    this.graph = section("graph", "Graph", null, this.tools.node,
      el("div", {class: "graph-pair"}, el("div", {}, this.view.node, this.legend()), this.panel.node));
    this.node = [this.header(), el("main", {}, this.graph, heads && heads.node, effects && effects.node, faithful)];
  }

  header() {
    const {data} = this, counts = new Map();
    for (const {kind} of data.nodes) counts.set(kind, (counts.get(kind) ?? 0) + 1);
    const count = (kind, word) => [word, integer(counts.get(kind) ?? 0)];
    const made = data.dictionaries ? [["dictionaries", visibleLine(data.dictionaries)]] : [];
    const tiles = [...made, ...Object.entries(data.figures).map(([name, value]) => [name, typeof value === "number" ? number(value) : visibleLine(value)]),
      count("feature", "features"), count("error", "errors"), ["edges", integer(data.weights.length)]];
    return el("header", {class: "masthead"}, el("p", {class: "eyebrow"}, "saejax attribution graph"),
      el("div", {class: "title-row"}, el("h1", {}, el("bdi", {}, visibleLine(data.slug)))),
      el("p", {class: "prompt", "aria-label": "prompt"}, data.tokens.flatMap((token) => [el("span", {class: "tok"}, ...visible(token)), el("wbr")])),
      el("dl", {class: "facts"}, tiles.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))));
  }

  legend() {
    const sign = (kind, text) => el("span", {class: "sign"}, svg("svg", {width: 16, height: 16, viewBox: "-8 -8 16 16", "aria-hidden": "true"},
      fill(unitShape({kind, x: 0, y: 0, node: {kind, influence: 0.2, probability: 0.1}}), {class: `unit ${kind}`}, [])), text);
    return el("p", {class: "graph-legend"}, sign("feature", "feature, larger: more influence"), sign("error", "error of the dictionary"), sign("token", "token"), sign("logit", "output"),
      el("span", {class: "sign plus"}, "\u2014 adds"), el("span", {class: "sign minus"}, "\u2014 takes away"));
  }

  // A click pins and shows; a second one on the same unpins.
  pick(unit) {
    if (unit === null) return this.look(null);
    if (unit.kind !== "group") {
      this.model.pin(unit.key, !(this.view.selected === unit && this.model.pinned.has(unit.key)));
      this.changed();
    }
    this.lookAt(unit.members[0].id);
  }

  pin(unit) {
    this.model.pin(unit.key);
    this.changed();
    this.lookAt(unit.key);
  }

  lookAt(id) {
    const unit = this.view.unitOf(id);
    if (unit) { this.look(unit); return; }
    this.model.pin(id, true);  // not in sight now
    this.changed();
    this.look(this.view.unitOf(id));
  }

  look(unit) {
    this.view.selected = unit;
    this.view.paint();
    this.panel.show(unit);
    history.replaceState(null, "", unit ? `#node=${encodeURIComponent(unit.members[0].id)}` : "#");
  }

  changed() {
    this.view.draw();
    this.tools.refresh();
    this.panel.show(this.view.selected);
  }

  // #node=<id> in the address opens that node.
  follow() {
    const match = /^#node=(.*)$/.exec(location.hash);
    let id = null;
    try { id = match && decodeURIComponent(match[1]); } catch { id = null; }
    if (!id) return;
    if (this.model.byId.has(id)) this.lookAt(id);
    else this.tools.say(`The address names the node ${visibleLine(id)}, which is not in this graph.`);
  }

  start() {
    document.getElementById("page").replaceChildren(...this.node.flat().filter(Boolean));
    installTip(document.getElementById("page"), document.getElementById("tip"));
    this.view.draw();
    this.follow();
    window.addEventListener("hashchange", () => this.follow());
    const told = document.getElementById("feature-data").textContent;
    if (told === "") { this.unpacked({vocab: [], features: {}}); return; }
    unpack(told).then((table) => this.unpacked(table), (error) => { this.tools.say(error.message); this.unpacked({vocab: [], features: {}}); });
  }

  unpacked({vocab, features}) {
    this.panel.table = {vocab, features: new Map(Object.entries(features))};
    this.panel.show(this.panel.unit);
  }
}

new GraphPage(JSON.parse(document.getElementById("summary-data").textContent)).start();
