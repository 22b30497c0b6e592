// The frame of the page: which view an address shows, asking the server, following it, messages and keys.

// A view's own file registers it: VIEWS.set(name, {title(rest), draw(host, rest, query) -> stop function or null}).
const VIEWS = new Map();
const NAVIGATION = [
  {key: "o", name: "", label: "Overview", href: "#/"},
  {key: "s", name: "start", label: "Start", href: "#/start"},
  {key: "j", name: "jobs", label: "Jobs", href: "#/jobs"},
  {key: "f", name: "features", label: "Features", href: null},
  {key: "a", name: "api", label: "API", href: "#/api"},
];
const RETRY_MS = 2000;
const TOAST_MS = 8000;
const CHORD_MS = 1500;

// An answer that says what is wrong: `message` is the server's own sentence.
class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

// Whether the server answers. Views that ask regularly go on by themselves when it is back.
const connection = {
  lost: false,
  say(lost) {
    if (lost === this.lost) return;
    this.lost = lost;
    const banner = document.getElementById("banner");
    banner.hidden = !lost;
    banner.replaceChildren(lost ? "The server does not answer; trying again." : "");
    if (lost) this.retry();
    else window.dispatchEvent(new Event("answers"));
  },
  async retry() {
    while (this.lost) {
      await new Promise((done) => setTimeout(done, RETRY_MS));
      await api("/api/health").catch(() => null);
    }
  },
};

// A name with slashes as a piece of an address.
function inPath(name) {
  return name.split("/").map(encodeURIComponent).join("/");
}

function address(view, name, query = "") {
  return `#/${view}/${inPath(name)}${query}`;
}

async function ask(path, {body, headers = {}, ...rest} = {}) {
  const given = body === undefined ? {headers} : {headers: {"Content-Type": "application/json", ...headers}, body: JSON.stringify(body)};
  try {
    const answer = await fetch(path, {cache: "no-store", ...rest, ...given});
    connection.say(false);
    return answer;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    connection.say(true);
    throw new Refused(0, "The server does not answer.");
  }
}

async function answered(answer) {
  const text = await answer.text();
  let content = null;
  try { content = JSON.parse(text); } catch { content = null; }
  if (!answer.ok) throw new Refused(answer.status, content?.error ?? `The server says ${answer.status}.`);
  if (content === null) throw new Refused(answer.status, "The server's answer is no JSON.");
  return content;
}

// The JSON of an address. options: as for fetch; a `body` is sent as JSON. Throws an Error with the server's text.
async function api(path, options = {}) {
  return answered(await ask(path, options));
}

function post(path, body) {
  return api(path, {method: "POST", body});
}

// Asks every `ms`, while the page is seen, and calls `show` when the answer is another than before.
// Gives a function that stops it; `now` of it asks at once. fail: told of an error other than silence.
function watch(path, ms, show, fail = () => {}) {
  let timer = 0, stopped = false, tag = null, asking = null;
  const once = async () => {
    clearTimeout(timer);
    try {
      const answer = await ask(path, tag === null ? {} : {headers: {"If-None-Match": tag}});
      if (answer.status !== 304) {
        const content = await answered(answer);
        tag = answer.headers.get("etag");
        if (!stopped) show(content);
      }
    } catch (error) {
      if (!stopped && error.status !== 0) fail(error);
      if (!(error instanceof Refused)) console.error(error);
    }
    if (!stopped) timer = setTimeout(() => (document.hidden ? null : now()), ms);
  };
  const now = () => {
    if (!stopped) asking ??= once().finally(() => { asking = null; });
    return asking;
  };
  const again = () => { if (!document.hidden) now(); };
  document.addEventListener("visibilitychange", again);
  window.addEventListener("answers", again);
  const stop = () => {
    stopped = true;
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", again);
    window.removeEventListener("answers", again);
  };
  stop.now = now;
  now();
  return stop;
}

// Follows a run or a job: `path` gives the address for what was seen so far ({at, log}), so that nothing is missed
// when the connection breaks. Gives a function that stops it.
function live(path, onMessage, seen = {}) {
  let socket = null, timer = 0, stopped = false, tries = 0;
  const begin = () => {
    const query = new URLSearchParams(Object.entries(seen).map(([name, value]) => [name, String(value)]));
    socket = new WebSocket(`${location.origin.replace(/^http/, "ws")}${path}?${query}`);
    socket.onmessage = (event) => {
      tries = 0;
      const message = JSON.parse(event.data);
      for (const name of ["at", "log"]) if (message[name] !== undefined) seen[name] = message[name];
      if (message.kind === "reset") seen.at = 0;
      onMessage(message);
    };
    socket.onclose = (event) => {
      // 1000: all is said. 1008: there is no such thing. Else again, later each time.
      if (stopped || event.code === 1000 || event.code === 1008) return;
      tries += 1;
      timer = setTimeout(begin, Math.min(10000, 250 * 2 ** tries));
    };
  };
  begin();
  return () => { stopped = true; clearTimeout(timer); socket.close(); };
}

// A short message in the corner; kind "bad" stays until it is dismissed.
function toast(text, kind = "good") {
  const gone = () => node.remove();
  const node = el("div", {class: `toast ${kind}`, role: kind === "bad" ? "alert" : null}, el("span", {}, text),
    el("button", {type: "button", "aria-label": "Dismiss", onclick: gone}, "\u00d7"));
  document.getElementById("toasts").append(node);
  if (kind !== "bad") setTimeout(gone, TOAST_MS);
}

// Runs an action of a button: it is off meanwhile, and an error is a toast. Gives what the action gives, or null.
async function acting(button, action) {
  button.disabled = true;
  try {
    return await action();
  } catch (error) {
    toast(error.message, "bad");
    return null;
  } finally {
    button.disabled = false;
  }
}

// #/run/a/b?x=1 -> {name: "run", rest: "a/b", query}; null for an address within the page.
function parsed(hash) {
  if (hash === "" || hash === "#") return {name: "", rest: "", query: new URLSearchParams()};
  if (!hash.startsWith("#/")) return null;
  const mark = hash.indexOf("?");
  const [name, ...rest] = hash.slice(2, mark < 0 ? undefined : mark).split("/").map((piece) => {
    try { return decodeURIComponent(piece); } catch { return piece; }
  });
  return {name, rest: rest.join("/"), query: new URLSearchParams(mark < 0 ? "" : hash.slice(mark + 1))};
}

let leave = null;

function route() {
  const found = parsed(location.hash);
  if (found === null) return;
  const {name, rest, query} = found, host = document.getElementById("view");
  if (leave) leave();
  leave = null;
  document.getElementById("tip").hidden = true;
  host.replaceChildren();
  const view = VIEWS.get(name);
  const title = view ? view.title(rest, query) : "Not found";
  document.title = `${title} \u00b7 saejax`;
  drawNavigation(name, rest);
  window.scrollTo({top: 0, behavior: "instant"});
  if (name === "features" && rest === "") chooseDictionary(host);
  else if (view) leave = view.draw(host, rest, query) ?? null;
  else host.append(el("p", {class: "note"}, "There is no such view. ", el("a", {href: "#/"}, "To the overview")));
}

function drawNavigation(name, rest) {
  const dictionary = ["run", "features"].includes(name) ? rest : null;
  document.getElementById("views").replaceChildren(...NAVIGATION.map((item) => {
    const here = item.name === name || (item.name === "jobs" && name === "job");
    const href = item.href ?? (dictionary ? address("features", dictionary) : "#/features");
    return el("a", {href, "aria-current": here ? "page" : null, title: `g ${item.key}`}, item.label);
  }));
}

const HELP = [
  ["/", "to the search field"], ["g o", "overview"], ["g s", "start a training"], ["g j", "jobs"],
  ["g f", "features of this run, or of the run that moved last"], ["g a", "the API"],
  ["\u2190 \u2192", "in a chart: step by step"], ["Escape", "close this, or leave a field; a search field is emptied"], ["?", "these keys"],
];

function showHelp() {
  const dialog = document.getElementById("help");
  dialog.replaceChildren(el("h2", {id: "help-title"}, "Keys"),
    el("dl", {class: "keys"}, HELP.map(([key, text]) => el("div", {}, el("dt", {}, key.split(" ").map((one) => el("kbd", {}, one))), el("dd", {}, text)))),
    el("form", {method: "dialog"}, el("button", {}, "Close")));
  dialog.showModal();
}

let chord = 0;

function onKey(event) {
  const typing = event.target.closest("input:not([type=checkbox]), select, textarea, [contenteditable]");
  if (event.key === "Escape" && typing) leaveField(typing);
  if (typing || event.defaultPrevented || event.altKey || event.ctrlKey || event.metaKey || document.querySelector("dialog[open]")) return;
  const going = performance.now() - chord < CHORD_MS;
  chord = 0;
  const item = going ? NAVIGATION.find(({key}) => key === event.key) : undefined;
  if (item) location.hash = document.getElementById("views").children[NAVIGATION.indexOf(item)].getAttribute("href");
  else if (event.key === "g") chord = performance.now();
  else if (event.key === "?") showHelp();
  else if (event.key === "/") {
    const search = document.querySelector("#view input[type=search]");
    if (!search) return;
    search.focus();
    search.select();
  } else return;
  event.preventDefault();
}

// The report's own links lead within a page (#gates); here an address says which view.
function onLink(event) {
  const link = event.target.closest("a[href^='#']");
  const target = link && !link.getAttribute("href").startsWith("#/") ? document.querySelector(link.getAttribute("href")) : null;
  if (!target) return;
  event.preventDefault();
  target.scrollIntoView();
  if (link.classList.contains("skip")) target.focus();
}

window.addEventListener("hashchange", route);
document.addEventListener("keydown", onKey);
document.addEventListener("click", onLink);
document.addEventListener("DOMContentLoaded", () => {
  installTip(document.getElementById("page"), document.getElementById("tip"));
  document.getElementById("help-button").addEventListener("click", showHelp);
  route();
});
