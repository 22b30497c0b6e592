// A store of activations: its splits, how far they are, and what `saejax store info` says.

const STORE_MS = 3000;

function splitRow() {
  const name = el("b"), about = el("small"), badge = stateBadge(), bar = progressBar("rows written"), said = el("small");
  const cells = ["rows", "size", "numbers", "shards"].map((label, i) => el("td", {class: `num${i % 2 ? "" : " odd"}`, "data-name": label}));
  const node = el("tr", {}, el("th", {scope: "row", class: "named"}, name, about), el("td", {class: "going"}, badge.node, bar.node, said), cells);
  const show = ([split, one]) => {
    setText(name, split);
    setText(about, one.error ?? [one.model, one.text, Object.entries(one.hook_points ?? {}).map(([point, width]) => `${point} (${integer(width)})`).join(", ")].filter(Boolean).join(", "));
    badge.show(one.state);
    bar.show(one.complete ? 1 : one.rows_total ? one.rows / one.rows_total : 0);
    setText(said, one.complete || !one.rows_total ? "" : `${integer(one.rows)} of ${integer(one.rows_total)}`);
    [integer(one.rows), largeBytes(one.bytes), one.dtype ?? "n/a", integer(one.shards)].forEach((text, i) => setText(cells[i], text));
  };
  return {node, show};
}

VIEWS.set("store", {
  title: (rest) => rest,
  draw(host, rest) {
    const facts = el("dl", {class: "facts"}), info = new Slot((lines) => section("info", "What it holds", null, el("pre", {class: "lines"}, (lines ?? []).join("\n"))));
    const {node, body} = listing([["split", 0], ["state", 0], ["rows", 1], ["size", 1], ["numbers", 1], ["shards", 1]], "Splits", "plain");
    const rows = new KeyedRows(body, ([split]) => split, splitRow);
    const all = el("div", {hidden: true}, el("header", {class: "masthead"}, el("p", {class: "crumb"}, "store"), el("div", {class: "title-row"}, el("h1", {}, rest)), facts), node, info.node);
    host.append(all);
    const stop = watch(`/api/stores/${inPath(rest)}`, STORE_MS, (store) => {
      facts.replaceChildren(...[["size", largeBytes(store.bytes)], ["moved", moment(store.updated)]].map(([label, value]) => el("div", {}, el("dt", {}, label), el("dd", {}, value))));
      rows.show(Object.entries(store.splits));
      info.show(store.lines);
      all.hidden = false;
    }, (error) => { host.append(problem(error)); stop(); });
    return stop;
  },
});
