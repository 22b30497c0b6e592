// Interventions: what the graph predicts of each, what was measured; a scatter plot and a table that point at one another.

const SCATTER = {width: 460, height: 340, left: 58, right: 16, top: 12, bottom: 44};

class Effects {
  // onRing(ids): mark these nodes in the drawing; onLook(id): show one.
  constructor(model, {rows, of, spearman}, {onRing, onLook}) {
    Object.assign(this, {model, rows, of, onRing, onLook});
    this.marks = [];
    const said = spearman === null ? `${rows.length} interventions.` : `${rows.length} interventions; Spearman's rank correlation of prediction and measurement: ${spearman.toFixed(2)}.`;
    this.node = section("interventions", "Interventions", [of ? `${visibleLine(of)}. ` : "", said].join(""),
      el("div", {class: "effects"}, this.scatter(), this.table()));
  }

  scatter() {
    const {width, height, left, right, top, bottom} = SCATTER;
    const values = this.rows.flatMap(({predicted, measured, interval}) => [predicted, measured, ...(interval ?? []), 0]);
    const domain = padded([Math.min(...values), Math.max(...values)], 0.07);
    const x = scale(domain, [left, width - right], {ticks: 5}), y = scale(domain, [height - bottom, top], {ticks: 5});
    const points = this.rows.map((row, i) => {
      const {predicted, measured, interval} = row;
      const bar = interval ? svg("line", {class: "interval", x1: x(predicted), x2: x(predicted), y1: y(interval[0]), y2: y(interval[1])}) : null;
      return svg("g", {class: "effect", onpointerenter: () => this.point(i), onpointerleave: () => this.point(null), onclick: () => this.look(row)},
        svg("circle", {class: "catch", cx: x(predicted), cy: y(measured), r: 12}), bar, svg("circle", {class: "effect-dot", cx: x(predicted), cy: y(measured), r: 4.5}));
    });
    this.marks.push(points);
    return el("figure", {class: "chart"}, el("figcaption", {}, el("b", {}, "Prediction and measurement")),
      svg("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Measured over predicted change of ${this.rows.length} interventions; the table has the numbers.`},
        axes(x, y, SCATTER),
        svg("line", {class: "zero", x1: x(0), x2: x(0), y1: top, y2: height - bottom}), svg("line", {class: "zero", x1: left, x2: width - right, y1: y(0), y2: y(0)}),
        svg("line", {class: "rule", x1: x(domain[0]), y1: y(domain[0]), x2: x(domain[1]), y2: y(domain[1])}),
        svg("text", {x: (left + width - right) / 2, y: height - 8, "text-anchor": "middle"}, "predicted by the graph"),
        svg("text", {transform: `translate(13 ${(top + height - bottom) / 2}) rotate(-90)`, "text-anchor": "middle"}, "measured"), points));
  }

  table() {
    const known = this.rows.some(({interval}) => interval);
    const heads = ["nodes", "what was done", "predicted", "measured", ...(known ? ["interval"] : [])];
    const rows = this.rows.map((row, i) => el("tr", {onpointerenter: () => this.point(i), onpointerleave: () => this.point(null), onfocusin: () => this.point(i), onfocusout: () => this.point(null)},
      el("th", {scope: "row"}, this.nodes(row.nodes)), el("td", {}, el("bdi", {}, visibleLine(row.what))), el("td", {class: "num"}, signedValue(row.predicted)),
      el("td", {class: "num"}, signedValue(row.measured)),
      known ? el("td", {class: "num soft"}, row.interval ? `${signedValue(row.interval[0])} to ${signedValue(row.interval[1])}` : "\u2013") : null));
    this.marks.push(rows);
    return el("div", {class: "scroll", tabindex: 0, role: "group", "aria-label": "table of interventions"}, el("table", {},
      el("thead", {}, el("tr", {}, heads.map((head, i) => el("th", {scope: "col", class: i > 1 ? "num" : null}, head)))), el("tbody", {}, rows)));
  }

  nodes(ids) {
    return ids.slice(0, 6).map((id) => {
      const node = this.model.byId.get(id);
      const text = node ? nodeName(this.model, node) : `${visibleLine(id)}, not in this graph`;
      return node ? el("button", {class: "node-link", onclick: () => this.onLook(id)}, el("bdi", {}, text)) : el("span", {class: "soft"}, text);
    }).concat(ids.length > 6 ? [el("span", {class: "soft"}, `and ${ids.length - 6} more`)] : []);
  }

  look({nodes}) {
    const known = nodes.find((id) => this.model.byId.has(id));
    if (known) this.onLook(known);
  }

  point(i) {
    for (const list of this.marks) list.forEach((node, at) => node.classList.toggle("pointed", at === i));
    this.onRing(i === null ? [] : this.rows[i].nodes);
  }
}
