// How sure the evaluation is, for which tokens its figures hold, and how alike the latents are.

const BROKEN_DOWN = {fve: "FVE", loss_recovered: "Loss recovered", l0: "L0"};
const ORDERED = {position: "tokens of the document before it", frequency: "times the token occurs in the text"};

function between(interval, digits = 4) {
  return interval ? `${number(interval[0], digits)} to ${number(interval[1], digits)}` : "no interval";
}

function intervalsSection({intervals, documents, eval_metrics: metrics}) {
  if (!intervals || !documents) return null;
  const lead = `95% intervals from ${integer(documents.resamples)} resamples of the ${integer(documents.count)} documents that were evaluated.`;
  const rows = Object.entries(intervals).map(([name, interval]) => el("tr", {}, el("th", {scope: "row"}, el("code", {}, name)),
    el("td", {class: "num"}, number(metrics?.[name] ?? null, 4)), el("td", {class: "num"}, between(interval))));
  return section("intervals", "Intervals", lead, documents.note ? el("p", {class: "note"}, documents.note) : null,
    el("div", {class: "stages"}, table(["figure", "value", "95% interval"], rows, [1, 2])));
}

addSection(40, ["intervals", "documents", "eval_metrics"], intervalsSection);

// A point with its interval for each group, in the groups' order.
function groupChart({title, hint, groups, values, intervals, describe}) {
  const {width, height, left, right, top, bottom} = CHART;
  const shown = values.flatMap((value, i) => (value === null ? [] : [value, ...(intervals[i] ?? [])]));
  if (!shown.length) return null;
  const y = scale(padded([Math.min(...shown), Math.max(...shown)], 0.08), [height - bottom, top], {ticks: 4});
  const x = (i) => left + ((i + 0.5) / groups.length) * (width - left - right);
  // A label for every group that has room, and always for the last.
  const stride = Math.ceil((groups.length * (DIGIT * Math.max(...groups.map((name) => name.length)) + 6)) / (width - left - right));
  const readout = el("span", {class: "readout"});
  const none = Object.assign(() => 0, {ticks: []});
  const marks = groups.map((name, i) => {
    if (values[i] === null) return null;
    const show = () => readout.replaceChildren(describe(i));
    const ends = intervals[i];
    return svg("g", {class: "bar", onpointerenter: show, onpointerleave: () => readout.replaceChildren()},
      svg("rect", {class: "catch", x: x(i) - (width - left - right) / groups.length / 2, width: (width - left - right) / groups.length, y: top, height: height - top - bottom}),
      ends ? svg("line", {class: "line series-0", x1: x(i), x2: x(i), y1: y(ends[0]), y2: y(ends[1])}) : null,
      svg("circle", {class: "dot series-0", cx: x(i), cy: y(values[i]), r: 3.2}));
  });
  const labels = groups.map((name, i) => ((groups.length - 1 - i) % stride ? null :
    svg("text", {x: x(i), y: height - bottom + 15, "text-anchor": "middle"}, name)));
  return el("figure", {class: "chart"}, el("figcaption", {title: hint}, el("b", {}, title), readout),
    svg("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}: ${groups.map((name, i) => `${name} ${number(values[i])}`).join(", ")}`},
      axes(none, y, CHART), labels, marks));
}

function brokenDownCharts(kind, part) {
  return Object.entries(BROKEN_DOWN).filter(([key]) => part[key]).map(([key, title]) => groupChart({
    title: `${title} by ${kind}`, hint: ORDERED[kind], groups: part.groups, values: part[key], intervals: part[`${key}_interval`],
    describe: (i) => `${part.groups[i]}: ${number(part[key][i], 4)} (${between(part[`${key}_interval`][i])})`,
  }));
}

function brokenDownTable(part) {
  const figures = Object.entries(BROKEN_DOWN).filter(([key]) => part[key]);
  const rows = part.groups.map((name, i) => el("tr", {}, el("th", {scope: "row"}, name), el("td", {class: "num"}, integer(part.tokens[i])),
    el("td", {class: "num"}, integer(part.documents[i])), figures.flatMap(([key]) => [
      el("td", {class: "num"}, number(part[key][i], 4)), el("td", {class: "num"}, between(part[`${key}_interval`][i]))])));
  const heads = ["source", "tokens", "documents", ...figures.flatMap(([, title]) => [title, "95% interval"])];
  return table(heads, rows, heads.map((_, i) => i).slice(1));
}

function breakdownSection({breakdown}) {
  if (!breakdown || Object.keys(breakdown).length === 0) return null;
  const parts = [];
  for (const kind of Object.keys(ORDERED)) {
    if (!breakdown[kind]) continue;
    parts.push(el("div", {class: "charts"}, brokenDownCharts(kind, breakdown[kind])),
      el("p", {class: "note"}, `By ${kind}: ${ORDERED[kind]}.`));
  }
  if (breakdown.source) parts.push(el("h3", {}, "By source"), brokenDownTable(breakdown.source));
  return section("breakdown", "For which tokens", "Points with 95% intervals; the mean that FVE is measured against is that of all tokens.", parts);
}

addSection(50, ["breakdown"], breakdownSection);

function similaritySection({cosine, coactivation}) {
  if (!cosine && !coactivation) return null;
  const share = (unit) => (low, high, count) => `${low.toFixed(3)} to ${high.toFixed(3)} ${unit}: ${integer(count)} latents`;
  const charts = [];
  if (cosine) charts.push(barChart({title: "Latents by largest |cos| with another", edges: cosine.edges, counts: cosine.counts, describe: share("|cos|")}));
  if (coactivation) charts.push(barChart({title: "Latents by largest Jaccard index with another", edges: coactivation.edges, counts: coactivation.counts, describe: share("Jaccard")}));
  const how = coactivation ? `Jaccard index: tokens on which both fire, of those on which one does; ${integer(coactivation.latents)} latents on ` +
    `${integer(coactivation.tokens)} tokens. ${integer(coactivation.rare)} latents fired on too few of these to be compared.` : null;
  return section("similarity", "Latents that are alike", "What two latents write, and when they fire.", el("div", {class: "charts"}, charts), how ? el("p", {class: "note"}, how) : null);
}

addSection(70, ["cosine", "coactivation"], similaritySection);
