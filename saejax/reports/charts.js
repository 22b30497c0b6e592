// Line charts that share one cursor, and bar charts for histograms. Inline SVG, hover and keyboard read-outs.

const CHART = {width: 340, height: 178, left: 44, right: 16, top: 10, bottom: 24};
// Beside something else: a drawing of half the width has letters of the same size.
const SMALL_CHART = {...CHART, width: 230, height: 150, left: 34, right: 10};
const WIDE_CHART = {...CHART, width: 720, height: 210};
const DIGIT = 6.2;  // the width of one in a label
const DASHES = [null, "5 3", "2 3"];

function tickLabel(value, digits = 4) {
  const size = Math.abs(value);
  if (size >= 1e4 && digits <= 4) return compact(value).replace("\u2009", "");
  if (size !== 0 && size < 1e-3) return value.toExponential(digits - 4).replace("e-", "e\u2212");
  return String(Number(value.toPrecision(digits))).replace("-", "\u2212");
}

// Labels of an axis: as many digits as tell its ticks apart.
function tickLabels(ticks) {
  for (let digits = 4; digits < 15; digits++) {
    const labels = ticks.map((tick) => tickLabel(tick, digits));
    if (new Set(labels).size === labels.length) return labels;
  }
  return ticks.map((tick) => tickLabel(tick, 15));
}

function axes(x, y, {width, height, left, right, bottom}) {
  const group = svg("g", {class: "axes", "aria-hidden": "true"});
  const [down, across] = [y.ticks, x.ticks].map(tickLabels);
  const fit = (label) => (label.length * DIGIT > left - 8 ? {textLength: left - 8, lengthAdjust: "spacingAndGlyphs"} : {});
  y.ticks.forEach((tick, i) => group.append(svg("line", {class: "grid", x1: left, x2: width - right, y1: y(tick), y2: y(tick)}),
    svg("text", {x: left - 6, y: y(tick) + 3.5, "text-anchor": "end", ...fit(down[i])}, down[i])));
  x.ticks.forEach((tick, i) => group.append(svg("line", {class: "tick", x1: x(tick), x2: x(tick), y1: height - bottom, y2: height - bottom + 4}),
    svg("text", {x: x(tick), y: height - bottom + 15, "text-anchor": "middle"}, across[i])));
  group.append(svg("line", {class: "base", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom}));
  return group;
}

function pathOf(series, x, y) {
  let path = "", pen = "M";
  series.steps.forEach((step, i) => {
    const value = series.values[i];
    if (value === null || (y.log && value <= 0)) { pen = "M"; return; }
    path += `${pen}${x(step).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = "L";
  });
  return path;
}

// The place of the step nearest to `step` in an ascending list.
function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle; else high = middle;
  }
  return step - steps[low] <= steps[high] - step ? low : high;
}

// All line charts of the page: a step pointed at in one is read out in all.
class Cursor {
  constructor() { this.listeners = []; this.step = null; }
  set(step) { this.step = step; this.listeners.forEach((listener) => listener(step)); }
}

// Which colour a series has: its own where it says so (one run, one colour in all charts), else by its place.
function hueOf(series, place) {
  return series.hue ?? place;
}

class LineChart {
  // series: [{name, steps, values}] of one quantity; steps: the ends of the axis; cursor: the shared Cursor.
  constructor({title, hint, series, steps, linear}, cursor) {
    const {width, height} = CHART;
    this.title = title;
    this.linear = linear;
    this.cursor = cursor;
    this.readout = el("span", {class: "readout"});
    this.note = el("span", {class: "scale"});
    this.svg = svg("svg", {
      viewBox: `0 0 ${width} ${height}`, role: "slider", tabindex: 0, "aria-label": `${title} by step`,
      onpointermove: (event) => this.hover(event), onpointerleave: () => this.cursor.set(null),
      onkeydown: (event) => this.key(event), onblur: () => this.cursor.set(null),
    });
    this.node = el("figure", {class: "chart"}, el("figcaption", {title: hint}, el("b", {}, title), this.note, this.readout), this.svg);
    cursor.listeners.push((step) => this.point(step));
    this.show(series, steps);
  }

  // Takes other values, or more of them, in place: focus and cursor stay as they are.
  show(series, steps) {
    this.series = series;
    const {domain, log, cut} = valueDomain(series.flatMap((one) => one.values), !this.linear);
    const {width, height, left, right, top, bottom} = CHART;
    this.x = scale(steps, [left, width - right], {ticks: 5});
    this.y = scale(domain, [height - bottom, top], {log, ticks: 4});
    this.note.replaceChildren(log ? "log scale" : cut ? "outliers cut off" : "");
    this.node.classList.toggle("many", series.length > DASHES.length);
    this.draw();
    this.point(this.cursor.step);
  }

  draw() {
    const {width, height, left, right, top, bottom} = CHART;
    const clip = `clip-${this.title.replace(/\W+/g, "-")}`;
    const lines = this.series.map((one, i) => svg("path", {
      class: `line series-${hueOf(one, i)}`, d: pathOf(one, this.x, this.y), "stroke-dasharray": DASHES[i % DASHES.length],
    }));
    this.dots = this.series.map((one, i) => svg("circle", {class: `dot series-${hueOf(one, i)}`, r: 3, visibility: "hidden"}));
    this.rule = svg("line", {class: "rule", y1: top, y2: height - bottom, visibility: "hidden"});
    fill(this.svg, {"aria-valuemin": this.x.domain[0], "aria-valuemax": this.x.domain[1]}, []);
    this.svg.replaceChildren(
      svg("clipPath", {id: clip}, svg("rect", {x: left, y: top - 2, width: width - left - right, height: height - top - bottom + 3})),
      axes(this.x, this.y, CHART), this.rule, svg("g", {"clip-path": `url(#${clip})`}, lines), ...this.dots);
  }

  hover(event) {
    const box = this.svg.getBoundingClientRect();
    const [low, high] = this.x.domain;
    const at = ((event.clientX - box.left) / box.width) * CHART.width;
    const share = (at - CHART.left) / (CHART.width - CHART.left - CHART.right);
    this.cursor.set(low + Math.min(1, Math.max(0, share)) * (high - low));
  }

  key(event) {
    const move = {ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity}[event.key];
    if (!move) return;
    event.preventDefault();
    const steps = this.series[0].steps;
    const here = this.cursor.step === null ? steps.length - 1 : nearest(steps, this.cursor.step);
    this.cursor.set(steps[Math.min(steps.length - 1, Math.max(0, here + move))]);
  }

  // Shows every series' value at the logged step nearest to `step`; null: the last value.
  point(step) {
    const parts = this.series.map((one, i) => {
      const at = step === null ? one.steps.length - 1 : nearest(one.steps, step);
      this.mark(this.dots[i], step === null ? null : one.steps[at], one.values[at]);
      return el("span", {class: `value series-${hueOf(one, i)}`}, this.series.length > 1 ? el("span", {class: "of"}, `${one.name} `) : "", number(one.values[at], 4));
    });
    const at = this.series[0].steps[step === null ? this.series[0].steps.length - 1 : nearest(this.series[0].steps, step)];
    this.note.hidden = step !== null;
    this.readout.replaceChildren(step === null ? "" : el("span", {class: "at"}, `step ${integer(at)}`), ...parts);
    fill(this.rule, {x1: this.x(at), x2: this.x(at), visibility: step === null ? "hidden" : "visible"}, []);
    fill(this.svg, {"aria-valuenow": at, "aria-valuetext": `step ${integer(at)}: ${parts.map((part) => part.textContent).join(", ")}`}, []);
  }

  mark(dot, step, value) {
    const [low, high] = this.y.domain;
    const shown = step !== null && value !== null && value >= low && value <= high;
    fill(dot, {visibility: shown ? "visible" : "hidden"}, []);
    if (shown) fill(dot, {cx: this.x(step), cy: this.y(value)}, []);
  }
}

// counts[i] items lie between edges[i] and edges[i + 1]. Log counts when a few bins would hide the rest.
function barChart({title, edges, counts, describe, frame = CHART}) {
  const {width, height, left, right, top, bottom} = frame;
  const filled = counts.filter((count) => count > 0).sort((a, b) => a - b);
  const most = filled.length ? filled[filled.length - 1] : 1;
  const log = filled.length > 3 && most > 100 * quantile(filled, 0.5);
  const x = scale([edges[0], edges[edges.length - 1]], [left, width - right], {ticks: 6});
  const y = scale(log ? [0.7, most * 1.3] : [0, most * 1.05], [height - bottom, top], {log, ticks: 4});
  y.ticks = y.ticks.filter(Number.isInteger);
  const readout = el("span", {class: "readout"});
  const bars = counts.map((count, i) => {
    const from = x(edges[i]), to = x(edges[i + 1]), head = count > 0 ? y(count) : height - bottom;
    const show = () => readout.replaceChildren(describe(edges[i], edges[i + 1], count));
    const hide = () => readout.replaceChildren();
    return svg("g", {class: "bar", onpointerenter: show, onpointerleave: hide},
      svg("rect", {class: "catch", x: from, width: Math.max(0, to - from), y: top, height: height - top - bottom}),
      svg("rect", {class: "fill", x: from + 0.5, width: Math.max(0.5, to - from - 1), y: head, height: Math.max(0, height - bottom - head)}));
  });
  const total = counts.reduce((sum, count) => sum + count, 0);
  return el("figure", {class: "chart"},
    el("figcaption", {}, el("b", {}, title), log ? el("span", {class: "scale"}, "log counts") : null, readout),
    svg("svg", {viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": `${title}: ${integer(total)} items between ${tickLabel(edges[0])} and ${tickLabel(edges[edges.length - 1])}`},
    axes(x, y, frame), bars));
}
