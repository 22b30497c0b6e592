// The first view: runs, sweeps, stores, dictionaries and jobs, as they are now.

const OVERVIEW_MS = 2000;
const MOST_ROWS = 200;
const MOST_JOBS = 5;
// What the reader set, kept while other views are looked at.
const overviewState = {filter: "", inner: false, picked: new Set()};

function runRow(picked) {
  const name = el("a"), about = el("small"), badge = stateBadge(), bar = progressBar("progress"), left = el("small");
  const cells = ["tokens/s", "L0", "FVE", "dead", "gates"].map((label, i) => el("td", {class: `num${i % 2 ? "" : " odd"}`, "data-name": label}));
  const when = el("td", {class: "when", "data-name": "moved"});
  const pick = el("input", {type: "checkbox", onchange: () => picked(pick)});
  const node = el("tr", {}, el("td", {class: "pick"}, pick), el("th", {scope: "row", class: "named"}, name, about),
    el("td", {class: "going"}, badge.node, bar.node, left), cells, when);
  const show = (run) => {
    pick.value = run.name;
    pick.checked = overviewState.picked.has(run.name);
    fill(pick, {"aria-label": `Compare ${run.name}`}, []);
    setText(name, run.name);
    fill(name, {href: address("run", run.name)}, []);
    const shape = run.d_sae ? `${integer(run.d_sae)} latents` : null;
    setText(about, run.error ?? [run.preset, shape, run.k ? `k = ${run.k}` : null, run.model, run.hook_point].filter(Boolean).join(", "));
    badge.show(run.state);
    bar.show(run.steps ? run.step / run.steps : 0);
    setText(left, progressLine(run, true));
    const rate = run.state === "running" && run.tokens_per_second ? compact(run.tokens_per_second) : "\u2013";
    [rate, number(run.l0), number(run.fve), percent(run.dead_fraction), gatesText(run)].forEach((text, i) => setText(cells[i], text));
    setClass(cells[4], `num odd ${run.gates_total ? (run.failed_gates.length ? "failing" : "passed") : ""}`);
    cells[4].title = (run.failed_gates ?? []).join(", ");
    setText(when, ago(run.updated));
    when.title = moment(run.updated);
  };
  return {node, show};
}

// A row with a name, a line about it, a state, and a few texts: sweeps, stores, dictionaries, jobs.
function plainRow(labels) {
  return () => {
    const name = el("a"), about = el("small"), badge = stateBadge(), bar = progressBar("progress"), said = el("small");
    const cells = labels.map((label, i) => el("td", {class: `num${i % 2 ? "" : " odd"}`, "data-name": label}));
    const node = el("tr", {}, el("th", {scope: "row", class: "named"}, name, about), el("td", {class: "going"}, badge.node, bar.node, said), cells);
    const show = (row) => {
      setText(name, row.title);
      fill(name, {href: row.href}, []);
      setText(about, row.about);
      badge.show(row.state);
      badge.node.hidden = !row.state;
      bar.node.hidden = row.share === undefined;
      bar.show(row.share);
      setText(said, row.said ?? "");
      row.texts.forEach((text, i) => setText(cells[i], text));
    };
    return {node, show};
  };
}

function sweepAsRow(sweep) {
  const states = new Map();
  for (const member of sweep.members) states.set(member.state, (states.get(member.state) ?? 0) + 1);
  const done = sweep.members.reduce((sum, one) => sum + (one.steps ? Math.min(1, (one.step ?? 0) / one.steps) : 0), 0);
  const best = sweep.members.map((one) => one.fve).filter((value) => value !== null);
  return {
    key: sweep.name, title: sweep.name, href: address("sweep", sweep.name), state: sweep.state, share: sweep.members.length ? done / sweep.members.length : 0,
    about: [...new Set(sweep.members.map((one) => one.preset).filter(Boolean))].join(", "), said: [...states].map(([state, count]) => `${count} ${state}`).join(", "),
    texts: [integer(sweep.members.length), best.length ? number(Math.max(...best)) : "n/a"],
  };
}

function storeAsRow(store) {
  const splits = Object.entries(store.splits);
  const rows = splits.reduce((sum, [, one]) => sum + (one.rows ?? 0), 0), all = splits.reduce((sum, [, one]) => sum + (one.rows_total ?? 0), 0);
  const error = splits.map(([, one]) => one.error).find(Boolean);
  const complete = splits.length > 0 && splits.every(([, one]) => one.complete);
  const points = new Set(splits.flatMap(([, one]) => Object.keys(one.hook_points ?? {})));
  const [, first] = splits[0] ?? [null, {}];
  const writing = splits.map(([, one]) => one.state).find((state) => state !== "complete");
  return {
    key: store.name, title: store.name, href: address("store", store.name), state: complete ? "complete" : writing ?? "waiting",
    share: complete || !all ? undefined : rows / all, about: error ?? [first.model, first.text, [...points].join(", ")].filter(Boolean).join(", "),
    said: complete || !all ? "" : `${compact(rows)} of ${compact(all)} rows`, texts: [compact(rows), largeBytes(store.bytes), ago(store.updated)],
  };
}

function dictionaryAsRow(one) {
  const width = one.d_sae ? `${integer(one.d_in)} \u2192 ${integer(one.d_sae)}` : "\u2013";
  return {key: one.name, title: one.label, href: address("features", one.name), about: [one.model, one.hook_point].filter(Boolean).join(", "), texts: [width]};
}

function jobAsRow(job) {
  return {key: job.id, title: `${job.command} ${job.name}`, href: address("job", job.id), state: job.state, about: job.last, said: "",
    texts: [duration(job.seconds === null ? null : Math.round(job.seconds)), ago(job.started ?? job.created)]};
}

// Running ones first, in the order of their names, so that none jumps at every step; then what moved last.
function byMovement(runs) {
  const going = (run) => run.state === "running";
  return [...runs].sort((one, other) => going(other) - going(one) ||
    (going(one) ? (one.name < other.name ? -1 : 1) : other.updated - one.updated || (one.name < other.name ? -1 : 1)));
}

function isInner(run) {
  return run.sweep !== null || /\/attempt-\d+$/.test(run.name);
}

function matches(text, filter) {
  const low = text.toLowerCase();
  return filter.toLowerCase().split(/\s+/).every((word) => low.includes(word));
}

class Overview {
  constructor(host) {
    this.all = null;
    this.search = el("input", {type: "search", placeholder: "Filter by name, state, model or coder", "aria-label": "Filter", autocomplete: "off", spellcheck: "false",
      oninput: () => { overviewState.filter = this.search.value; this.show(); }});
    this.search.value = overviewState.filter;
    this.inner = el("input", {type: "checkbox", onchange: () => { overviewState.inner = this.inner.checked; this.show(); }});
    this.inner.checked = overviewState.inner;
    this.compare = el("a", {class: "button", "aria-disabled": "true"}, "Compare");
    this.count = el("span", {class: "quiet small counted", role: "status"});
    const runs = listing([["", 0], ["run", 0], ["state", 0], ["tokens/s", 1], ["L0", 1], ["FVE", 1], ["dead", 1], ["gates", 1], ["moved", 0]], "Runs");
    this.runs = new KeyedRows(runs.body, (run) => run.name, () => runRow((box) => this.pick(box)));
    this.runsTable = runs.node;
    this.runsBox = el("div", {class: "reserve"}, el("p", {class: "empty"}, "Looking\u2026"));
    const part = (id, title, heads) => {
      const {node, body} = listing([["name", 0], ["state", 0], ...heads.map((head) => [head, 1])], title, "plain");
      const shown = section(id, title, null, node);
      shown.hidden = true;
      return {node: shown, rows: new KeyedRows(body, (row) => row.key, plainRow(heads))};
    };
    this.parts = {sweeps: part("sweeps", "Sweeps", ["members", "best FVE"]), stores: part("stores", "Stores", ["rows", "size", "moved"]),
      dictionaries: part("dictionaries", "Dictionaries", ["width"]), jobs: part("jobs", "Jobs", ["time", "begun"])};
    this.parts.jobs.node.append(el("p", {class: "note"}, el("a", {href: "#/jobs"}, "All jobs")));
    host.append(headed("Runs", el("a", {class: "button first", href: "#/start"}, "Start a training")),
      el("div", {class: "toolbar"}, this.search, el("label", {class: "check"}, this.inner, "members and attempts"), el("span", {class: "spread"}), this.count, this.compare),
      this.runsBox, ...Object.values(this.parts).map(({node}) => node));
    this.choose();
  }

  pick(box) {
    if (box.checked) overviewState.picked.add(box.value); else overviewState.picked.delete(box.value);
    this.choose();
  }

  choose() {
    const names = [...overviewState.picked];
    setText(this.compare, names.length ? `Compare ${names.length}` : "Compare");
    fill(this.compare, {"aria-disabled": String(names.length < 2), href: `#/compare?${new URLSearchParams(names.map((name) => ["run", name]))}`}, []);
    this.compare.title = names.length < 2 ? "Tick two runs or more" : "";
  }

  show(all = this.all) {
    this.all = all;
    if (all === null) return;
    const {filter, inner} = overviewState;
    const found = byMovement(all.runs).filter((run) => filter.trim() ? matches(`${run.name} ${run.state} ${run.model} ${run.preset} ${run.hook_point}`, filter.trim()) : inner || !isInner(run));
    const known = new Set(all.runs.map((run) => run.name));
    for (const name of overviewState.picked) if (!known.has(name)) overviewState.picked.delete(name);
    this.choose();
    this.runs.show(found.slice(0, MOST_ROWS));
    setText(this.count, all.runs.length ? `${integer(Math.min(found.length, MOST_ROWS))} of ${integer(all.runs.length)} runs` : "");
    setClass(this.runsBox, "");
    if (all.runs.length > 0) {
      if (this.runsTable.parentNode === null) this.runsBox.replaceChildren(this.runsTable);
    } else if (!this.runsBox.querySelector(".first-step")) {
      this.runsBox.replaceChildren(firstStep());
    }
    this.showPart("sweeps", all.sweeps.map(sweepAsRow));
    this.showPart("stores", [...all.stores].sort((one, other) => other.updated - one.updated).map(storeAsRow));
    this.showPart("dictionaries", all.dictionaries.map(dictionaryAsRow));
    this.showJobs();
  }

  // Jobs stand last, and come when the rest is there: so they move nothing.
  showJobs() {
    if (this.all && this.jobs) this.showPart("jobs", this.jobs.slice(0, MOST_JOBS).map(jobAsRow));
  }

  showPart(name, rows) {
    const {filter} = overviewState, part = this.parts[name];
    const found = filter.trim() ? rows.filter((row) => matches(`${row.title} ${row.state} ${row.about}`, filter.trim())) : rows;
    part.node.hidden = rows.length === 0;
    part.rows.show(found.slice(0, MOST_ROWS));
  }
}

function firstStep() {
  return el("div", {class: "scroll first-step"}, el("div", {class: "empty"},
    el("p", {}, "There is no run in this folder yet. This one trains a sparse autoencoder on a small model that comes along, in a few minutes:"),
    el("pre", {class: "command"}, "saejax pipeline --config=quickstart"),
    el("div", {class: "actions"}, el("a", {class: "button first", href: "#/start?experiment=quickstart"}, "Set it up here"))));
}

VIEWS.set("", {
  title: () => "Runs",
  draw(host) {
    const view = new Overview(host);
    const stops = [watch("/api/overview", OVERVIEW_MS, (all) => view.show(all), (error) => toast(error.message, "bad")),
      watch("/api/jobs", OVERVIEW_MS, ({jobs}) => { view.jobs = jobs; view.showJobs(); })];
    return () => stops.forEach((stop) => stop());
  },
});

// #/features without a dictionary: all that there are, or the one.
async function chooseDictionary(host) {
  host.append(headed("Features"), el("p", {class: "lead"}, "Of which dictionary?"));
  try {
    const {runs, dictionaries} = await api("/api/overview");
    const rows = [...byMovement(runs).filter((run) => run.has_coder || run.has_features).map((run) => ({
      key: run.name, title: run.name, href: address("features", run.name), about: [run.preset, run.model, run.hook_point].filter(Boolean).join(", "), texts: [integer(run.d_sae)],
    })), ...dictionaries.map(dictionaryAsRow)];
    if (!host.isConnected || parsed(location.hash)?.name !== "features") return;
    if (rows.length === 1) location.replace(rows[0].href);
    const {node, body} = listing([["dictionary", 0], ["", 0], ["latents", 1]], "Dictionaries", "plain");
    new KeyedRows(body, (row) => row.key, plainRow(["latents"])).show(rows);
    host.append(rows.length ? node : firstStep());
  } catch (error) {
    host.append(problem(error));
  }
}
