// Pieces that several views share: states, progress, lists that change in place, parts that are drawn anew.

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// A token of a text in order; "" is one that goes on with the letter of the token before it.
function piece(token) {
  return token === "" ? [el("i", {class: "ws", title: "more of the letter before"}, "\u22ef")] : visible(token);
}

function setClass(node, name) {
  if (node.className !== name) node.className = name;
}

// A row's state as a badge; `show(state)` changes it in place.
function stateBadge() {
  const node = el("span", {class: "state"});
  const show = (state, title = "") => {
    setText(node, state ?? "");
    setClass(node, `state ${String(state ?? "").replace(/\W/g, "")}`);
    if (node.title !== title) node.title = title;
  };
  return {node, show};
}

// A bar from 0 to 1; what it stands for is said in words beside it.
function progressBar(label) {
  const filled = el("span");
  const node = el("div", {class: "progress", role: "progressbar", "aria-valuemin": 0, "aria-valuemax": 100, "aria-label": label}, filled);
  const show = (share) => {
    const part = Math.min(1, Math.max(0, share ?? 0)), whole = String(Math.floor(100 * part));
    filled.style.transform = `scaleX(${part})`;
    if (node.getAttribute("aria-valuenow") !== whole) node.setAttribute("aria-valuenow", whole);
  };
  show(0);
  return {node, show};
}

// How long ago a time (seconds since 1970) was.
function ago(seconds) {
  if (!seconds) return "n/a";
  const passed = Math.max(0, Date.now() / 1000 - seconds);
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (passed >= size) return `${Math.floor(passed / size)} ${unit} ago`;
  }
  return "just now";
}

function moment(seconds) {
  return seconds ? new Date(seconds * 1000).toLocaleString("en-GB") : "n/a";
}

function largeBytes(size) {
  if (size === null || size === undefined) return "n/a";
  return size < 1e9 ? bytes(size) : `${(size / 1e9).toFixed(1)} GB`;
}

// "step 1,200 of 2,000 · 110 k tokens/s · 12 s left", as much of it as is known.
function progressLine(run, short = false) {
  const at = run.step ? (run.steps ? `${integer(run.step)} of ${integer(run.steps)} steps` : `${integer(run.step)} steps`) : "";
  if (run.state !== "running") return at;
  const rate = !short && run.tokens_per_second ? `${compact(run.tokens_per_second)} tokens/s` : "";
  const left = run.seconds_left !== null && run.seconds_left !== undefined ? `${duration(Math.round(run.seconds_left))} left` : "";
  return (short ? [left || at] : [at, rate, left]).filter(Boolean).join(" \u00b7 ");
}

function gatesText(run) {
  if (!run.gates_total) return "\u2013";
  return run.failed_gates.length ? `${run.failed_gates.length} failed` : `${run.gates_passed} of ${run.gates_total}`;
}

// Rows of a host that follow a list: nodes are kept by key and changed in place; focus and selection stay.
class KeyedRows {
  // make(item) -> {node, show(item)}
  constructor(host, key, make) { Object.assign(this, {host, key, make, rows: new Map()}); }

  show(items) {
    const focused = this.host.contains(document.activeElement) ? document.activeElement : null;
    const kept = new Set(items.map(this.key));
    for (const [key, row] of this.rows) {
      if (kept.has(key)) continue;
      row.node.remove();
      this.rows.delete(key);
    }
    let place = this.host.firstElementChild;
    for (const item of items) {
      const key = this.key(item);
      if (!this.rows.has(key)) this.rows.set(key, this.make(item));
      const row = this.rows.get(key);
      row.show(item);
      if (row.node === place) place = place.nextElementSibling;
      else this.host.insertBefore(row.node, place);
    }
    if (focused && focused.isConnected && document.activeElement !== focused) focused.focus({preventScroll: true});
  }
}

// A part of a view that is drawn anew when what it shows has changed, and not while the reader is in it.
class Slot {
  constructor(make) { this.make = make; this.node = el("div", {class: "slot"}); this.shown = undefined; }

  show(value) {
    const text = JSON.stringify(value ?? null);
    if (text === this.shown || (this.shown !== undefined && this.node.contains(document.activeElement))) return;
    this.shown = text;
    const folds = () => [...this.node.querySelectorAll("details")];
    const open = new Set(folds().filter((one) => one.open).map((one) => one.firstChild.textContent));
    this.node.replaceChildren(...[this.make(value)].flat().filter(Boolean));
    for (const one of folds()) one.open = open.has(one.firstChild.textContent);
  }
}

function headed(title, ...beside) {
  return el("header", {class: "page-title"}, el("div", {class: "title-row"}, el("h1", {}, title), beside));
}

// heads: [text, numeric]; a table whose rows KeyedRows fills.
function listing(heads, label, kind = "") {
  const body = el("tbody");
  const node = el("div", {class: "scroll", tabindex: 0, role: "group", "aria-label": label},
    el("table", {class: `listing ${kind}`}, el("thead", {}, el("tr", {}, heads.map(([text, numeric]) =>
      el("th", {scope: "col", class: numeric ? "num" : text === "" ? "pick" : null}, text)))), body));
  return {node, body};
}

function problem(error) {
  return el("p", {class: "note warn", role: "alert"}, error.message);
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    toast("Copied.");
  } catch {
    toast("The browser does not let this page write to the clipboard; select the text instead.", "bad");
  }
}

// A word as a shell reads it.
function quoted(word) {
  return /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`;
}

// What a job's request gave, said in the corner with the way to it.
function jobStarted(job) {
  toast([`${job.command} of ${job.name} was started. `, el("a", {href: address("job", job.id)}, "To its log")]);
}
