// What took the time of a training: a bar and a table by component, the loop's own work, memory by step.

const OUTSIDE = ["other programs", "rest of the step"];

function partOf(name) {
  if (name.startsWith("backward")) return "backward";
  if (["optimizer", "resample"].includes(name)) return "update";
  return OUTSIDE.includes(name) ? "rest" : "forward";
}

// Parts of one whole side by side; pointing at one reads it out.
function partsBar(rows) {
  const readout = el("span", {class: "readout"});
  let at = 0;
  const parts = rows.map((row) => {
    const from = at;
    at += row.share;
    return svg("rect", {class: `part ${row.part}`, x: from * 1000 + 0.5, width: Math.max(0.2, row.share * 1000 - 1), y: 0, height: 24,
      onpointerenter: () => readout.replaceChildren(`${row.name}: ${number(row.ms)} ms, ${percent(row.share)}`),
      onpointerleave: () => readout.replaceChildren()});
  });
  return el("figure", {class: "chart parts"},
    el("figcaption", {}, el("b", {}, "One step"), ["forward", "backward", "update", "rest", "idle"].filter((part) => rows.some((row) => row.part === part))
      .map((part) => el("span", {class: `key ${part}`}, part === "idle" ? "device idle" : part)), readout),
    svg("svg", {viewBox: "0 0 1000 24", preserveAspectRatio: "none", role: "img", "aria-label": "Parts of a step, as in the table below"}, parts));
}

function timesTable(what, rows) {
  const most = Math.max(...rows.map((row) => row.share), 1e-9);
  return table([what, "ms a step", "share", ""], rows.map((row) => el("tr", {}, el("th", {scope: "row"}, row.name),
    el("td", {class: "num"}, number(row.ms)), el("td", {class: "num"}, percent(row.share)),
    el("td", {class: "share"}, svg("svg", {viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true"},
      svg("rect", {class: `part ${row.part}`, x: 0, y: 0, width: (row.share / most) * 100, height: 8}))))), [1, 2]);
}

function tracedTime({trace, step}) {
  if (!trace || trace.components.length === 0) return [el("p", {class: "note"}, "No step was traced: the training was too short, or its backend names no operations.")];
  const rows = [...trace.components.map((row) => ({...row, part: partOf(row.name)})),
    ...trace.idle.map((row) => ({...row, name: `device idle: ${row.name}`, part: "idle"}))].filter((row) => row.share >= 0.0005);
  const costs = [step.flops ? `${compact(step.flops)} floating-point operations` : null, step.bytes ? `${compact(step.bytes)} bytes moved` : null,
    step.memory_bytes ? `${bytes(step.memory_bytes)} of memory` : null].filter(Boolean);
  return [partsBar(rows), timesTable("component", rows),
    costs.length ? el("p", {class: "note"}, `A step on one device, as XLA counts it (a loop's body once): ${costs.join(", ")}.`) : null];
}

function memoryChart(memory) {
  const series = [["host", "host_bytes"], ["device", "device_bytes"]].map(([name, key]) => {
    const known = memory.filter((point) => point[key] !== undefined && point[key] !== null);
    return {name, steps: known.map((point) => point.step), values: known.map((point) => point[key] / 1e6)};
  }).filter((one) => one.steps.length > 1);
  if (series.length === 0) return null;
  const steps = padded([series[0].steps[0], series[0].steps[series[0].steps.length - 1]], 0);
  return el("div", {class: "charts"}, new LineChart({title: "Memory (MB)", hint: "of the process, and of its fullest device", series, steps, linear: true}, new Cursor()).node);
}

function profileSection({profile}) {
  if (!profile) return null;
  const {trace, session} = profile;
  const lead = trace ? `Steps ${integer(trace.first_step)} to ${integer(trace.first_step + trace.steps - 1)}, traced: ${number(trace.step_ms)} ms each.` : null;
  const phases = session.phases.map((row) => ({...row, part: "rest"}));
  return section("profile", "What took the time", lead, ...tracedTime(profile),
    fold(`What the loop waited for, or did itself, in ${integer(session.steps)} steps of ${number(session.ms_per_step)} ms`, timesTable("the loop", phases)),
    memoryChart(profile.memory));
}

addSection(110, ["profile"], profileSection);

function monitorChart(title, hint, series, shown = {}) {
  const list = Object.entries(series).map(([name, one]) => ({name, steps: one.steps, values: one.values})).filter((one) => one.steps.length > 1);
  if (list.length === 0) return null;
  const ends = list.flatMap((one) => [one.steps[0], one.steps[one.steps.length - 1]]);
  const steps = padded([Math.min(...ends), Math.max(...ends)], 0);
  return new LineChart({title, hint, series: list, steps, linear: true, ...shown}, new Cursor()).node;
}

// Memory, utilisation and the loop's work, as the rows of metrics have them (train.monitor).
function monitorSection({monitor}) {
  if (!monitor) return null;
  const charts = [monitorChart("Memory (MB)", "of the process, and of its fullest device", monitor.memory),
    monitorChart("Utilisation", "share of the CPUs that the process may use; of the device's time", monitor.use)].filter(Boolean);
  const most = Object.entries(monitor.most).map(([name, value]) => `${name} ${number(value)} MB`);
  return section("monitor", "What it took", most.length ? `Memory at most: ${most.join("; ")}.` : null,
    charts.length ? el("div", {class: "charts"}, charts) : null,
    monitor.phases.length ? timesTable("the loop", monitor.phases.map((row) => ({...row, part: "rest"}))) : null,
    monitor.phases.length ? el("p", {class: "note"}, `Over ${integer(monitor.steps)} steps. "The step" is good: the device works then.`) : null);
}

addSection(100, ["monitor"], monitorSection);
