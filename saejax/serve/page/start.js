// Starting a command: a form made from the settings' own documentation.

function textOf(value) {
  if (value === null || value === undefined) return "";
  if (Array.isArray(value)) return value.every((one) => typeof one !== "object") ? value.join(", ") : JSON.stringify(value);
  return String(value);
}

// What is typed, as the type of the setting; what does not fit stays text, and the server says what is wrong.
function valueOf(text, {type, optional}) {
  const plain = text.trim();
  if (plain === "" && type !== "str" && optional) return null;
  if (type === "list of section") { try { return JSON.parse(plain || "[]"); } catch { return text; } }
  if (type.startsWith("list of ")) return plain === "" ? [] : plain.split(",").map((piece) => valueOf(piece.trim(), {type: type.slice("list of ".length), optional: false}));
  if (type === "bool") return plain === "true" ? true : plain === "false" ? false : text;
  if (type === "int" || type === "float") {
    const found = plain === "" ? NaN : Number(plain.replaceAll("_", ""));
    return Number.isFinite(found) ? found : text;
  }
  return text;
}

function asFlag(key, value) {
  if (Array.isArray(value)) {
    const items = value.map((one) => (typeof one === "string" ? `'${one.replaceAll("'", "\\'")}'` : String(one)));
    return `--config.${key}=(${items.join(",")}${items.length === 1 ? "," : ""})`;
  }
  return `--config.${key}=${value === null ? "None" : value === true ? "True" : value === false ? "False" : value}`;
}

// One setting: its name, type, range, documentation and field.
class SettingField {
  constructor(setting, form) {
    this.setting = setting;
    this.form = form;
    const id = `setting-${setting.key}`;
    const changed = () => form.change(setting, valueOf(this.field.value, setting));
    if (setting.choices || setting.type === "bool") {
      const choices = setting.choices ?? ["true", "false"];
      this.field = el("select", {id, "aria-describedby": `${id}-doc`, onchange: changed}, choices.map((one) => el("option", {value: one}, one === "" ? "(empty)" : one)));
    } else {
      this.field = el("input", {id, type: "text", "aria-describedby": `${id}-doc`, autocomplete: "off", spellcheck: "false", inputmode: setting.type === "int" ? "numeric" : null, oninput: changed});
    }
    this.reset = el("button", {type: "button", "aria-label": `Reset ${setting.key}`, title: "As it was", onclick: () => { form.unset(setting.key); this.field.focus(); }}, "\u21ba");
    this.error = el("p", {class: "error", role: "alert", hidden: true});
    const about = [setting.type + (setting.optional ? " or none" : ""), setting.range, `default ${textOf(setting.default) || (setting.optional ? "none" : "empty")}`,
      setting.decides ? "decides the run's numbers" : null].filter(Boolean).join(" \u00b7 ");
    this.node = el("div", {class: "setting"}, el("div", {}, el("label", {for: id}, el("code", {}, setting.key)), el("p", {class: "doc", id: `${id}-doc`}, setting.doc), el("p", {class: "about"}, about)),
      el("div", {class: "own"}, this.field, this.reset), this.error);
    this.show();
  }

  show() {
    const {values, changes, errors} = this.form, {key, optional, type} = this.setting;
    const changed = changes.has(key), value = changed ? changes.get(key) : values[key];
    if (document.activeElement !== this.field || !changed) this.set(textOf(value));
    if (optional && this.field.tagName === "INPUT") this.field.placeholder = "none";
    if (type === "str" && !optional && this.field.tagName === "INPUT") this.field.placeholder = "empty";
    const wrong = errors.get(key) ?? "";
    setClass(this.node, `setting${changed ? " changed" : ""}${wrong ? " wrong" : ""}`);
    this.reset.style.visibility = changed ? "visible" : "hidden";
    this.error.hidden = wrong === "";
    setText(this.error, wrong);
    fill(this.field, {"aria-invalid": String(wrong !== "")}, []);
  }

  set(text) {
    const {field} = this;
    if (field.tagName === "SELECT" && ![...field.options].some((one) => one.value === text)) field.prepend(el("option", {value: text}, text || "none"));
    if (field.value !== text) field.value = text;
  }
}

class StartForm {
  constructor(host, {experiments, commands, sections}, runs, query) {
    Object.assign(this, {experiments, commands, sections, values: {}, changes: new Map(), errors: new Map(), fields: new Map(), turn: 0});
    this.known = new Map(sections.flatMap(({settings}) => settings).map((setting) => [setting.key, setting]));
    this.from = el("select", {onchange: () => this.load()}, el("optgroup", {label: "Experiments"}, experiments.map(({name, listed}) => el("option", {value: `e${name}`}, listed ? `${name} (yours)` : name))),
      runs.length ? el("optgroup", {label: "Runs and sweeps"}, runs.map((name) => el("option", {value: `r${name}`}, name))) : null);
    const wanted = query.get("run") ? `r${query.get("run")}` : query.get("experiment") ? `e${query.get("experiment")}` : "equickstart";
    if ([...this.from.options].some((one) => one.value === wanted)) this.from.value = wanted;
    this.summary = el("small");
    this.preset = el("select", {onchange: () => this.load()});
    this.command = el("select", {onchange: () => this.show()}, commands.map(({name}) => el("option", {value: name}, name)));
    if (query.get("command")) this.command.value = query.get("command");
    else this.command.value = "pipeline";
    this.told = el("small");
    this.search = el("input", {type: "search", placeholder: "Search settings and their documentation", "aria-label": "Search settings", autocomplete: "off", spellcheck: "false", oninput: () => this.filter()});
    this.line = el("pre", {class: "command"});
    this.list = el("ul", {class: "changed-list"});
    this.error = el("p", {class: "form-error", role: "alert"});
    this.start = el("button", {type: "button", class: "first", onclick: () => this.begin()}, "Start");
    this.prediction = new Prediction(() => this.asked(), (error) => this.refused(error));
    this.folds = sections.map((one) => this.fold(one));
    const field = (label, node, below) => el("label", {class: "field"}, el("span", {}, label), node, below);
    host.append(headed("Start"), el("div", {class: "form-top"}, field("Begin with", this.from, this.summary), field("Preset", this.preset, el("small")), field("Command", this.command, this.told)),
      el("div", {class: "two"}, el("div", {}, el("div", {class: "toolbar"}, this.search), this.folds.map(({node}) => node)),
        el("div", {class: "beside"}, el("div", {class: "card"}, el("h2", {}, "What will run"), this.line,
          el("div", {class: "actions"}, this.start, el("button", {type: "button", onclick: () => copyText(this.line.textContent)}, "Copy")), this.error, this.list), this.prediction.node)));
    this.show();
    this.load();
  }

  fold({name, doc, settings}) {
    const marked = el("span", {class: "marked"}), body = el("div");
    const node = el("details", {class: "settings"}, el("summary", {}, el("span", {}, name || "experiment"), el("span", {class: "quiet"}, `${doc ? `${doc} ` : ""}${settings.length} settings`), marked), body);
    // Fields are made when they are first seen: there are hundreds.
    const fill = () => { if (!body.firstChild) body.append(...settings.map((setting) => this.field(setting).node)); };
    node.addEventListener("toggle", () => { if (node.open) fill(); });
    return {name, settings, node, marked, fill};
  }

  field(setting) {
    if (!this.fields.has(setting.key)) this.fields.set(setting.key, new SettingField(setting, this));
    return this.fields.get(setting.key);
  }

  base() {
    const name = this.from.value.slice(1);
    return this.from.value[0] === "r" ? {run: name} : {experiment: name, preset: this.preset.value};
  }

  asked() {
    return {...this.base(), config: Object.fromEntries(this.changes)};
  }

  async load() {
    const turn = ++this.turn, name = this.from.value.slice(1), isRun = this.from.value[0] === "r";
    const found = isRun ? null : this.experiments.find((one) => one.name === name);
    if (this.preset.dataset.of !== this.from.value) {
      this.preset.replaceChildren(el("option", {value: ""}, "\u2013"), ...(found?.presets ?? []).map((one) => el("option", {value: one}, one)));
      this.preset.dataset.of = this.from.value;
    }
    this.preset.disabled = !found?.presets.length;
    setText(this.summary, found?.summary ?? "The settings of that run. Under another name it becomes a run of its own.");
    try {
      const asked = isRun ? `/api/experiments?${new URLSearchParams({run: name})}` : `/api/experiments/${encodeURIComponent(name)}?${new URLSearchParams({preset: this.preset.value})}`;
      const {values} = await api(asked);
      if (turn !== this.turn) return;
      this.values = values;
      this.errors.clear();
      setText(this.error, "");
      for (const [key, value] of this.changes) if (JSON.stringify(values[key]) === JSON.stringify(value)) this.changes.delete(key);
      this.prediction.outdated();
      this.show();
    } catch (error) {
      if (turn === this.turn) this.refused(error);
    }
  }

  change({key}, value) {
    if (JSON.stringify(value) === JSON.stringify(this.values[key] ?? null)) this.changes.delete(key); else this.changes.set(key, value);
    this.errors.delete(key);
    setText(this.error, "");
    this.prediction.outdated();
    this.show();
  }

  unset(key) {
    this.changes.delete(key);
    this.errors.delete(key);
    this.prediction.outdated();
    this.show();
  }

  show() {
    const {run, experiment, preset} = this.base(), command = this.command.value;
    setText(this.told, this.commands.find(({name}) => name === command)?.text ?? "");
    for (const field of this.fields.values()) field.show();
    for (const {settings, marked} of this.folds) {
      const count = settings.filter(({key}) => this.changes.has(key)).length;
      setText(marked, count ? `${count} changed` : "");
    }
    // A run has no experiment file that a shell could name; the request is what a script can send.
    setText(this.line, run === undefined
      ? ["saejax", command, `--config=${experiment}${preset ? `:${preset}` : ""}`, ...[...this.changes].map(([key, value]) => asFlag(key, value))].map(quoted).join(" ").replaceAll(" --config.", " \\\n  --config.")
      : `curl ${location.origin}/api/jobs -H 'Content-Type: application/json' -d ${quoted(JSON.stringify({command, ...this.asked()}))}`);
    this.list.replaceChildren(...[...this.changes].map(([key, value]) => el("li", {},
      el("span", {}, el("code", {}, key), ` ${textOf(this.values[key]) || "none"} \u2192 ${textOf(value) || "none"}`),
      el("button", {type: "button", "aria-label": `Reset ${key}`, onclick: () => this.unset(key)}, "reset"))));
  }

  filter() {
    const words = this.search.value.trim();
    for (const {name, settings, node, fill} of this.folds) {
      const found = new Set(settings.filter(({key, doc}) => matches(`${key} ${doc}`, words)).map(({key}) => key));
      node.hidden = found.size === 0;
      if (words && found.size) { fill(); node.open = true; } else if (!words) node.open = settings.some(({key}) => this.errors.has(key));
      for (const {key} of settings) if (this.fields.has(key)) this.fields.get(key).node.hidden = words !== "" && !found.has(key);
      if (words && name && matches(name, words)) for (const {key} of settings) this.fields.get(key).node.hidden = false;
    }
  }

  // Shows the server's sentence at the key that it names, changed keys before others, long names before short ones.
  refused(error) {
    const named = (key) => new RegExp(`(^|[^\\w.])${key.replaceAll(".", "\\.")}($|[^\\w.]|\\.($|\\W))`).test(error.message);
    const keys = [...this.known.keys()].filter((key) => key.includes(".") || this.changes.has(key)).filter(named)
      .sort((one, other) => this.changes.has(other) - this.changes.has(one) || other.length - one.length);
    setText(this.error, error.message);
    if (keys.length === 0) return;
    this.errors.set(keys[0], error.message);
    const fold = this.folds.find(({settings}) => settings.some(({key}) => key === keys[0]));
    fold.node.hidden = false;
    fold.node.open = true;
    fold.fill();
    this.show();
    const {field} = this.fields.get(keys[0]);
    field.focus({preventScroll: true});
    field.scrollIntoView({block: "center"});
  }

  begin() {
    this.errors.clear();
    setText(this.error, "");
    this.start.disabled = true;
    post("/api/jobs", {command: this.command.value, ...this.asked()}).then((job) => { location.hash = address("job", job.id); })
      .catch((error) => this.refused(error)).finally(() => { this.start.disabled = false; });
  }
}

VIEWS.set("start", {
  title: () => "Start",
  draw(host, rest, query) {
    const waiting = el("div", {class: "reserve"}, headed("Start"));
    host.append(waiting);
    const begin = () => Promise.all([api("/api/settings"), api("/api/overview")]).then(([settings, {runs, sweeps}]) => {
      if (!waiting.isConnected) return;
      waiting.remove();
      new StartForm(host, settings, [...sweeps.map(({name}) => name), ...byMovement(runs).filter((run) => run.steps !== null).map(({name}) => name)], query);
    }).catch((error) => { if (error.status === 0) window.addEventListener("answers", begin, {once: true}); else waiting.append(problem(error)); });
    begin();
    return () => window.removeEventListener("answers", begin);
  },
});
