// Several runs side by side: one chart a quantity, one colour a run, and in what their settings differ.

const COMPARE_MS = 5000;
const MOST_BESIDE = 12;
const FIGURES = [["L0", (run) => number(run.l0)], ["FVE", (run) => number(run.fve)], ["loss", (run) => number(run.loss)],
  ["dead", (run) => percent(run.dead_fraction)], ["latents", (run) => integer(run.d_sae)], ["k", (run) => run.k ?? "\u2013"],
  ["steps", (run) => integer(run.step)], ["tokens", (run) => compact(run.tokens)], ["gates", gatesText]];

function swatch(place) {
  const node = el("span", {class: `swatch dash-${place % DASHES.length}`, "aria-hidden": "true"});
  node.style.setProperty("--own", `var(--series-${place})`);
  return node;
}

function valueText(value) {
  if (value === null || value === undefined) return "\u2013";
  return typeof value === "string" ? value || "\u201c\u201d" : JSON.stringify(value);
}

class Comparison {
  constructor(host, names) {
    this.names = names;
    this.cursor = new Cursor();
    this.charts = new Map();
    this.grid = el("div", {class: "charts compared"});
    this.figures = new Slot((runs) => this.table(runs));
    this.all = el("input", {type: "checkbox", onchange: () => this.differences()});
    this.configs = null;
    this.rows = [];
    this.keys = el("div");
    this.add = el("select", {"aria-label": "Add a run", onchange: () => this.go([...this.names, this.add.value])}, el("option", {value: ""}, "Add a run\u2026"));
    // Nothing is shown before both answers are there, so that nothing moves.
    this.body = el("div", {hidden: names.length > 0}, this.figures.node,
      section("training", "Curves", "By step; point at one chart to read the same step in all of them.", this.grid),
      section("settings", "Settings", null, el("div", {class: "toolbar"}, el("label", {class: "check"}, this.all, "also those that are the same")), this.keys));
    this.body.querySelectorAll("section").forEach((node) => { node.hidden = names.length === 0; });
    host.append(headed("Compare", this.add), this.body);
    this.stops = [watch("/api/overview", COMPARE_MS, ({runs}) => this.known(runs))];
    if (names.length) this.stops.push(watch(`/api/compare?${new URLSearchParams(names.map((name) => ["run", name]))}`, COMPARE_MS, (answer) => this.show(answer), (error) => { this.drawn = true; this.grid.replaceChildren(problem(error)); this.open(); }));
    else this.figures.show([]);
  }

  go(names) {
    location.hash = `#/compare?${new URLSearchParams([...new Set(names)].slice(0, MOST_BESIDE).map((name) => ["run", name]))}`;
  }

  open() {
    if (this.runs && this.drawn) this.body.hidden = false;
  }

  known(runs) {
    this.runs = runs;
    const free = runs.map((run) => run.name).filter((name) => !this.names.includes(name));
    if (document.activeElement !== this.add) this.add.replaceChildren(el("option", {value: ""}, "Add a run\u2026"), ...free.map((name) => el("option", {value: name}, name)));
    this.add.disabled = this.names.length >= MOST_BESIDE || free.length === 0;
    this.figures.show(this.names.map((name) => runs.find((run) => run.name === name) ?? {name}));
    this.open();
  }

  table(runs) {
    if (runs.length === 0) return el("div", {class: "scroll"}, el("p", {class: "empty"}, "Choose runs here, or tick them in the overview."));
    const node = table(["run", "state", ...FIGURES.map(([label]) => label), ""], runs.map((run, i) => el("tr", {},
      el("th", {scope: "row"}, swatch(i), el("a", {href: address("run", run.name)}, run.name)),
      el("td", {}, el("span", {class: `state ${run.state ?? ""}`}, run.state ?? "n/a")), FIGURES.map(([, text]) => el("td", {class: "num"}, run.state ? text(run) : "n/a")),
      el("td", {}, el("button", {type: "button", "aria-label": `Take ${run.name} out`, onclick: () => this.go(this.names.filter((name) => name !== run.name))}, "\u00d7")))),
    FIGURES.map((_, i) => i + 2));
    node.classList.add("figures");
    return node;
  }

  // {"train/fve": [{name, steps, values}]} -> [["fve", "train", series]]: one chart for each key, in the report's order.
  show({rows, curves}) {
    const charts = [];
    for (const [name, list] of quantities(Object.fromEntries(Object.keys(curves).map((key) => [key, {steps: [0], values: [0]}])))) {
      for (const {name: prefix} of list) charts.push([name, prefix, curves[`${prefix}/${name}`] ?? curves[name]]);
    }
    const drawn = charts.map(([name, prefix, list]) => [`${prefix}/${name}`, name, prefix, list.filter((one) => one.values.some((value) => value !== null))
      .map((one) => ({...one, hue: this.names.indexOf(one.name)}))]).filter(([, , , series]) => series.length > 0);
    drawn.forEach(([key, name, prefix, series], place) => {
      const steps = stepsOf(drawn.flatMap(([, , , one]) => one)), chart = this.charts.get(key);
      if (chart) return chart.show(series, steps);
      const known = quantity(name);
      const fresh = new LineChart({...known, title: `${known.title}, ${prefix}`, series, steps}, this.cursor);
      this.charts.set(key, fresh);
      this.grid.insertBefore(fresh.node, this.grid.children[place] ?? null);
    });
    this.rows = rows;
    this.differences();
    this.drawn = true;
    this.open();
  }

  async differences() {
    let rows = this.rows;
    try {
      if (this.all.checked) {
        this.configs ??= await Promise.all(this.names.map(async (name) => Object.fromEntries(flat((await api(`/api/runs/${inPath(name)}`)).summary.config))));
        const differing = new Set(rows.map(({key}) => key));
        rows = [...new Set(this.configs.flatMap((config) => Object.keys(config)))].map((key) => ({key, values: this.configs.map((config) => config[key]), same: !differing.has(key)}));
      }
    } catch (error) {
      this.keys.replaceChildren(problem(error));
      return;
    }
    const shown = JSON.stringify(rows);
    if (shown === this.shownKeys) return;
    this.shownKeys = shown;
    if (rows.length === 0) return this.keys.replaceChildren(el("p", {class: "note"}, this.names.length < 2 ? "One run differs from nothing." : "These runs have the same settings."));
    const node = table(["setting", ...this.names], rows.map(({key, values, same}) => el("tr", {class: same ? "quiet" : null},
      el("th", {scope: "row"}, el("code", {}, key)), values.map((value) => el("td", {}, el("code", {}, valueText(value)))))));
    node.classList.add("differs");
    node.querySelectorAll("thead th").forEach((head, i) => { if (i > 0) head.prepend(swatch(i - 1)); });
    this.keys.replaceChildren(node);
  }

  stop() { this.stops.forEach((stop) => stop()); }
}

VIEWS.set("compare", {
  title: () => "Compare",
  draw(host, rest, query) {
    const view = new Comparison(host, [...new Set(query.getAll("run"))].slice(0, MOST_BESIDE));
    return () => view.stop();
  },
});
