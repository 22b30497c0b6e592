// Heads: those that an edge passes, beside the edge; and for the heads of most influence the pairs that make them attend.

class GraphHeads {
  constructor({edges, scores}) {
    this.scores = scores;
    this.edges = new Map(edges.map((edge) => [`${edge.source} ${edge.target}`, edge]));
  }

  // "block 4, head 2, from 3 to 9: 61 %" of the heads that an edge passes; null where nothing is known of it.
  ofEdge(source, target) {
    const edge = source.node && target.node ? this.edges.get(`${source.node.id} ${target.node.id}`) : null;
    if (!edge || edge.parts.length === 0) return null;
    const parts = edge.parts.filter(({weight}) => Math.abs(weight) >= 0.02 * Math.abs(edge.weight)).slice(0, 3);
    return parts.map(({block, head, query, key, weight}) => `${block}.${head} from ${key} to ${query}: ${percent(Math.round((1000 * weight) / edge.weight) / 1000)}`).join(", ");
  }
}

class HeadScores {
  constructor(model, scores, {onRing, onLook}) {
    Object.assign(this, {model, onRing, onLook});
    this.node = section("heads", "Why heads attend", [
      "The heads that pass the largest edges between tokens. A score is a sum over pairs of what stands at the query's token and at the key's, of all active ",
      "features. A head attends to the keys whose scores are above the mean."].join(""),
      el("div", {class: "head-scores"}, scores.map((one, i) => this.card(one, i === 0))));
  }

  card(one, open) {
    const at = (column) => `${visibleText(tokenAt(this.model, column))} (${column})`;
    const title = `Block ${one.block}, head ${one.head}: ${at(one.query)} attends to ${at(one.key)}`;
    return el("details", {class: "head-score", open},
      el("summary", {}, el("bdi", {}, title), el("span", {class: "num soft"}, `attention ${percent(Math.round(1000 * one.pattern) / 1000)}; score ${signedValue(one.score)}, ${signedValue(one.score - one.mean)} to the mean`)),
      el("div", {class: "effects"}, this.sides(one), this.pairs(one)));
  }

  sides(one) {
    const list = (title, rows) => el("div", {}, el("h4", {}, title), el("table", {}, el("tbody", {}, rows.slice(0, 6).map(({node, value}) =>
      el("tr", {}, el("th", {scope: "row"}, this.named(node)), el("td", {class: "num"}, signedValue(value)))))));
    return el("div", {class: "sides"}, list(`At the query, ${visibleText(tokenAt(this.model, one.query))}: parts above the mean key`, one.queries), list(`At the key, ${visibleText(tokenAt(this.model, one.key))}: parts of the score`, one.keys));
  }

  pairs(one) {
    const rows = one.pairs.map(({query, key, value}) => el("tr", {onpointerenter: () => this.onRing([query, key]), onpointerleave: () => this.onRing([])},
      el("th", {scope: "row"}, this.named(query)), el("td", {}, this.named(key)), el("td", {class: "num"}, signedValue(value))));
    return el("div", {class: "scroll", tabindex: 0, role: "group", "aria-label": `pairs of block ${one.block}, head ${one.head}`}, el("table", {},
      el("thead", {}, el("tr", {}, ["query", "key", "part of the score"].map((head, i) => el("th", {scope: "col", class: i > 1 ? "num" : null}, head)))), el("tbody", {}, rows)));
  }

  named(id) {
    if (id === "bias") return el("span", {class: "soft"}, "biases, positions");
    const node = this.model.byId.get(id);
    if (node) return el("button", {class: "node-link", onclick: () => this.onLook(id)}, el("bdi", {}, `${nodeName(this.model, node)}${node.kind === "feature" || node.kind === "error" ? ` at ${node.column}` : ""}`));
    const [layer, latent, place] = id.split("_");
    return el("span", {class: "soft"}, layer === "E" ? `token ${place}` : id.startsWith("0_") && id.endsWith("_error") ? `error, layer ${latent}` : `feature ${latent}, layer ${layer}, at ${place}`);
  }
}

function signedValue(value) { return value === 0 ? "0" : `${value < 0 ? "\u2212" : "+"}${number(Math.abs(value))}`; }
