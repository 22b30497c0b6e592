// Beside the drawing: one unit with its edges and what it fires on. Above it: pins, supernodes, their file.

const EDGES_SHOWN = 8;

class UnitPanel {
  // table: {vocab, features} by "layer_latent"; onLook(unit): look at another unit, onPin(unit): pin or unpin.
  constructor(model, {onLook, onPin, onUngroup}) {
    Object.assign(this, {model, onLook, onPin, onUngroup, table: null});
    this.node = el("div", {class: "detail unit-detail", role: "region", "aria-label": "The node", tabindex: -1});
    this.show(null);
  }

  show(unit) {
    this.unit = unit;
    const focused = this.node.contains(document.activeElement);
    this.node.replaceChildren(...(unit ? this.content(unit) : [this.invitation()]));
    if (focused) this.node.focus({preventScroll: true});
  }

  invitation() {
    return el("p", {class: "note"}, "Point at a node to see its edges. Click it to pin it, and to read here what it fires on. ",
      "With the keyboard: Tab to the drawing, arrow keys to move, Enter to pin, Escape to leave.");
  }

  content(unit) {
    const pinned = unit.kind !== "group" && this.model.pinned.has(unit.key);
    const button = unit.kind === "group" ? el("button", {onclick: () => this.onUngroup(unit.group)}, "Ungroup")
      : el("button", {onclick: () => this.onPin(unit), "aria-pressed": String(pinned)}, pinned ? "Unpin" : "Pin");
    return [
      el("header", {}, el("h3", {}, el("bdi", {}, unitName(this.model, unit))), el("span", {class: "spread"}), button),
      el("p", {class: "place"}, el("bdi", {}, unitPlace(this.model, unit))),
      unit.kind === "group" ? this.members(unit) : this.facts(unit.node),
      this.edges("Inputs", unit.inputs, unit.received, (source) => this.model.heads.ofEdge(source, unit)),
      this.edges("Outputs", unit.outputs, null, (target) => this.model.heads.ofEdge(unit, target)),
      ...this.fires(unit),
    ].filter(Boolean);
  }

  facts({kind, activation, influence, probability}) {
    const pairs = [];
    if (activation !== null) pairs.push(["activation here", number(activation)]);
    if (kind === "logit") pairs.push(["probability", percent(probability)]);
    if (influence !== null) pairs.push(["cumulative influence", percent(influence), "This node and those of more influence have this share of all influence on the outputs."]);
    return el("dl", {class: "facts"}, pairs.map(([name, value, hint]) => el("div", {title: hint}, el("dt", {}, name), el("dd", {}, value))));
  }

  members(unit) {
    return el("ul", {class: "members"}, unit.members.map((node) => el("li", {}, el("bdi", {}, nodeName(this.model, node)),
      el("span", {class: "soft"}, ` at ${node.column}: ${visibleText(tokenAt(this.model, node.column))}`))));
  }

  // all: the sum of sizes that shares are of; without it no shares. headsOf(unit): which heads the edge passes.
  edges(title, edges, all, headsOf) {
    const list = strongestEdges(edges);
    if (list.length === 0) return null;
    const most = Math.abs(list[0][1]) || 1;
    const rows = list.map(([unit, weight]) => this.edgeRow(unit, weight, most, all, headsOf(unit)));
    const rest = rows.slice(EDGES_SHOWN);
    return el("div", {class: "edges"}, el("h4", {}, title, el("span", {class: "count"}, all ? "weight, share of all inputs" : "weight")),
      el("ul", {}, rows.slice(0, EDGES_SHOWN)),
      rest.length ? el("details", {class: "more"}, el("summary", {}, `${integer(rest.length)} more`), el("ul", {}, rest)) : null);
  }

  edgeRow(unit, weight, most, all, heads) {
    const bar = el("span", {class: "bar-track", "aria-hidden": "true"}, el("span", {class: `bar-fill ${weight < 0 ? "down" : "up"}`}));
    bar.firstChild.style.width = `${(100 * Math.abs(weight)) / most}%`;
    return el("li", {}, el("button", {class: "edge-row", onclick: () => this.onLook(unit), title: unitPlace(this.model, unit)},
      el("bdi", {class: "to"}, unitName(this.model, unit), ["feature", "error"].includes(unit.kind) ? el("span", {class: "soft"}, ` ${visibleText(tokenAt(this.model, unit.column))}`) : null),
      bar, el("span", {class: "num"}, signed(weight, most)), el("span", {class: "num soft"}, all ? percent(Math.round((1000 * Math.abs(weight)) / all) / 1000) : "")),
      heads ? el("p", {class: "edge-heads", title: "block.head, from the key's token to the query's, and its share of the edge"}, `heads ${heads}`) : null);
  }

  fires(unit) {
    if (unit.kind !== "feature") return [];
    if (this.table === null) return [el("p", {class: "note"}, "Unpacking the features\u2026")];
    const feature = this.table.features.get(`${unit.node.layer}_${unit.node.latent}`);
    if (!feature) return [el("p", {class: "note"}, "This page was made without passages of this feature.")];
    return [el("h4", {class: "fires"}, "Everywhere in the text"), ...featureDetail(this.table, feature)];
  }
}

function counted(count, word) { return `${integer(count)} ${word}${count === 1 ? "" : "s"}`; }

class Toolbar {
  // changed(): pins, supernodes or what is in sight changed. look(id): show a node.
  constructor(model, {changed, look}) {
    Object.assign(this, {model, changed, look});
    this.said = el("p", {class: "said-now", role: "status"});
    this.name = el("input", {type: "text", maxlength: 60, placeholder: "name", "aria-label": "Name of the new supernode",
      onkeydown: (event) => { if (event.key === "Enter") this.makeGroup(); }, oninput: () => this.refresh()});
    this.make = el("button", {class: "make", onclick: () => this.makeGroup()}, "Group pinned");
    this.clear = el("button", {class: "clear", onclick: () => this.unpinAll()}, "Unpin all");
    this.chips = el("ul", {class: "chips", "aria-label": "Pinned nodes and supernodes"});
    this.only = el("input", {type: "checkbox", onchange: () => { model.onlyPinned = this.only.checked; changed(); }});
    this.file = el("input", {type: "file", accept: ".json,application/json", hidden: true, onchange: () => this.load()});
    this.node = el("div", {class: "toolbar"},
      el("div", {class: "tools"}, this.slider(), el("label", {class: "check"}, this.only, "pinned only"), el("span", {class: "spread"}),
        el("button", {class: "save", onclick: () => this.save(), title: "Pins and supernodes as a JSON file"}, "Save pins"),
        el("button", {class: "load", onclick: () => this.file.click(), title: "A file that this page saved"}, "Load\u2026"), this.file),
      el("div", {class: "tools pins"}, this.chips, el("span", {class: "grouping"}, this.name, this.make, this.clear)),
      this.said);
    this.refresh();
  }

  slider() {
    const shares = this.model.nodes.map((node) => node.influence).filter((share) => share !== null);
    const least = Math.min(1, ...shares), most = Math.max(0, ...shares);
    this.model.threshold = most;
    if (!(most > least)) return null;
    const text = el("output", {}, percent(Math.round(most * 1000) / 1000));
    const input = el("input", {type: "range", min: 0, max: 100, value: 100, "aria-label": "Share of all influence that the nodes shown have together"});
    input.addEventListener("input", () => {
      const share = least + ((most - least) * Number(input.value)) / 100;
      this.model.threshold = Number(input.value) === 100 ? most : share;
      text.textContent = percent(Math.round(share * 1000) / 1000);
      input.setAttribute("aria-valuetext", text.textContent);
      this.changed();
    });
    return el("label", {class: "slide"}, "nodes with", input, text, "of the influence");
  }

  say(text) { this.said.textContent = text; }

  makeGroup() {
    const ids = this.model.loose(), name = this.name.value.trim();
    if (!name || ids.length === 0) return;
    this.model.group(name, ids);
    this.name.value = "";
    this.say(`Made the supernode ${visibleLine(name)} of ${counted(ids.length, "node")}.`);
    this.changed();
  }

  unpinAll() {
    this.model.restore({pinnedIds: [], supernodes: []});
    this.changed();
  }

  refresh() {
    const {model} = this, loose = model.loose();
    this.make.disabled = loose.length === 0 || !this.name.value.trim();
    this.clear.disabled = model.pinned.size === 0;
    const focused = this.chips.contains(document.activeElement);
    const groups = model.groups.map((group) => this.chip("group", `${visibleLine(group.name)} (${group.ids.length})`, group.ids[0], () => model.ungroup(group), "Ungroup"));
    const nodes = loose.map((id) => this.chip("node", nodeName(model, model.byId.get(id)), id, () => model.pin(id, false), "Unpin"));
    this.chips.replaceChildren(...groups, ...nodes);
    if (focused) (this.chips.querySelector("button") ?? this.name).focus();
    if (groups.length + nodes.length === 0) this.chips.append(el("li", {class: "soft"}, "Nothing is pinned. Pinned nodes stay in sight, and can be grouped into a supernode."));
  }

  chip(kind, text, id, remove, word) {
    return el("li", {class: `pin ${kind}`}, el("button", {class: "look", onclick: () => this.look(id)}, el("bdi", {}, shortened(text, 28))),
      el("button", {class: "remove", "aria-label": `${word} ${text}`, onclick: () => { remove(); this.changed(); }}, "\u00d7"));
  }

  inWords() { return `${counted(this.model.pinned.size, "pinned node")} and ${counted(this.model.groups.length, "supernode")}`; }

  save() {
    const text = JSON.stringify({slug: this.model.data.slug, qParams: this.model.saved()}, null, 2);
    const address = URL.createObjectURL(new Blob([`${text}\n`], {type: "application/json"}));
    const link = el("a", {href: address, download: `${this.model.data.slug}.supernodes.json`});
    link.click();
    setTimeout(() => URL.revokeObjectURL(address), 10000);
    this.say(`Saved ${this.inWords()}.`);
  }

  async load() {
    const [file] = this.file.files;
    if (!file) return;
    this.file.value = "";
    try {
      const lost = this.model.restore(checkedPins(JSON.parse(await file.text())));
      const missing = lost.length ? ` Of the file, ${counted(lost.length, "node")} ${lost.length === 1 ? "is" : "are"} not in this graph.` : "";
      this.say(`Loaded ${this.inWords()}.${missing}`);
    } catch (error) {
      this.say(`${visibleLine(file.name)} is not a file of pins: ${error.message}`);
    }
    this.changed();
  }
}

// The qParams of a saved file, or of a whole graph's JSON; throws where they are none.
function checkedPins(content) {
  const found = content?.qParams;
  const words = (list) => Array.isArray(list) && list.every((item) => typeof item === "string");
  if (!words(found?.pinnedIds) || !Array.isArray(found.supernodes)) throw new Error("it has no qParams with pinnedIds and supernodes");
  if (!found.supernodes.every((group) => words(group) && group.length > 0)) throw new Error("a supernode is not a list of a name and ids");
  return found;
}
