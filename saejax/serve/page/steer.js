// A text written without and with changed features, side by side.

const STEER_PROMPT_KEY = "saejax-prompt";
// What is done with a feature's activation f at every token, and how it reads.
const STEER_OPERATIONS = {
  add: ["add to it", "f + "], set: ["set it to", "f = "], scale: ["multiply it by", "f \u00d7 "], zero: ["silence it", "f = 0"],
  least: ["keep it at least", "f \u2265 "], most: ["keep it at most", "f \u2264 "],
};
// Longer texts are not compared token by token.
const MOST_MARKED = 400;

// For every token of `after` whether it belongs to a longest common subsequence with `before`.
function commonTokens(before, after) {
  const width = after.length + 1, longest = new Uint16Array((before.length + 1) * width);
  for (let i = before.length - 1; i >= 0; i--) {
    for (let j = after.length - 1; j >= 0; j--) {
      longest[i * width + j] = before[i] === after[j] ? longest[(i + 1) * width + j + 1] + 1 : Math.max(longest[(i + 1) * width + j], longest[i * width + j + 1]);
    }
  }
  const common = after.map(() => false);
  for (let i = 0, j = 0; i < before.length && j < after.length;) {
    if (before[i] === after[j]) { common[j] = true; i++; j++; } else if (longest[(i + 1) * width + j] >= longest[i * width + j + 1]) i++; else j++;
  }
  return common;
}

class SteerPanel {
  constructor(dictionary) {
    this.dictionary = dictionary;
    this.shown = null;
    this.busy = false;
    this.result = el("div", {class: "steer-result", "aria-live": "polite"});
    this.node = el("div", {class: "steer"}, this.form(), this.result);
  }

  form() {
    const field = (label, input, kind = "") => el("label", {class: `field ${kind}`}, el("span", {}, label), input);
    const figure = (name, value, low, high, step = 1) => el("input", {type: "number", name, value, min: low, max: high, step});
    this.prompt = el("textarea", {
      name: "prompt", rows: 2, required: true, spellcheck: "false", placeholder: "The model continues this text.",
      oninput: () => remember(STEER_PROMPT_KEY, this.prompt.value),
    });
    this.prompt.value = remembered(STEER_PROMPT_KEY);
    this.features = el("input", {
      type: "text", name: "features", required: true, pattern: "\\s*(\\d+:)?\\d+\\s*(,\\s*(\\d+:)?\\d+\\s*)*",
      title: "Numbers, as in 123 or 3, 17; of a layer, 2:123", autocomplete: "off",
    });
    this.operation = el("select", {name: "operation", onchange: () => this.operate()},
      Object.entries(STEER_OPERATIONS).map(([value, [label]]) => el("option", {value}, label)));
    this.slider = el("input", {type: "range", "aria-label": "Scale, as a slider", min: -20, max: 20, step: 0.1, oninput: () => { this.scale.value = this.slider.value; }});
    this.scale = el("input", {type: "number", name: "scale", step: "any", value: 5, "aria-label": "Scale", oninput: () => { this.slider.value = this.scale.value; }});
    this.slider.value = 5;
    this.button = el("button", {type: "submit", class: "primary"}, "Write both texts");
    this.number = {
      tokens: figure("tokens", 40, 1, 200), temperature: figure("temperature", 0, 0, 100, "any"),
      top_p: figure("top_p", 1, 0.01, 1, "any"), seed: figure("seed", 0, 0, 2147483647),
    };
    return el("form", {class: "steer-form", onsubmit: (event) => { event.preventDefault(); this.run(); }},
      field("Prompt", this.prompt, "wide"),
      field("Features", this.features), field("At every token", this.operation),
      el("div", {class: "field scale-field"}, el("span", {}, "Scale"), el("div", {class: "scale-row"}, this.slider, this.scale)),
      el("div", {class: "sampling"}, field("Tokens", this.number.tokens), field("Temperature", this.number.temperature),
        field("Top p", this.number.top_p), field("Seed", this.number.seed)),
      el("div", {class: "field go"}, this.button));
  }

  // Features that the reader wrote stay; the number of the feature that was shown becomes that of the one shown now.
  show({id, most}) {
    const untouched = this.shown === null || this.features.value.trim() === String(this.shown.id);
    this.shown = {id, most};
    if (!untouched) return;
    this.features.value = String(id);
    this.operate();
  }

  // A slider that reaches over twice the feature's largest activation, to either side.
  operate() {
    const factor = this.operation.value === "scale";
    const reach = factor ? 10 : Number((2 * Math.max(1, Math.abs((this.shown && this.shown.most) ?? 10))).toPrecision(2));
    const value = factor ? 2 : Number((reach / 2).toPrecision(2));
    fill(this.slider, {min: -reach, max: reach, step: reach / 100}, []);
    this.slider.value = this.scale.value = value;
    for (const input of [this.slider, this.scale]) input.disabled = this.operation.value === "zero";
  }

  asked() {
    const features = this.features.value.split(",").map((part) => part.trim()).map((part) => (part.includes(":") ? part : Number(part)));
    return {
      dictionary: this.dictionary, features, operation: this.operation.value, scale: Number(this.scale.value), prompt: this.prompt.value,
      tokens: Number(this.number.tokens.value), temperature: Number(this.number.temperature.value), top_p: Number(this.number.top_p.value), seed: Number(this.number.seed.value),
    };
  }

  async run() {
    if (this.busy) return;
    this.busy = true;
    fill(this.button, {"aria-disabled": "true"}, []);
    this.button.replaceChildren("Writing\u2026");
    this.result.setAttribute("aria-busy", "true");
    const asked = this.asked();
    try {
      this.draw(asked, await api("/api/steer", {method: "POST", body: asked}));
    } catch (error) {
      this.result.replaceChildren(el("p", {class: "note warn", role: "alert"}, error.message));
    }
    this.busy = false;
    this.button.removeAttribute("aria-disabled");
    this.button.replaceChildren("Write both texts");
    this.result.removeAttribute("aria-busy");
  }

  draw(asked, answer) {
    const [, reads] = STEER_OPERATIONS[asked.operation];
    const what = `${asked.features.length === 1 ? "feature" : "features"} ${asked.features.join(", ")}: ${reads}${asked.operation === "zero" ? "" : number(asked.scale)}`;
    const long = Math.max(answer.tokens_without.length, answer.tokens_with.length) > MOST_MARKED;
    const kept = long ? answer.tokens_with.map(() => true) : commonTokens(answer.tokens_without, answer.tokens_with);
    this.result.replaceChildren(
      el("p", {class: "panel-lead"}, el("b", {}, what), ". ", el("bdi", {}, visibleLine(String(answer.about)))),
      el("div", {class: "steer-pair"},
        this.text("Without", answer.prompt, answer.tokens_without, null),
        this.text("With", answer.prompt, answer.tokens_with, kept)),
      el("p", {class: "note"}, kept.every(Boolean) ? "The change makes no difference to this text." : "Marked: tokens that the text without the change does not have there."));
  }

  text(title, prompt, tokens, kept) {
    const line = el("p", {class: "passage"}, el("span", {class: "prompt"}, ...visible(prompt)));
    tokens.forEach((token, i) => {
      const same = kept === null || kept[i];
      line.append(el(same ? "span" : "mark", {class: same ? "tok" : "tok changed"}, ...piece(token)), el("wbr"));
    });
    return el("div", {class: "steer-text"}, el("h4", {}, title), line);
  }
}
