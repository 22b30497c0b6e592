// Making elements and formatting numbers. Strings enter the document here, as text nodes only.

const SVG_NAMESPACE = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

// el("p", {class: "note"}, "text", node, [nodes]); an attribute that is null or false is left out.
function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG_NAMESPACE, tag), attributes, children);
}

const GROUPED = new Intl.NumberFormat("en-GB", {maximumFractionDigits: 0});

function integer(value) {
  return value === null || value === undefined ? "n/a" : GROUPED.format(value);
}

// 3 significant digits, thousands grouped, very small and very large numbers as 1.2e-5.
function number(value, digits = 3) {
  if (value === null || value === undefined) return "n/a";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e9) return value.toExponential(Math.max(0, digits - 2)).replace("e+", "e");
  if (Number.isInteger(value) || size >= 10 ** digits) return GROUPED.format(value);
  return value.toPrecision(digits);
}

// The activation of a feature that is farthest from 0: its minimum where it has negative ones that are.
function strongest(feature) {
  return feature.min < -feature.max ? feature.min : feature.max;
}

// With a sign, and as many decimals as `most`, the largest of its column, deserves.
function signed(value, most) {
  const decimals = most >= 100 ? 0 : most >= 10 ? 1 : most >= 0.1 ? 2 : 4;
  return (value > 0 ? "+" : value < 0 ? "\u2212" : "") + Math.abs(value).toFixed(decimals);
}

// A search field that Escape leaves is empty, and says so to whoever filters by it: the browser alone empties it in silence.
function leaveField(field) {
  if (field.type === "search" && field.value !== "") {
    field.value = "";
    field.dispatchEvent(new Event("input", {bubbles: true}));
  }
  field.blur();
}

function percent(fraction) {
  if (fraction === null || fraction === undefined) return "n/a";
  if (fraction === 0) return "0%";
  const value = fraction * 100;
  if (Math.abs(value) < 0.001) return value.toExponential(1) + "%";
  const digits = Math.abs(value) >= 99.95 ? 4 : 3;
  return Number(value.toPrecision(digits)) + "%";
}

// 12,345,678 -> "12.3 M"
function compact(value) {
  if (value === null || value === undefined) return "n/a";
  for (const [unit, size] of [["B", 1e9], ["M", 1e6], ["k", 1e4]]) {
    if (Math.abs(value) >= size) {
      const scaled = value / (unit === "k" ? 1e3 : size);
      return `${Number(scaled.toPrecision(3))}\u2009${unit}`;
    }
  }
  return number(value);
}

function bytes(size) {
  if (size < 1000) return `${size} B`;
  return size < 1e6 ? `${(size / 1e3).toFixed(1)} kB` : `${(size / 1e6).toFixed(1)} MB`;
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "n/a";
  if (seconds < 120) return `${number(seconds)} s`;
  if (seconds < 7200) return `${(seconds / 60).toFixed(1)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

// A sentence with a command in it, for whatever has not been made yet.
function missing(sentence, command) {
  return el("p", {class: "note"}, sentence, " ", el("code", {}, command), ".");
}

// The sections of a run, each added by the file that draws it: `order` among the others, `of`: the parts of the summary
// that it shows, `draw(summary)`: its node or null. Those that are `live` are on the server's page of a run as well.
const SECTIONS = [];

function addSection(order, of, draw, live = true) {
  SECTIONS.push({order, of, draw, live});
  SECTIONS.sort((one, other) => one.order - other.order);
}

function section(id, title, lead, ...children) {
  return el("section", {id, "aria-labelledby": `${id}-title`},
    el("h2", {id: `${id}-title`}, title), lead ? el("p", {class: "lead"}, lead) : null, ...children);
}
