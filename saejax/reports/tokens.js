// Tokens as a reader can see them: white space and control characters get a sign, the rest stays text.

const SIGNS = {" ": "\u00b7", "\n": "\u21b5", "\t": "\u21e5", "\r": "\u240d", "\u00a0": "\u237d"};
// Controls, zero-width characters and the marks that turn the writing direction: shown by number.
const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/;

function signOf(character) {
  if (character in SIGNS) return SIGNS[character];
  if (UNSEEN.test(character)) return `\u2039${character.codePointAt(0).toString(16).padStart(2, "0")}\u203a`;
  return null;
}

// Text nodes and <i class="ws"> signs for one token.
function visible(token) {
  if (token === "") return [el("i", {class: "ws"}, "\u2205")];
  const nodes = [];
  let plain = "";
  for (const character of token) {
    const sign = signOf(character);
    if (sign === null) { plain += character; continue; }
    if (plain) nodes.push(plain);
    nodes.push(el("i", {class: "ws"}, sign));
    plain = "";
  }
  if (plain) nodes.push(plain);
  return nodes;
}

// The same as a string, for labels and tooltips.
function visibleText(token) {
  return token === "" ? "\u2205" : Array.from(token, (character) => signOf(character) ?? character).join("");
}

// Text of others in one line, as it reads; only what cannot be seen gets its number.
function visibleLine(text) {
  return [...text].map((character) => UNSEEN.test(character) ? signOf(character) : character).join("");
}

// A token of a logit list: an id of the table, or already its text.
function tokenText(table, token) {
  return typeof token === "string" ? token : table.vocab[token];
}

function tokenChip(token) {
  return el("bdi", {class: "chip"}, ...visible(token));
}

// Colours a token's node by its activation, as strong as |activation| / `most`; of another colour where it is negative.
function heat(node, activation, most, peak) {
  node.className = `tok${activation ? " on" : ""}${activation < 0 ? " below" : ""}${peak ? " peak" : ""}`;
  node.dataset.activation = number(activation, 4);
  if (activation && most > 0) node.style.setProperty("--heat", (0.1 + 0.9 * Math.min(1, Math.abs(activation) / most)).toFixed(3));
}

// One passage: every token with its heat, the peak token marked.
function passage(table, example, most) {
  const line = el("p", {class: "passage"});
  example.tokens.forEach((id, i) => {
    const token = table[id], peak = i === example.peak;
    const span = el(peak ? "mark" : "span", {}, ...visible(token));
    heat(span, example.activations[i], most, peak);
    span.dataset.token = visibleText(token);
    line.append(span, el("wbr"));
  });
  return line;
}

// One floating label for all tokens, following pointer and tap.
function installTip(root, tip) {
  root.addEventListener("pointerover", (event) => {
    const token = event.target.closest ? event.target.closest("[data-activation]") : null;
    tip.hidden = token === null;
    if (token === null) return;
    tip.replaceChildren(el("bdi", {}, token.dataset.token), el("b", {}, token.dataset.activation));
    const box = token.getBoundingClientRect();
    const left = Math.min(window.innerWidth - tip.offsetWidth - 8, Math.max(8, box.left));
    const above = box.top - tip.offsetHeight - 6;
    tip.style.left = `${left}px`;
    tip.style.top = `${above > 4 ? above : box.bottom + 6}px`;
  });
  root.addEventListener("pointerleave", () => { tip.hidden = true; });
  window.addEventListener("scroll", () => { tip.hidden = true; }, {passive: true});
}
