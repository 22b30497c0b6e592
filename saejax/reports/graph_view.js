// The drawing: units and edges as SVG, what the pointer and the arrow keys stand on, and a card beside it.

const FAINT_EDGES = 300, FOCUS_EDGES = 200, WRITTEN_EDGES = 8, REACH = 15;

function unitRadius({node}) {
  if (node.kind === "logit") return 4 + 5 * Math.sqrt(node.probability);
  if (node.kind === "token") return 4;
  return node.influence === null ? 5 : 3 + 5 * (1 - node.influence) ** 1.5;
}

function unitShape(unit) {
  const place = `translate(${unit.x.toFixed(1)} ${unit.y.toFixed(1)})`;
  if (unit.title) {
    const width = pillWidth(unit);
    return svg("g", {transform: place}, svg("rect", {x: -width / 2, y: -11, width, height: 22, rx: 11}),
      svg("text", {"text-anchor": "middle", y: 4}, pillText(unit)));
  }
  const r = unitRadius(unit);
  if (unit.kind === "feature") return svg("circle", {transform: place, r: r.toFixed(2)});
  if (unit.kind === "error") return svg("path", {transform: place, d: `M0 ${-r}L${r} 0L0 ${r}L${-r} 0Z`});
  return svg("rect", {transform: place, x: -r, y: -r, width: 2 * r, height: 2 * r, rx: 1.5});
}

function edgePath(source, target) {
  const middle = (source.y + target.y) / 2;
  return `M${source.x.toFixed(1)} ${source.y.toFixed(1)}C${source.x.toFixed(1)} ${middle.toFixed(1)} ${target.x.toFixed(1)} ${middle.toFixed(1)} ${target.x.toFixed(1)} ${target.y.toFixed(1)}`;
}

class GraphView {
  // onPick(unit): the reader clicked it, or pressed Enter on it.
  constructor(model, onPick) {
    Object.assign(this, {model, onPick, units: [], hovered: null, selected: null, cursor: null, ringed: new Set(), room: 0});
    this.labels = svg("svg", {class: "layers", "aria-hidden": "true"});
    this.svg = svg("svg", {
      class: "graph", role: "listbox", tabindex: 0, "aria-label": "Nodes by layer and token",
      onpointermove: (event) => this.point(event), onpointerleave: () => this.hover(null),
      onclick: (event) => this.click(event), onkeydown: (event) => this.key(event),
      onfocus: () => this.arrive(), onblur: () => { this.cursor = null; this.paint(); },
    });
    this.card = el("div", {class: "card", hidden: true, "aria-hidden": "true"});
    this.scroll = el("div", {class: "graph-scroll"}, this.svg);
    this.node = el("div", {class: "graph-frame"}, this.labels, this.scroll, this.card);
    if (window.ResizeObserver) new ResizeObserver(() => requestAnimationFrame(() => { if (this.scroll.clientWidth !== this.room) this.draw(); })).observe(this.scroll);
  }

  unitOf(id) { return this.units.find((unit) => unit.members.some((node) => node.id === id)) ?? null; }

  // Everything anew: after a pin, a supernode, a threshold or another width.
  draw() {
    const {tokens, rows} = this.model.data;
    const first = this.units.length === 0;
    this.room = this.scroll.clientWidth;
    const keep = [this.selected, this.cursor].map((unit) => unit && unit.members[0].id);
    this.units = this.model.units();
    const frame = layOut(this.units, tokens.length, rows.length, Math.max(280, this.room));
    const words = this.tokenLabels(frame);
    const size = {width: frame.width, height: frame.height + words.height, viewBox: `0 0 ${frame.width} ${frame.height + words.height}`};
    fill(this.svg, size, []);
    this.shapes = new Map(this.units.map((unit, i) => [unit, this.shape(unit, i)]));
    this.focusLayer = svg("g", {class: "focus-edges"});
    this.written = svg("g", {class: "written", "aria-hidden": "true"});
    this.rings = ["picked", "cursor"].map((kind) => svg("rect", {class: kind, height: 28, rx: 14, visibility: "hidden"}));
    this.svg.replaceChildren(this.grid(frame), this.faint(), this.focusLayer, svg("g", {role: "presentation"}, [...this.shapes.values()]),
      this.outputLabels(), words.node, ...this.rings, this.written);
    this.drawLayers(frame, size.height);
    [this.selected, this.cursor] = keep.map((id) => id && this.unitOf(id));
    this.hovered = null;
    this.card.hidden = true;
    this.paint();
    if (first) this.scroll.scrollLeft = frame.width;  // the last token, where the outputs are
  }

  shape(unit, i) {
    const node = unitShape(unit);
    const pinned = unit.kind !== "group" && this.model.pinned.has(unit.key);
    return fill(node, {id: `unit-${i}`, role: "option", class: `unit ${unit.kind}${unit.title ? " pill" : pinned ? " pinned" : ""}`, "data-key": unit.key, "aria-selected": "false",
      "aria-label": `${unitName(this.model, unit)}, ${unitPlace(this.model, unit)}${pinned ? ", pinned" : ""}`}, []);
  }

  grid({columns, rows, width}) {
    const y = rows[rows.length - 1].top + OUTPUT_ROW, height = rows[0].top + rows[0].height - y;
    const lines = columns.map(({from, to}, i) => (i % 2 ? null : svg("rect", {class: "stripe", x: from, width: to - from, y, height})));
    const levels = rows.map((row) => svg("line", {class: "level", x1: 0, x2: width, y1: row.top + row.height, y2: row.top + row.height}));
    return svg("g", {class: "graph-grid", "aria-hidden": "true"}, lines, levels);
  }

  drawLayers({rows}, height) {
    fill(this.labels, {width: 46, height, viewBox: `0 0 46 ${height}`}, []);
    this.labels.replaceChildren(...rows.map(({top, height: tall}, i) => svg("text", {x: 40, y: top + tall / 2 + 4, "text-anchor": "end"}, this.model.data.rows[i])));
  }

  tokenLabels({columns, rows}) {
    const texts = this.model.data.tokens.map((token) => shortened(visibleText(token), 13));
    const level = texts.every((text, i) => [...text].length * LETTER <= columns[i].to - columns[i].from - 4);
    const y = rows[0].top + rows[0].height + 16;
    const longest = Math.max(0, ...texts.map((text) => [...text].length));
    const node = svg("g", {class: "words", "aria-hidden": "true"}, texts.map((text, i) => {
      const x = (columns[i].from + columns[i].to) / 2;
      return svg("text", level ? {x, y, "text-anchor": "middle"} : {transform: `translate(${x + 4} ${y - 6}) rotate(-45)`, "text-anchor": "end"}, text);
    }));
    return {node, height: level ? 20 : 14 + longest * LETTER * 0.72};
  }

  outputLabels() {
    const outputs = this.units.filter((unit) => unit.kind === "logit");
    return svg("g", {class: "words outputs", "aria-hidden": "true"}, outputs.flatMap((unit) => [
      svg("text", {x: unit.x, y: unit.y - 26, "text-anchor": "middle"}, shortened(visibleText(unit.node.label), Math.floor((unit.gap - 4) / LETTER))),
      svg("text", {class: "soft", x: unit.x, y: unit.y - 13, "text-anchor": "middle"}, percent(unit.node.probability)),
    ]));
  }

  faint() {
    const sizes = Float64Array.from(this.units.flatMap((unit) => [...unit.inputs.values()]), Math.abs).sort();
    const least = sizes[Math.max(0, sizes.length - FAINT_EDGES)];
    const drawn = this.units.flatMap((unit) => [...unit.inputs].filter(([, weight]) => Math.abs(weight) >= least).map(([source, weight]) => [source, unit, weight]));
    drawn.sort((a, b) => Math.abs(b[2]) - Math.abs(a[2]));
    if (this.model.onlyPinned) return svg("g", {class: "circuit", "aria-hidden": "true"}, this.weighted(drawn));
    return svg("path", {class: "faint", d: drawn.map(([source, target]) => edgePath(source, target)).join(""), "aria-hidden": "true"});
  }

  // A path for each edge, the strongest on top, as wide as its share of it.
  weighted(edges) {
    const most = edges.length ? Math.abs(edges[0][2]) || 1 : 1;
    return edges.map(([source, target, weight]) => svg("path", {
      class: `edge ${weight < 0 ? "minus" : "plus"}`, d: edgePath(source, target), "stroke-width": (0.6 + 4 * (Math.abs(weight) / most)).toFixed(2)})).reverse();
  }

  // What is looked at: the pointer's unit, else the keyboard's, else the one that was picked.
  get focus() { return this.hovered ?? this.cursor ?? this.selected; }

  paint() {
    const {focus} = this;
    const near = focus ? new Set([focus, ...focus.inputs.keys(), ...focus.outputs.keys()]) : null;
    for (const [unit, shape] of this.shapes ?? []) {
      shape.classList.toggle("dim", near !== null && !near.has(unit));
      shape.classList.toggle("selected", unit === this.selected);
      shape.classList.toggle("ringed", unit.members.some((node) => this.ringed.has(node.id)));
      const chosen = String(unit === this.selected);
      if (shape.getAttribute("aria-selected") !== chosen) shape.setAttribute("aria-selected", chosen);
    }
    this.svg.classList.toggle("focused", focus !== null);
    fill(this.svg, {"aria-activedescendant": this.cursor ? this.shapes.get(this.cursor).id : ""}, []);
    [this.selected, this.cursor].forEach((unit, i) => this.rings && this.placeRing(this.rings[i], unit));
    this.paintEdges(focus);
  }

  placeRing(ring, unit) {
    if (unit === null) { fill(ring, {visibility: "hidden"}, []); return; }
    const half = unit.title ? pillWidth(unit) / 2 + 3 : unitRadius(unit) + 4, tall = unit.title ? 14 : half;
    fill(ring, {x: unit.x - half, y: unit.y - tall, width: 2 * half, height: 2 * tall, rx: tall, visibility: "visible"}, []);
  }

  paintEdges(focus) {
    if (!this.focusLayer) return;
    const edges = focus ? [...strongestEdges(focus.inputs).map(([unit, weight]) => [unit, focus, weight]), ...strongestEdges(focus.outputs).map(([unit, weight]) => [focus, unit, weight])] : [];
    edges.sort((a, b) => Math.abs(b[2]) - Math.abs(a[2]));
    const most = edges.length ? Math.abs(edges[0][2]) || 1 : 1;
    this.focusLayer.replaceChildren(...this.weighted(edges.slice(0, FOCUS_EDGES)));
    this.written.replaceChildren();
    const taken = focus?.title ? [{x: focus.x, y: focus.y + 4, half: pillWidth(focus) / 2}] : [];
    for (const [source, target, weight] of edges.slice(0, WRITTEN_EDGES)) this.writeWeight(source === focus ? target : source, weight, most, taken);
  }

  // The weight above its node, or below it; nowhere if other weights stand there, for the list has it too.
  writeWeight(unit, weight, most, taken) {
    const text = signed(weight, most), half = (text.length * LETTER) / 2;
    const free = (y) => taken.every((other) => Math.abs(unit.x - other.x) > half + other.half || Math.abs(y - other.y) > 12);
    const y = (unit.kind === "logit" ? [22] : unit.title ? [-15, 22] : [-10, 18]).map((off) => unit.y + off).find(free);
    if (y === undefined) return;
    taken.push({x: unit.x, y, half});
    this.written.append(svg("text", {x: unit.x, y, "text-anchor": "middle", class: weight < 0 ? "minus" : "plus"}, text));
  }

  at(event) {
    const box = this.svg.getBoundingClientRect();
    return nearestUnit(this.units, event.clientX - box.left, event.clientY - box.top, REACH);
  }

  point(event) {
    if (event.pointerType === "touch") return;
    this.hover(this.at(event));
  }

  hover(unit) {
    if (unit === this.hovered) return;
    this.hovered = unit;
    this.svg.classList.toggle("over", unit !== null);
    this.paint();
    this.showCard(unit);
  }

  showCard(unit) {
    this.card.hidden = unit === null;
    this.card.replaceChildren();
    if (unit === null) return;
    fill(this.card, {}, [el("b", {}, el("bdi", {}, unitName(this.model, unit))), el("bdi", {class: "soft"}, unitPlace(this.model, unit)),
      this.cardEdges("from", unit.inputs), this.cardEdges("to", unit.outputs)]);
    // Upper layers of early tokens are the emptiest corner; a unit that stands there sends the card to the other one.
    const away = unit.x - this.scroll.scrollLeft < this.card.offsetWidth + 30 && unit.y < this.card.offsetHeight + 30;
    this.card.classList.toggle("away", away);
  }

  cardEdges(word, edges) {
    const list = strongestEdges(edges).slice(0, 4);
    if (list.length === 0) return null;
    const most = Math.abs(list[0][1]);
    return el("ul", {}, list.map(([unit, weight]) => el("li", {}, el("span", {class: "soft"}, word), el("bdi", {}, unitName(this.model, unit)),
      el("span", {class: `num ${weight < 0 ? "minus" : "plus"}`}, signed(weight, most)))));
  }

  click(event) {
    const unit = this.at(event);
    this.onPick(unit);
  }

  arrive() {
    if (!this.cursor && this.svg.matches(":focus-visible")) this.cursor = this.selected ?? this.units.find((unit) => unit.kind === "logit") ?? this.units[0] ?? null;
    this.paint();
  }

  key(event) {
    if (event.key === "Escape") { event.preventDefault(); this.cursor = null; this.onPick(null); return; }
    if (!event.key.startsWith("Arrow") && event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    if (!this.cursor) { this.cursor = this.selected ?? this.units[0] ?? null; this.paint(); return; }
    if (!event.key.startsWith("Arrow")) { this.onPick(this.cursor); return; }
    this.cursor = neighbour(this.units, this.cursor, event.key);
    this.shapes.get(this.cursor).scrollIntoView({block: "nearest", inline: "nearest"});
    this.paint();
  }
}
