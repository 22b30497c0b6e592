// The graph and what the reader made of it: pinned nodes, supernodes, and what is in sight.

// A unit is what is drawn as one: a node, or the nodes of a supernode. Its edges are sums over its members.
class Unit {
  constructor(key, kind, members, row, column) {
    Object.assign(this, {key, kind, members, row, column});
    this.title = null;  // of those that are drawn as a pill with their name
    this.inputs = new Map();
    this.outputs = new Map();
    this.received = 0;
  }

  get node() { return this.kind === "group" ? null : this.members[0]; }
}

class GraphModel {
  // data: {tokens, rows, nodes: [{id, kind, row, column, ..}], sources, targets, weights, qParams}
  constructor(data) {
    this.data = data;
    this.nodes = data.nodes;
    this.byId = new Map(this.nodes.map((node, i) => { node.index = i; return [node.id, node]; }));
    this.threshold = 1;
    this.onlyPinned = false;
    this.restore(data.qParams);
  }

  // Takes pins and supernodes of a saved file; returns the ids that this graph does not have.
  restore(qParams) {
    const known = (ids) => ids.filter((id) => this.byId.has(id));
    const all = [...qParams.pinnedIds, ...qParams.supernodes.flatMap(([, ...ids]) => ids)];
    this.groups = [];
    for (const [name, ...ids] of qParams.supernodes) this.group(name, known(ids));
    this.pinned = new Set(known(all));
    return [...new Set(all.filter((id) => !this.byId.has(id)))];
  }

  saved() {
    const supernodes = this.groups.map((group) => [group.name, ...group.ids]);
    return {pinnedIds: [...this.pinned], supernodes, linkType: this.data.qParams.linkType, clickedId: "", sg_pos: ""};
  }

  // Makes one supernode of the nodes; each leaves the one that it was in.
  group(name, ids) {
    const taken = new Set(ids);
    for (const group of this.groups) group.ids = group.ids.filter((id) => !taken.has(id));
    if (taken.size > 0) this.groups.push({name, ids: [...taken]});
    this.groups = this.groups.filter((group) => group.ids.length > 0);
  }

  ungroup(group) { this.groups = this.groups.filter((other) => other !== group); }

  loose() {
    const inside = new Set(this.groups.flatMap((group) => group.ids));
    return [...this.pinned].filter((id) => !inside.has(id));
  }

  pin(id, on = !this.pinned.has(id)) {
    if (on) { this.pinned.add(id); return; }
    this.pinned.delete(id);
    for (const group of this.groups) group.ids = group.ids.filter((other) => other !== id);
    this.groups = this.groups.filter((group) => group.ids.length > 0);
  }

  inSight(node) {
    if (this.pinned.has(node.id) || node.kind === "logit") return true;
    if (this.onlyPinned) return false;
    return node.kind === "token" || node.influence === null || node.influence <= this.threshold;
  }

  // The units in sight with their edges among each other.
  units() {
    const owner = new Array(this.nodes.length).fill(null), units = [];
    this.groups.forEach((group, i) => {
      const members = group.ids.map((id) => this.byId.get(id));
      const unit = new Unit(`group ${i}`, "group", members, ...this.middle(members));
      unit.group = group;
      unit.title = `${visibleLine(group.name)} (${members.length})`;
      for (const node of members) owner[node.index] = unit;
      units.push(unit);
    });
    for (const node of this.nodes) {
      if (owner[node.index] || !this.inSight(node)) continue;
      const unit = new Unit(node.id, node.kind, [node], node.row, node.column);
      if (this.onlyPinned && node.row > 0 && node.kind !== "logit") unit.title = node.label ? visibleLine(node.label) : node.kind === "error" ? "error" : `feature ${node.latent}`;
      owner[node.index] = unit;
      units.push(unit);
    }
    const {sources, targets, weights} = this.data;
    weights.forEach((weight, i) => {
      const source = owner[sources[i]], target = owner[targets[i]];
      if (!target || source === target) return;
      target.received += Math.abs(weight);
      if (!source) return;
      const sum = (target.inputs.get(source) ?? 0) + weight;
      target.inputs.set(source, sum);
      source.outputs.set(target, sum);
    });
    return units;
  }

  // A supernode stands in the middle of its members' layers, at the token that most of them have.
  middle(members) {
    const counts = new Map();
    for (const {column} of members) counts.set(column, (counts.get(column) ?? 0) + 1);
    const [column] = [...counts].reduce((best, one) => (one[1] > best[1] || (one[1] === best[1] && one[0] > best[0]) ? one : best));
    const mean = members.reduce((sum, {row}) => sum + row, 0) / members.length;
    const top = this.data.rows.length - 2;
    return [top < 1 ? Math.round(mean) : Math.min(top, Math.max(1, Math.round(mean))), column];
  }
}

// Edges of a unit in one direction, the strongest first: [[unit, weight], ...].
function strongestEdges(edges) {
  return [...edges].sort((a, b) => Math.abs(b[1]) - Math.abs(a[1]));
}

function tokenAt(model, column) { return model.data.tokens[column]; }

// What a unit is called in one line.
function unitName(model, unit) {
  if (unit.kind === "group") return visibleLine(unit.group.name);
  return nodeName(model, unit.node);
}

function nodeName(model, node) {
  const token = tokenAt(model, node.column);
  if (node.kind === "token") return `token ${node.column}: ${visibleText(token)}`;
  if (node.kind === "logit") return `output ${visibleText(node.label)}`;
  if (node.kind === "error") return `error, layer ${node.layer}`;
  return node.label ? visibleLine(node.label) : `feature ${node.latent}, layer ${node.layer}`;
}

// Where it stands, for labels: "layer 2, feature 8, at token 10".
function unitPlace(model, unit) {
  if (unit.kind === "group") return counted(unit.members.length, "node");
  const {node} = unit, at = `at ${node.column}: ${visibleText(tokenAt(model, node.column))}`;
  if (node.kind === "feature") return `${node.label ? `layer ${node.layer}, feature ${node.latent}, ` : ""}${at}`;
  return node.kind === "error" ? at : node.kind === "logit" ? `p ${number(node.probability)}` : "embedding";
}
