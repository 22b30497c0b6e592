// Where a passage of a feature comes from: document, store, shard, model, and the run's config, environment, command.

class ProvenancePanel {
  constructor(dictionary) {
    this.dictionary = dictionary;
    this.shown = null;
    this.place = 0;
    this.controller = null;
    this.body = el("div", {class: "origin-body", "aria-live": "polite"});
    this.picker = el("select", {"aria-label": "Passage", onchange: () => this.pick(Number(this.picker.value))});
    this.lead = el("p", {class: "panel-lead"}, el("label", {}, "Where this passage comes from: ", this.picker));
    this.node = el("div", {class: "origin"}, this.lead, this.body);
  }

  // feature: {id, examples, vocab} as shown; without a place the passage stays, and of another feature it is the first.
  show(feature, place = null) {
    if (this.shown !== null && this.shown.id === feature.id && (place === null || place === this.place)) return;
    this.shown = feature;
    this.lead.hidden = feature.examples.length === 0;
    this.picker.replaceChildren(...feature.examples.map((example, i) => el("option", {value: i}, `${i + 1}: ${this.name(example)}`)));
    this.pick(place ?? 0);
  }

  name(example) {
    const token = visibleText(this.shown.vocab[example.tokens[example.peak]]);
    return `${number(example.activations[example.peak])} on ${token}` + (example.document ? `, ${visibleLine(example.document)}` : "");
  }

  async pick(place) {
    this.place = place;
    this.picker.value = String(place);
    if (this.controller) this.controller.abort();
    const controller = this.controller = new AbortController();
    this.body.setAttribute("aria-busy", "true");
    const which = `feature=${this.shown.id}&example=${place}`;
    try {
      const answer = await api(`/api/provenance/${inPath(this.dictionary)}?${which}`, {signal: controller.signal});
      if (controller === this.controller) this.body.replaceChildren(...this.draw(answer).filter(Boolean));
    } catch (error) {
      if (controller === this.controller && !wasAborted(error)) this.body.replaceChildren(el("p", {class: "note warn", role: "alert"}, error.message));
    }
    if (controller === this.controller) this.body.removeAttribute("aria-busy");
  }

  draw({run, example, why}) {
    const {config, environment, provenance} = run ?? {};
    const command = environment && environment.command;
    return [
      example === null ? el("p", {class: "note"}, "No passage was kept for this feature; here is what its run was made from.") : this.chain(example),
      ...(why ?? []).map((sentence) => el("p", {class: "note"}, sentence)),
      command ? el("div", {class: "origin-command"}, el("h4", {}, "Command"), el("pre", {}, el("code", {}, visibleLine(command.join(" "))))) : null,
      this.fold("Stores, model and text that the run was made from", provenance),
      this.fold("Configuration", config),
      this.fold("Environment of the last session", environment),
    ];
  }

  // From the passage outwards, one link a line; what is not known is left out, and `why` says so.
  chain(example) {
    const position = example.position === null || example.position === undefined ? null : `token ${integer(example.position)}`;
    const place = example.row === null || example.row === undefined ? null : `row ${integer(example.row)}`;
    const links = [
      ["document", [example.document, example.document_index === null || example.document_index === undefined ? null : `number ${integer(example.document_index)}`]],
      ["position", [position]], ["passage", [example.text]], ["store", [example.store, example.split]],
      ["shard", [example.shard === null || example.shard === undefined ? null : String(example.shard), place]], ["shard's sha256", [example.shard_sha256]],
      ["model", [example.model]], ["revision", [example.revision]],
    ];
    const known = links.map(([name, parts]) => [name, parts.filter((part) => part !== null && part !== undefined && part !== "")]).filter(([, parts]) => parts.length > 0);
    return el("dl", {class: "chain"}, known.map(([name, parts]) => el("div", {}, el("dt", {}, name),
      el("dd", {}, parts.flatMap((part, i) => [i > 0 ? ", " : null, el("bdi", {}, visibleLine(typeof part === "string" ? part : JSON.stringify(part)))])))));
  }

  fold(title, value) {
    if (!value || Object.keys(value).length === 0) return null;
    const rows = this.lines(value).map(([name, text]) => el("tr", {}, el("th", {scope: "row"}, el("code", {}, name)), el("td", {}, el("code", {}, text))));
    return el("details", {}, el("summary", {}, title), el("div", {class: "scroll"}, el("table", {}, el("tbody", {}, rows))));
  }

  // A nested object as dotted names and texts.
  lines(value, prefix = "") {
    if (value === null || typeof value !== "object") return [[prefix, visibleLine(String(value))]];
    if (Array.isArray(value) && value.every((item) => item === null || typeof item !== "object")) return [[prefix, visibleLine(value.join(", "))]];
    return Object.entries(value).flatMap(([key, item]) => this.lines(item, prefix ? `${prefix}.${visibleLine(key)}` : visibleLine(key)));
  }
}
