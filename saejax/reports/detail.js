// Everything about one feature: how often and how strongly it fires, on what, and what it writes.

function facts(feature) {
  const rate = feature.density < 0.2 ? `, 1 token in ${integer(Math.round(1 / feature.density))}` : " of tokens";
  const often = feature.density > 0 ? percent(feature.density) + rate : "never in this scan";
  const least = feature.min < 0 ? [["minimum", number(feature.min, 4)]] : [];
  const pairs = [["fires on", often], ["maximum", number(feature.max, 4)], ...least, ["mean", number(feature.mean, 4)]];
  return el("dl", {class: "facts"}, pairs.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

// What language models said it stands for, the newest first, with how well that predicts where it fires.
function explanations(feature) {
  return (feature.explanations ?? []).map(({text, by, scores}) => {
    const marks = Object.entries(scores).map(([kind, value]) =>
      el("span", {class: "score", title: "Balanced accuracy: 0.5 by chance, 1 at best"}, `${kind} `, el("b", {class: "num"}, value.toFixed(2))));
    return el("p", {class: "explanation"}, el("bdi", {class: "said"}, visibleLine(text)), el("span", {class: "by"}, marks, el("bdi", {}, `by ${visibleLine(by)}`)));
  });
}

function activationHistogram(feature) {
  const histogram = feature.histogram;
  if (!histogram || !histogram.counts.some((count) => count > 0)) return null;
  return barChart({
    title: "Activations", edges: histogram.edges, counts: histogram.counts, frame: SMALL_CHART,
    describe: (low, high, count) => `${number(low)} to ${number(high)}: ${integer(count)} tokens`,
  });
}

function logitList(table, title, pairs, most, kind) {
  if (!pairs || pairs.length === 0) return null;
  const rows = pairs.map(([token, value]) => {
    const bar = el("span", {class: "bar-track", "aria-hidden": "true"}, el("span", {class: `bar-fill ${kind}`}));
    bar.firstChild.style.width = `${most > 0 ? (100 * Math.abs(value)) / most : 0}%`;
    return el("li", {}, tokenChip(tokenText(table, token)), bar, el("span", {class: "num"}, signed(value, most)));
  });
  return el("div", {class: "logits"}, el("h4", {}, title), el("ol", {}, rows));
}

function logits(table, feature) {
  const all = [...(feature.top_logits ?? []), ...(feature.bottom_logits ?? [])];
  if (all.length === 0) return null;
  const most = Math.max(...all.map(([, value]) => Math.abs(value)));
  return [logitList(table, "Promotes", feature.top_logits, most, "up"), logitList(table, "Suppresses", feature.bottom_logits, most, "down")];
}

// `tool`: one more thing to stand beside the document's name, or null.
function exampleItem(table, feature, example, tool = null) {
  const peak = example.activations[example.peak];
  return el("li", {"aria-label": `activation ${number(peak)} on ${visibleText(table.vocab[example.tokens[example.peak]])}`},
    el("div", {class: "where"}, el("b", {class: "num"}, number(peak)),
      el("bdi", {class: "document", title: example.document}, example.document ?? ""),
      example.position === undefined ? null : el("span", {}, `token ${integer(example.position)}`), tool),
    passage(table.vocab, example, Math.abs(strongest(feature))));
}

function examples(table, feature, tool) {
  const list = feature.examples ?? [];
  if (list.length === 0) {
    const why = feature.density > 0 ? "No passage was kept for this feature." : "This feature never fired on the tokens scanned, so there is no passage to show.";
    return el("p", {class: "note"}, why);
  }
  return [
    el("div", {class: "examples-head"}, el("h4", {}, "Top-activating passages"), heatLegend(feature)),
    el("ol", {class: "examples"}, list.map((example, i) => exampleItem(table, feature, example, tool(i)))),
    quantiles(table, feature),
  ];
}

// Passages from all over the activation range, folded away under the strongest ones.
function quantiles(table, feature) {
  if (feature.quantiles === undefined) {
    return missing("Passages from weaker activations are in reports made by this version:", "saejax report --config=... --redo");
  }
  const parts = feature.quantiles.filter((part) => part.examples.length > 0);
  if (parts.length === 0) return null;
  const count = parts.reduce((sum, part) => sum + part.examples.length, 0);
  const size = feature.min < 0 ? "|activation|" : "activation";
  return el("details", {class: "quantiles"},
    el("summary", {}, "Sampled by quantile", el("span", {class: "count"}, `${count} passages drawn at random from parts of the activation range`)),
    parts.flatMap((part) => [
      el("h5", {}, `${size} ${number(part.low)} to ${number(part.high)}`, el("span", {class: "count"}, `${percent(part.fraction)} of tokens`)),
      el("ol", {class: "examples"}, part.examples.map((example) => exampleItem(table, feature, example))),
    ]));
}

function heatLegend(feature) {
  const most = Math.abs(strongest(feature));
  const negative = feature.min < 0 ? [number(-most), el("span", {class: "ramp below", "aria-hidden": "true"})] : [];
  return el("span", {class: "legend"}, ...negative, "0", el("span", {class: "ramp", "aria-hidden": "true"}), number(most));
}

// tool(i): what stands beside the document's name of the i-th of the strongest passages.
function featureDetail(table, feature, tool = () => null) {
  return [
    ...explanations(feature),
    facts(feature),
    el("div", {class: "pair"}, activationHistogram(feature), el("div", {class: "logit-pair"}, logits(table, feature))),
    examples(table, feature, tool),
  ].flat();
}
