// How long the rows of the training's store are, and whether a few of them decide the error.

function normsTable(points, beyond) {
  const heads = ["hook point", "rows looked at", "median norm", "largest", `longer than ${number(beyond)} medians`, "their share of the variance", "mean over spread"];
  return table(heads, Object.entries(points).map(([name, of]) => el("tr", {}, el("th", {scope: "row"}, el("code", {}, name)),
    [integer(of.n), number(of.median, 4), number(of.largest, 4), percent(of.long), percent(of.share), number(of.mean_over_spread)]
      .map((text) => el("td", {class: "num"}, text)))), heads.map((_, i) => i).slice(1));
}

function positionsChart(name, positions) {
  const groups = Object.keys(positions).map((label) => label.replace(" to ", "-")), values = Object.values(positions);
  return groupChart({
    title: `Norm by position, ${name}`, hint: "the median norm there, in medians of all rows", groups, values, intervals: [],
    describe: (i) => `${groups[i]}: ${number(values[i])} medians`,
  });
}

function normsSection({norms}) {
  if (!norms) return null;
  const {rows, beyond, left_out: out, hook_points: points, warnings} = norms;
  const sinks = !out ? "" : out.first || out.massive ?
    ` As sinks the capture left out ${integer(out.first)} tokens that stand first and ${integer(out.massive)} with a massive activation.` : " The capture left out no token as a sink.";
  const charts = Object.entries(points).map(([name, {positions}]) => positionsChart(name, positions)).filter(Boolean);
  return section("norms", "Norms of the activations", `Of the ${integer(rows)} rows of the training's store.${sinks}`,
    ...warnings.map((text) => el("p", {class: "note warn"}, text)), normsTable(points, beyond),
    charts.length ? el("div", {class: "charts"}, charts) : null,
    el("p", {class: "note"}, "Norm by position: the median norm there, in medians of all rows. Mean over spread: the norm of the mean over the root of the total variance."));
}

addSection(75, ["norms"], normsSection);
