// A sweep: sparsity against fidelity, one point a member, moving while they train.

const SWEEP_MS = 2000;
const SCATTER = {width: 760, height: 380, left: 58, right: 20, top: 14, bottom: 44};
// On a phone the same letters in a smaller picture.
const SMALL_SCATTER = {width: 360, height: 300, left: 52, right: 12, top: 10, bottom: 40};

function groupOf(member) {
  return [member.preset ?? "members", member.d_sae ? `${integer(member.d_sae)} latents` : null].filter(Boolean).join(", ");
}

// With the figure of all tokens beside it where an evaluation met sinks.
function fveOf({fve, fve_with_sinks: whole}) {
  return number(fve) + (whole === null || whole === undefined ? "" : ` (${number(whole)} with sinks)`);
}

class Scatter {
  constructor() {
    this.frame = window.matchMedia("(max-width: 720px)").matches ? SMALL_SCATTER : SCATTER;
    this.said = el("p", {class: "said", role: "status"});
    this.legend = el("div", {class: "legend-row"});
    this.axes = svg("g");
    this.marks = svg("g");
    this.points = new Map();
    this.node = el("figure", {class: "chart wide-chart"}, el("figcaption", {}, el("b", {}, "FVE by L0")),
      svg("svg", {viewBox: `0 0 ${this.frame.width} ${this.frame.height}`, role: "group", "aria-label": "Members by L0 and FVE"}, this.axes, this.marks), this.said);
    this.groups = [];
  }

  show(members) {
    const known = members.filter((one) => Number.isFinite(one.l0) && Number.isFinite(one.fve));
    for (const [name, {link}] of this.points) if (!known.some((one) => one.name === name)) { link.remove(); this.points.delete(name); }
    if (known.length === 0) { setText(this.said, "No member has a figure yet."); return; }
    for (const one of members) if (!this.groups.includes(groupOf(one))) this.groups.push(groupOf(one));
    const {width, height, left, right, top, bottom} = this.frame;
    const l0 = known.map((one) => one.l0), fve = known.map((one) => one.fve);
    const log = Math.min(...l0) > 0 && Math.max(...l0) / Math.min(...l0) > 4;
    const across = log ? [Math.min(...l0) / 1.25, Math.max(...l0) * 1.25] : padded([Math.min(...l0), Math.max(...l0)], 0.08);
    const x = scale(across, [left, width - right], {log, ticks: 6}), y = scale(padded([Math.min(...fve), Math.max(...fve)], 0.1), [height - bottom, top], {ticks: 6});
    this.axes.replaceChildren(axes(x, y, this.frame),
      svg("text", {class: "axis-name", x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle"}, `L0: latents active per token${log ? ", log scale" : ""}`),
      svg("text", {class: "axis-name", x: 14, y: (top + height - bottom) / 2, "text-anchor": "middle", transform: `rotate(-90 14 ${(top + height - bottom) / 2})`}, "FVE"));
    for (const one of known) this.place(one, x(one.l0), y(one.fve));
    this.drawLegend();
    if (!this.node.contains(document.activeElement) && !this.node.matches(":hover")) setText(this.said, "Point at a member, or step through them with Tab.");
  }

  place(member, x, y) {
    if (!this.points.has(member.name)) {
      const mark = svg("circle", {r: 7, cx: x, cy: y});
      const link = svg("a", {href: address("run", member.name)}, mark);
      const say = () => setText(this.said, link.getAttribute("aria-label"));
      for (const kind of ["pointerenter", "focus"]) link.addEventListener(kind, say);
      this.points.set(member.name, {mark, link});
      this.marks.append(link);
    }
    const {mark, link} = this.points.get(member.name), done = member.steps && member.step >= member.steps;
    mark.style.setProperty("--own", `var(--series-${this.groups.indexOf(groupOf(member)) % 12})`);
    fill(mark, {class: done ? "mark" : "mark open", cx: x.toFixed(1), cy: y.toFixed(1)}, []);
    const at = done ? "" : `, ${progressLine({...member, state: "stopped"})}`;
    fill(link, {"aria-label": `${member.label ?? member.name}: L0 ${number(member.l0)}, FVE ${fveOf(member)}, dead ${percent(member.dead_fraction)}, ${member.state}${at}`}, []);
  }

  drawLegend() {
    if (this.legend.childElementCount === this.groups.length + 1) return;
    this.legend.replaceChildren(...this.groups.map((name, i) => {
      const item = el("span", {}, swatch(i % 12), name);
      return item;
    }), el("span", {class: "quiet"}, "open: still trains"));
  }
}

function memberRow() {
  const name = el("a"), about = el("small"), badge = stateBadge(), bar = progressBar("progress"), said = el("small");
  const cells = ["L0", "FVE", "dead", "latents", "k"].map((label, i) => el("td", {class: `num${i % 2 ? "" : " odd"}`, "data-name": label}));
  const node = el("tr", {}, el("th", {scope: "row", class: "named"}, name, about), el("td", {class: "going"}, badge.node, bar.node, said), cells);
  const show = (one) => {
    setText(name, one.label ?? one.name);
    fill(name, {href: address("run", one.name)}, []);
    setText(about, one.preset ?? "");
    badge.show(one.state);
    bar.show(one.steps ? one.step / one.steps : 0);
    setText(said, progressLine({...one, state: "stopped"}));
    [number(one.l0), fveOf(one), percent(one.dead_fraction), integer(one.d_sae), String(one.k ?? "\u2013")].forEach((text, i) => setText(cells[i], text));
  };
  return {node, show};
}

class SweepView {
  constructor(host, name) {
    this.name = name;
    this.badge = stateBadge();
    this.scatter = new Scatter();
    this.again = el("button", {type: "button", onclick: () => this.go()}, "Continue");
    this.compare = el("a", {class: "button"}, "Compare members");
    const {node, body} = listing([["member", 0], ["state", 0], ["L0", 1], ["FVE", 1], ["dead", 1], ["latents", 1], ["k", 1]], "Members", "plain");
    this.rows = new KeyedRows(body, (one) => one.name, memberRow);
    this.pages = new Slot(pagesSection);
    this.body = el("div", {hidden: true}, el("header", {class: "masthead"}, el("p", {class: "crumb"}, "sweep"), el("div", {class: "title-row"}, el("h1", {}, name), this.badge.node),
      el("div", {class: "actions"}, this.compare, this.again)),
    section("picture", "Sparsity and fidelity", "Up and to the left is better: more of the variance with fewer latents.", this.scatter.legend, this.scatter.node),
    section("members", "Members", null, node), this.pages.node);
    host.append(this.body);
    this.stop = watch(`/api/sweeps/${inPath(name)}`, SWEEP_MS, (sweep) => this.show(sweep), (error) => { host.append(problem(error)); this.stop(); });
  }

  show(sweep) {
    const members = sweep.members;
    this.body.hidden = false;
    this.badge.show(sweep.state);
    this.scatter.show(members);
    this.rows.show(members);
    this.pages.show(sweep.pages);
    this.again.disabled = !["stopped", "waiting"].includes(sweep.state);
    fill(this.compare, {href: `#/compare?${new URLSearchParams(members.slice(0, MOST_BESIDE).map((one) => ["run", one.name]))}`, "aria-disabled": String(members.length < 2)}, []);
  }

  go() {
    return acting(this.again, async () => jobStarted(await post("/api/jobs", {command: "sweep", run: this.name})));
  }
}

VIEWS.set("sweep", {
  title: (rest) => rest,
  draw(host, rest) {
    const view = new SweepView(host, rest);
    return () => view.stop();
  },
});
