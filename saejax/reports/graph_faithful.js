// Faithfulness: what dictionaries skip of the model's steps, for all MLPs and for each; several sets side by side.

function faithfulSection({layers, rows}) {
  const heads = ["dictionaries", "skipped", "response error", "edges of a path", "replacement", "completeness"];
  const table = (label, titles, lines) => el("div", {class: "scroll", tabindex: 0, role: "group", "aria-label": label}, el("table", {},
    el("thead", {}, el("tr", {}, titles.map((title, i) => el("th", {scope: "col", class: i > 0 ? "num" : null}, title)))),
    el("tbody", {}, lines.map(([name, ...cells]) => el("tr", {}, el("th", {scope: "row"}, el("bdi", {}, visibleLine(name))), cells.map((cell) => el("td", {class: "num"}, cell)))))));
  const whole = rows.map((row) => [row.name, percent(Math.round(1000 * row.skipped) / 1000), number(row.error), number(row.path), number(row.replacement), number(row.completeness)]);
  const each = layers.map((layer, i) => [layer, ...rows.flatMap((row) => [percent(Math.round(1000 * row.skipped_by_layer[i]) / 1000), number(row.errors[i])])]);
  const titles = ["writes", ...rows.flatMap((row, i) => [`skipped${rows.length > 1 ? ` (${i + 1})` : ""}`, `response error${rows.length > 1 ? ` (${i + 1})` : ""}`])];
  return section("faithful", "Faithfulness", [
    "Skipped: the share of the influence through an MLP that features of earlier layers write in its place. Response error: how far the dictionary is from what the MLP does ",
    "when the features before it are half as strong; 0 agrees, 1 is as far as nothing happens. Edges of a path: mean from token to output."].join(""),
    el("div", {class: "faithful"}, table("faithfulness", heads, whole), el("details", {}, el("summary", {}, "By layer"), table("faithfulness by layer", titles, each))));
}
