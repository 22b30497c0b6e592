// Header and sections of a run, each from its summary: what the report and the live page show alike.

// Quantities in reading order; anything else that was logged follows by name. `linear`: never a log scale.
const QUANTITIES = {
  loss: {title: "Loss", hint: "the training objective"},
  mse: {title: "MSE", hint: "mean squared error"},
  fve: {title: "FVE", hint: "fraction of variance explained, centred", linear: true},
  r2: {title: "R\u00b2", hint: "coefficient of determination", linear: true},
  through_kl: {title: "KL through the model", hint: "nats a token, with the reconstruction in the model"},
  through_ce: {title: "Cross-entropy through the model", hint: "nats a token, with the reconstruction in the model"},
  l0: {title: "L0", hint: "latents active per token, mean"},
  dead: {title: "Dead", hint: "how many latents have not fired lately", linear: true},
  relative_error: {title: "Relative error", hint: "size of the residual against the activation"},
  lr: {title: "Learning rate", hint: "", linear: true},
  grad_norm: {title: "Gradient norm", hint: "before clipping"},
  tokens_per_second: {title: "Tokens per second", hint: "training rate", linear: true},
};

function coderLine(run) {
  const shape = run.d_in && run.d_sae ? `${integer(run.d_in)} \u2192 ${integer(run.d_sae)}` : run.d_sae ? `${integer(run.d_sae)} latents` : null;
  return [run.preset, shape, run.k ? `k = ${run.k}` : null].filter(Boolean).join(", ");
}

function pageHeader(summary) {
  const {run} = summary;
  const trained = run.tokens ? `${compact(run.tokens)} tokens` + (run.step ? `, ${integer(run.step)} steps` : "") : run.step ? `${integer(run.step)} steps` : null;
  const rows = [["model", run.model], ["hook point", run.hook_point], ["coder", coderLine(run)], ["trained on", trained]].filter(([, value]) => value);
  return el("header", {class: "masthead"},
    el("p", {class: "eyebrow"}, run.trained ? "saejax run" : "saejax: a dictionary, evaluated"),
    el("div", {class: "title-row"}, el("h1", {}, run.name), verdict(run)),
    el("dl", {class: "facts"}, rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    tiles(summary.tiles),
    summary.note ? el("p", {class: "note warn", role: "alert"}, summary.note) : null);
}

function verdict(run) {
  if (!run.gates_total) return null;
  const {gates_total: total, gates_passed: passed, gates_failed: failed} = run;
  const text = failed ? `${failed} of ${total} gates failed` : passed === total ? `all ${total} gates passed` : `${passed} of ${total} gates passed, ${total - passed} not measured`;
  return el("a", {class: `verdict ${failed ? "fail" : "pass"}`, href: "#gates"}, failed ? "\u2717 " : "\u2713 ", text);
}

const WRITTEN = {number, percent, count: integer};

function tileValue({value, kind}) {
  return value === null ? "\u2013" : WRITTEN[kind](value);
}

function tiles(list) {
  return el("ul", {class: "tiles", "aria-label": "Headline numbers"}, list.map((tile) => {
    const share = tile.of && tile.value !== null ? `of ${integer(tile.of)} (${percent(tile.value / tile.of)})` : null;
    return el("li", {title: tile.hint}, el("span", {class: "label"}, tile.label),
      el("span", {class: "big"}, tileValue(tile)), el("span", {class: "source"}, share ?? tile.source));
  }));
}

// [row's class, badge, what to do].
function gateResult(gate) {
  if (gate.passed) return ["pass", "\u2713 pass", gate.advice];
  if (gate.state === "not measured") return [gate.ends_well ? "none" : "fail", "\u2013 not measured", gate.unmeasured];
  return ["fail", "\u2717 fail", gate.advice];
}

function gatesSection({gates, warnings, skipped_gates: skipped, commands}) {
  const lead = "Bars that a coder must clear before its features are worth reading.";
  if (!gates || gates.length === 0) return section("gates", "Gates", null, missing("No gate has been measured yet; run", commands.evaluate));
  const rows = gates.map((gate) => {
    const [kind, badge, advice] = gateResult(gate);
    return el("tr", {class: kind}, el("th", {scope: "row"}, gate.title ?? gate.name),
      el("td", {class: "num"}, withUnit(gate.value, gate.unit)), el("td", {class: "num"}, `${gate.comparison} ${withUnit(gate.bar, gate.unit)}`),
      el("td", {}, el("span", {class: "badge"}, badge)), el("td", {class: "advice"}, advice ?? ""));
  });
  const beside = (warnings ?? []).map((one) => el("p", {class: "note"}, `Warning: ${one.title}: ${number(one.value)}, more than ${number(one.bar)}. ${one.advice}`));
  return section("gates", "Gates", lead, el("div", {class: "gates"}, table(["gate", "value", "bar", "result", "what to change if it fails"], rows, [1, 2])), ...beside,
    skipped ? el("p", {class: "note"}, `Not judged, because they look at a training: ${skipped.join(", ")}.`) : null);
}

addSection(10, ["gates", "warnings", "skipped_gates", "commands"], gatesSection);

// What gates.retries tried: each attempt with its changes and what came of them.
function attemptsSection({attempts: record}) {
  if (!record) return null;
  const rows = record.attempts.map((one) => {
    const own = one.name === "attempt-0", gates = one.gates ?? [];
    const changes = one.changes.map((c) => `${c.key} ${number(c.before)} \u2192 ${number(c.after)} (${c.gates.join(", ")})`).join("; ");
    const failed = gates.filter((gate) => !(gate.ends_well ?? gate.passed)).map((gate) => gate.name).join(", ");
    return el("tr", {class: one.name === record.kept ? "pass" : null},
      el("th", {scope: "row"}, one.name, own ? " (this page)" : one.gates ? el("div", {}, el("code", {}, `${one.name}/report.html`)) : ""),
      el("td", {}, one.begins_from || "\u2013"), el("td", {}, changes || "\u2013"),
      el("td", {}, one.gates ? failed || "none" : "not evaluated yet"),
      el("td", {class: "num"}, number(one.metrics.l0 ?? null)), el("td", {class: "num"}, number(one.metrics.fve ?? null)),
      el("td", {}, one.name === record.kept ? el("span", {class: "badge"}, "kept") : ""));
  });
  return section("attempts", "Attempts", "Gates failed, so the training was tried again with other settings (gates.retries).",
    table(["attempt", "from", "changed, and the gates that asked for it", "gates that fail", "L0", "FVE", ""], rows, [4, 5]),
    el("p", {class: "note"}, `${record.kept} is kept. ${record.why ?? ""}`));
}

addSection(20, ["attempts"], attemptsSection);

function withUnit(value, unit) {
  const text = value === null || value === undefined ? "n/a" : Math.abs(value) >= 1e4 ? integer(value) : String(Number(value.toPrecision(4)));
  return text + (unit ? (unit === "%" ? "" : "\u2009") + unit : "");
}

// numeric: which columns hold numbers.
function table(heads, rows, numeric = []) {
  return el("div", {class: "scroll", tabindex: 0, role: "group", "aria-label": "table"}, el("table", {},
    el("thead", {}, el("tr", {}, heads.map((head, i) => el("th", {scope: "col", class: numeric.includes(i) ? "num" : null}, head)))),
    el("tbody", {}, rows)));
}

// {"train/fve": .., "val/fve": ..} -> [["fve", [series, series]], ...] in reading order.
function quantities(curves) {
  const groups = new Map(Object.keys(QUANTITIES).map((name) => [name, []]));
  for (const key of Object.keys(curves).sort()) {
    const [prefix, ...rest] = key.split("/");
    const name = rest.length ? rest.join("/") : prefix;
    if (curves[key].values.every((value) => value === null)) continue;
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push({name: rest.length ? prefix : "value", ...curves[key]});
  }
  return [...groups].filter(([, series]) => series.length > 0);
}

function quantity(name) {
  return Object.hasOwn(QUANTITIES, name) ? QUANTITIES[name] : {title: name, hint: ""};
}

// The first and the last step of all series.
function stepsOf(series) {
  const ends = series.flatMap(({steps}) => [steps[0], steps[steps.length - 1]]);
  return padded([Math.min(...ends), Math.max(...ends)], 0);
}

function curvesSection(summary) {
  if (!summary.run.trained) return null;
  const groups = quantities(summary.curves);
  if (groups.length === 0) return section("training", "Training", null, missing("Nothing has been logged yet; run", summary.commands.train));
  const series = groups.flatMap(([, list]) => list);
  const steps = stepsOf(series);
  const cursor = new Cursor();
  const charts = groups.map(([name, list]) => new LineChart({...quantity(name), series: list, steps}, cursor).node);
  const thinned = series.some((one) => one.logged > one.steps.length);
  return section("training", "Training", "By step; point at one chart to read the same step in all of them.",
    el("div", {class: "charts"}, charts),
    summary.has_validation ? null : missing("Nothing was validated during training; held-out numbers come from", summary.commands.evaluate),
    thinned ? el("p", {class: "note"}, "Long curves are drawn from the lowest and highest value of each short stretch.") : null);
}

addSection(30, ["run", "curves", "commands", "has_validation"], curvesSection, false);

function densitySection({density, commands}) {
  if (!density) return section("density", "Feature density", null, missing("Feature densities have not been measured yet; run", commands.evaluate));
  const live = density.counts.reduce((sum, count) => sum + count, 0), total = live + (density.dead ?? 0);
  const lead = `On which fraction of ${compact(density.n_tokens)} tokens each latent fires. ` +
    `${integer(density.dead)} of ${integer(total)} latents never fired.`;
  return section("density", "Feature density", lead, el("div", {class: "wide-chart"}, barChart({
    title: "Latents by log\u2081\u2080 density", edges: density.log10_edges, counts: density.counts,
    describe: (low, high, count) => `${percent(10 ** low)} to ${percent(10 ** high)} of tokens: ${integer(count)} latents`,
    // In a smaller frame the letters keep their size on a phone.
    frame: window.matchMedia("(max-width: 720px)").matches ? CHART : WIDE_CHART,
  })));
}

addSection(60, ["density", "commands"], densitySection);

function stagesSection({run, stages, commands}) {
  if (!run.trained) return null;
  if (!stages || Object.keys(stages).length === 0) return section("stages", "Stages", null, missing("The rates of the stages are collected by", commands.evaluate));
  const rows = Object.entries(stages).map(([name, stage]) => el("tr", {}, el("th", {scope: "row"}, name),
    el("td", {class: "num"}, compact(stage.tokens)), el("td", {class: "num"}, duration(stage.seconds)),
    el("td", {class: "num"}, integer(stage.tokens_per_second === undefined ? null : stage.tokens_per_second))));
  return section("stages", "Stages", null, el("div", {class: "stages"}, table(["stage", "tokens", "time", "tokens per second"], rows, [1, 2, 3])));
}

addSection(90, ["run", "stages", "commands"], stagesSection);

function fold(title, ...children) {
  return el("details", {}, el("summary", {}, title), ...children);
}

// A nested object as rows of dotted names.
function flat(value, prefix = "") {
  if (value === null || typeof value !== "object" || (Array.isArray(value) && value.every((item) => typeof item !== "object"))) {
    return [[prefix, Array.isArray(value) ? value.join(", ") : String(value)]];
  }
  return Object.entries(value).flatMap(([key, item]) => flat(item, prefix ? `${prefix}.${key}` : key));
}

function keyTable(value) {
  return table(["name", "value"], flat(value).map(([name, text]) => el("tr", {}, el("th", {scope: "row"}, el("code", {}, name)), el("td", {}, el("code", {}, text)))));
}

function filesTable(files) {
  return table(["file", "size", "sha256"], files.map((file) => el("tr", {}, el("th", {scope: "row"}, el("code", {}, file.name)),
    el("td", {class: "num"}, bytes(file.bytes)), el("td", {}, el("code", {title: file.sha256}, file.sha256.slice(0, 16))))), [1]);
}

// How a run was made, as folds.
function madeFolds({run, eval_metrics: metrics, eval_step: step, config, environment, commands}) {
  const at = step === null || step === undefined ? "" : ` at step ${integer(step)}`;
  return [
    Object.keys(metrics ?? {}).length > 0 ? fold(`Every number of the evaluation${at}`, keyTable(metrics)) : null,
    fold(run.trained ? "Configuration" : "What it is, and on what it was evaluated", keyTable(config)),
    environment ? fold("Environment", keyTable(environment)) : run.trained ? missing("The environment is written by", commands.train) : null,
  ];
}

const MADE_OF = ["run", "eval_metrics", "eval_step", "config", "environment", "commands"];

addSection(120, [...MADE_OF, "files"], (summary) => section("provenance", "How it was made", null, ...madeFolds(summary),
  fold("Files this page was made from", filesTable(summary.files))), false);
