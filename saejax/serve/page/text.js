// A text of the reader's own: what the chosen feature does on each of its tokens, and which features fire on it most.

const TYPING_MS = 200;
const TEXT_KEY = "saejax-text";

// sessionStorage, where the browser allows it.
function remembered(key) {
  try { return sessionStorage.getItem(key) ?? ""; } catch { return ""; }
}

function remember(key, value) {
  try { sessionStorage.setItem(key, value); } catch { /* A text that is too long for it, or no storage at all: it is only kept shorter. */ }
}

class TextPanel {
  // onChoose(id): the reader picked one of the text's top features.
  constructor(dictionary, onChoose) {
    this.dictionary = dictionary;
    this.onChoose = onChoose;
    this.chosen = null;
    this.answer = null;
    this.spans = [];
    this.timer = 0;
    this.controller = null;
    this.field = el("textarea", {
      "aria-label": "A text to try", placeholder: "Type or paste a text: its tokens are coloured by the chosen feature.", spellcheck: "false",
      oninput: () => { remember(TEXT_KEY, this.field.value); this.later(TYPING_MS); },
    });
    this.field.value = remembered(TEXT_KEY);
    this.tokens = el("div", {class: "try-tokens", tabindex: 0, role: "region", "aria-label": "Tokens of the text, coloured"});
    this.top = el("ol", {class: "try-top", "aria-label": "Top features of this text"});
    this.status = el("p", {class: "try-status", role: "status"});
    this.node = el("details", {class: "try"},
      el("summary", {}, "Try a text"),
      el("div", {class: "try-body"},
        el("div", {}, el("h4", {}, "Your text"), this.field),
        el("div", {}, el("h4", {}, "On each token ", this.status), this.tokens),
        el("div", {}, el("h4", {}, "Top features of this text"), this.top)));
    this.node.open = window.matchMedia("(min-width: 861px)").matches;
    this.node.addEventListener("toggle", () => { if (this.node.open && this.answer === null) this.later(0); });
    this.clear();
  }

  // The kept text waits a little for the first feature, so that one question brings both.
  start() { if (this.field.value !== "") this.later(this.chosen === null ? 500 : 0); }

  stop() {
    clearTimeout(this.timer);
    if (this.controller) this.controller.abort();
  }

  // The feature that colours the text: {id, most}; most: its largest activation in the scan, or null.
  choose(feature) {
    this.chosen = feature;
    if (this.answer === null) {
      if (this.field.value !== "") this.later(0);
    } else if (this.answer.activations[feature.id] === undefined) this.later(120);
    else this.colour(feature.id);
  }

  later(ms) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.ask(), ms);
  }

  async ask() {
    if (this.controller) this.controller.abort();
    if (!this.node.open) { this.answer = null; return; }
    const text = this.field.value;
    if (text === "") return this.clear();
    const controller = this.controller = new AbortController();
    const feature = this.chosen === null ? null : this.chosen.id;
    try {
      const answer = await api("/api/encode", {method: "POST", body: {dictionary: this.dictionary, text, count: 20, feature}, signal: controller.signal});
      if (controller === this.controller) this.show(answer);
    } catch (error) {
      if (controller === this.controller && !wasAborted(error)) this.say(error.message, true);
    }
  }

  clear() {
    this.answer = null;
    this.spans = [];
    this.tokens.replaceChildren(el("p", {class: "note"}, "Nothing to read yet."));
    this.top.replaceChildren();
    this.say("", false);
  }

  say(text, warn) {
    this.status.className = `try-status${warn ? " warn" : ""}`;
    this.status.replaceChildren(text);
    this.status.title = text;
  }

  show(answer) {
    this.answer = answer;
    const line = passage(answer.tokens, {tokens: answer.tokens.map((_, i) => i), activations: answer.tokens.map(() => 0), peak: -1}, 0);
    this.spans = [...line.querySelectorAll(".tok")];
    this.spans.forEach((span, i) => span.replaceChildren(...piece(answer.tokens[i])));
    this.tokens.replaceChildren(line);
    this.top.replaceChildren(...answer.top.map((one) => this.topItem(one)));
    this.colour(this.chosen === null ? null : this.chosen.id);
  }

  topItem({id, max, token, label}) {
    const back = () => this.colour(this.chosen === null ? null : this.chosen.id), over = () => this.colour(id);
    return el("li", {}, el("button", {
      type: "button", "data-id": id, onpointerenter: over, onpointerleave: back, onfocus: over, onblur: back, onclick: () => this.onChoose(id),
    }, el("span", {class: "id"}, String(id)), el("span", {class: "num"}, number(max)),
    el("span", {class: "top"}, label ? el("bdi", {class: "label"}, visibleLine(label)) : token === null ? "" : tokenChip(token))));
  }

  // Colours the tokens by one feature, as strongly as its largest activation in the scan or here allows.
  colour(id) {
    if (this.answer === null) return;
    const activations = id === null ? undefined : this.answer.activations[id];
    if (activations === undefined) return this.say(id === null ? "" : `#${id}: reading\u2026`, false);
    let peak = -1;
    activations.forEach((value, i) => { if (value !== 0 && (peak < 0 || Math.abs(value) > Math.abs(activations[peak]))) peak = i; });
    const here = peak < 0 ? 0 : Math.abs(activations[peak]);
    const scan = this.chosen !== null && this.chosen.id === id ? Math.abs(this.chosen.most ?? 0) : 0;
    this.spans.forEach((span, i) => heat(span, activations[i], Math.max(here, scan), i === peak));
    for (const button of this.top.querySelectorAll("button")) button.setAttribute("aria-pressed", String(Number(button.dataset.id) === id));
    const fires = activations.filter((value) => value !== 0).length;
    this.say(fires === 0 ? `#${id} fires on none of them`
      : `#${id} on ${integer(fires)} of ${integer(activations.length)}, at most ${number(activations[peak])}`, false);
  }
}
