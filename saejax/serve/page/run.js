// One run: its header, its gates, curves that move while it trains, its pages, and how it was made.

const RUN_MS = 5000;
const CURVE_MS = 300;
// Beyond so many points a curve is thinned as the report thins it.
const MOST_POINTS = 3000;
const NOT_CURVES = ["step", "tokens", "time"];
const OF_MONITOR = ["time/", "after/", "host/", "device/", "loop/"];

// Of each stretch the lowest, the highest and the first gap; a plain stride would hide spikes.
function thinned({steps, values}) {
  const count = steps.length, stretches = MOST_POINTS / 6, keep = new Set([0, count - 1]);
  for (let i = 0; i < stretches; i++) {
    let low = -1, high = -1;
    for (let at = Math.floor((i * count) / stretches); at < Math.floor(((i + 1) * count) / stretches); at++) {
      if (values[at] === null) { if (!keep.has(at - 1)) keep.add(at); continue; }
      if (low < 0 || values[at] < values[low]) low = at;
      if (high < 0 || values[at] > values[high]) high = at;
    }
    if (low >= 0) keep.add(low).add(high);
  }
  const places = [...keep].sort((one, other) => one - other);
  return {steps: places.map((at) => steps[at]), values: places.map((at) => values[at])};
}

// The curves of a run, to which rows of its metrics are added as they come.
class Curves {
  constructor() {
    this.cursor = new Cursor();
    this.charts = new Map();
    this.grid = el("div", {class: "charts"});
    this.note = el("p", {class: "empty"}, "The curves begin with the first row that the training writes.");
    this.node = el("div", {class: "curves"}, this.note, this.grid);
    this.start({});
  }

  start(curves) {
    this.curves = new Map(Object.entries(curves).map(([key, {steps, values}]) => [key, {steps: [...steps], values: [...values]}]));
    this.draw();
  }

  add(rows) {
    for (const row of rows) {
      for (const [key, value] of Object.entries(row)) {
        if (NOT_CURVES.includes(key) || OF_MONITOR.some((part) => key.startsWith(part)) || (value !== null && typeof value !== "number")) continue;
        if (!this.curves.has(key)) this.curves.set(key, {steps: [], values: []});
        const {steps, values} = this.curves.get(key);
        // A training that goes on from a checkpoint writes the steps behind it again.
        while (steps.length && steps[steps.length - 1] >= row.step) { steps.pop(); values.pop(); }
        steps.push(row.step);
        values.push(value);
      }
    }
    for (const [key, curve] of this.curves) if (curve.steps.length > MOST_POINTS) this.curves.set(key, thinned(curve));
    this.timer ??= setTimeout(() => { this.timer = undefined; this.draw(); }, CURVE_MS);
  }

  draw() {
    const groups = quantities(Object.fromEntries(this.curves));
    this.note.hidden = groups.length > 0;
    if (groups.length === 0) { this.grid.replaceChildren(); this.charts.clear(); return; }
    const steps = stepsOf(groups.flatMap(([, series]) => series));
    groups.forEach(([name, series], place) => {
      const chart = this.charts.get(name);
      if (chart) return chart.show(series, steps);
      const fresh = new LineChart({...quantity(name), series, steps}, this.cursor);
      this.charts.set(name, fresh);
      this.grid.insertBefore(fresh.node, this.grid.children[place] ?? null);
    });
  }
}

function openLink(text, name) {
  return el("a", {class: "button", href: `/files/${inPath(name)}`, target: "_blank", rel: "noopener"}, text);
}

// The pages that a run or a sweep has: each opens below the list, or in a tab of its own.
function pagesSection(pages) {
  if (!pages || pages.length === 0) return null;
  const host = el("div");
  const buttons = pages.map(({title, name}) => {
    const button = el("button", {type: "button", "aria-pressed": "false", onclick: () => {
      const shown = button.getAttribute("aria-pressed") === "true";
      buttons.forEach((one) => one.setAttribute("aria-pressed", String(one === button && !shown)));
      host.replaceChildren(...(shown ? [] : [
        el("iframe", {class: "framed", src: `/files/${inPath(name)}`, title, sandbox: "allow-scripts allow-popups", loading: "lazy"}),
        el("p", {class: "note"}, el("a", {href: `/files/${inPath(name)}`, target: "_blank", rel: "noopener"}, "Open it in a tab of its own"))]));
    }}, title);
    return button;
  });
  return section("pages", "Pages", "Reports, studies and graphs that were written here. Each opens below.", el("div", {class: "tabs"}, buttons), host);
}

class RunHeader {
  constructor(name) {
    this.name = name;
    this.crumb = el("p", {class: "crumb"}, "run");
    this.badge = stateBadge();
    this.bar = progressBar("progress of the training");
    this.line = el("p");
    this.gates = new Slot((run) => verdict({gates_total: run.gates_total, gates_passed: run.gates_passed, gates_failed: run.failed_gates.length}));
    this.facts = new Slot((rows) => el("dl", {class: "facts"}, rows.map(([label, value]) => el("div", {}, el("dt", {}, label), el("dd", {}, value)))));
    this.tiles = new Slot((list) => tiles(list));
    this.stop = el("button", {type: "button", title: "SIGTERM: it saves and ends", onclick: () => this.doStop()}, "Stop");
    this.again = el("button", {type: "button", onclick: () => this.doContinue()}, "Continue");
    this.evaluate = el("button", {type: "button", onclick: () => this.command(this.evaluate, "evaluate")}, "Evaluate");
    this.report = el("button", {type: "button", onclick: () => this.command(this.report, "report")}, "Write report");
    this.features = el("a", {class: "button", href: address("features", name)}, "Features");
    this.page = openLink("Report page", `${name}/report.html`);
    this.compare = el("a", {class: "button", href: `#/compare?${new URLSearchParams({run: name})}`}, "Compare");
    this.other = el("a", {class: "button", href: `#/start?${new URLSearchParams({run: name})}`}, "Start from it");
    this.node = el("header", {class: "masthead"}, this.crumb, el("div", {class: "title-row"}, el("h1", {}, name), this.badge.node, this.gates.node),
      el("div", {class: "going-now"}, this.bar.node, this.line), this.facts.node,
      el("div", {class: "actions"}, this.features, this.page, this.compare, this.other, this.evaluate, this.report, this.again, this.stop), this.tiles.node);
  }

  show(run, summary) {
    this.run = run;
    this.crumb.replaceChildren(...(run.sweep ? ["member of the sweep ", el("a", {href: address("sweep", run.sweep)}, run.sweep)] : ["run"]));
    this.gates.show(run);
    const byPrefix = run.preset === "prefix", own = byPrefix ? {model: run.model, hook_point: null} : {};
    const info = {...summary.run, preset: run.preset ?? summary.run.preset, d_sae: summary.run.d_sae ?? run.d_sae, k: summary.run.k ?? run.k, ...own};
    this.facts.show([["model", info.model], ["hook point", info.hook_point], ["coder", coderLine(info)], ["moved", moment(run.updated)]].filter(([, value]) => value));
    this.tiles.show(summary.tiles);
    const off = (node, condition, why) => {
      if (node.tagName === "BUTTON") node.disabled = condition; else fill(node, {"aria-disabled": String(condition)}, []);
      node.title = condition ? why : "";
    };
    const going = run.state === "running";
    off(this.features, !run.has_features && !run.has_coder, "There are no features before the first checkpoint");
    off(this.page, !run.has_report, "No report has been written yet");
    off(this.evaluate, byPrefix || going || !["trained", "evaluated", "failed"].includes(run.state), byPrefix ? "saejax prefix evaluates it" : "A finished training can be evaluated");
    off(this.report, going || run.evaluated_at === null, "An evaluated run can have a report");
    off(this.again, byPrefix || going || !["stopped", "waiting"].includes(run.state), byPrefix ? "saejax prefix continues it" : "Nothing is left to train");
    off(this.stop, !going, "Nobody trains this run now");
    this.moved({});
  }

  // What a row of metrics changes.
  moved(row) {
    const run = Object.assign(this.run, row);
    if (row.step && run.steps && run.tokens_per_second) run.seconds_left = (Math.max(0, run.steps - run.step) * (run.tokens / run.step)) / run.tokens_per_second;
    this.badge.show(run.state);
    this.bar.show(run.steps ? run.step / run.steps : 0);
    setText(this.line, progressLine(run) || (run.error ?? "Nothing has been trained yet."));
  }

  doStop() {
    return acting(this.stop, async () => {
      await post("/api/stop", {run: this.name});
      toast("It was told to save and end.");
    });
  }

  async doContinue() {
    await acting(this.again, async () => {
      const {jobs} = await api("/api/jobs");
      const own = this.run.sweep ?? this.name, job = jobs.find((one) => one.name === own && one.can_continue);
      jobStarted(job ? await post(`/api/jobs/${job.id}/continue`, {}) : await post("/api/jobs", {command: this.run.sweep ? "sweep" : "train", run: own}));
    });
  }

  command(button, command) {
    return acting(button, async () => jobStarted(await post("/api/jobs", {command, run: this.name})));
  }
}

class RunView {
  constructor(host, name) {
    this.name = name;
    this.header = new RunHeader(name);
    this.curves = new Curves();
    this.sections = [
      ...SECTIONS.filter(({live}) => live).map(({order, of, draw}) => [order, of, new Slot(draw)]),
      [30, null, {node: section("training", "Training", "By step; point at one chart to read the same step in all of them.", this.curves.node)}],
      [80, ["pages"], new Slot(({pages}) => pagesSection(pages))],
      [120, MADE_OF, new Slot((summary) => this.made(summary))],
      [130, ["files"], new Slot(({files}) => [fold("Files this page was made from", filesTable(files))])],
    ].sort(([one], [other]) => one - other);
    this.body = el("div", {hidden: true}, this.header.node, this.sections.map(([, , slot]) => slot.node));
    this.waiting = el("div", {class: "masthead reserve"}, el("p", {class: "crumb"}, "run"), el("h1", {}, name));
    host.append(this.waiting, this.body);
    this.follow = null;
    this.asked = watch(`/api/runs/${inPath(name)}`, RUN_MS, (answer) => this.show(answer), (error) => this.fail(error));
  }

  fail(error) {
    if (this.body.hidden) this.waiting.append(problem(error));
    this.asked();
  }

  show({run, summary, at, pages}) {
    // Rows of the socket are newer than an answer that was asked for before they came.
    if (this.latest && this.latest.step > (run.step ?? 0) && run.state === "running") Object.assign(run, this.latest);
    this.header.show(run, summary);
    const known = {...summary, pages};
    for (const [, of, slot] of this.sections) if (of) slot.show(Object.fromEntries(of.map((key) => [key, known[key]])));
    this.waiting.remove();
    this.body.hidden = false;
    if (this.follow !== null) return;
    this.curves.start(summary.curves);
    this.follow = live(`/ws/runs/${inPath(this.name)}`, (message) => this.take(message), {at});
  }

  take(message) {
    if (message.kind === "rows") {
      this.curves.add(message.rows);
      const last = message.rows.filter((row) => row["train/tokens_per_second"]).pop();
      if (!last) return;
      this.latest = {step: last.step, tokens: last.tokens, tokens_per_second: last["train/tokens_per_second"]};
      this.header.moved(this.latest);
    } else if (message.kind === "reset") {
      this.latest = null;
      this.curves.start({});
    } else if (message.kind === "state") {
      this.asked.now();
    }
  }

  made(summary) {
    const origin = el("div", {}, el("p", {class: "note"}, "Asking\u2026"));
    const provenance = fold("Provenance: model, store, command and where an example comes from", origin);
    provenance.addEventListener("toggle", () => this.origin(origin), {once: true});
    return section("provenance", "How it was made", null, ...madeFolds(summary), provenance);
  }

  async origin(host) {
    try {
      const {run, why} = await api(`/api/provenance/${inPath(this.name)}`);
      const {config, ...rest} = run;
      host.replaceChildren(keyTable(rest), ...(why ?? []).map((text) => el("p", {class: "note"}, text)));
    } catch (error) {
      host.replaceChildren(problem(error));
    }
  }

  stop() {
    this.asked();
    if (this.follow) this.follow();
  }
}

VIEWS.set("run", {
  title: (rest) => rest,
  draw(host, rest) {
    const view = new RunView(host, rest);
    return () => view.stop();
  },
});
