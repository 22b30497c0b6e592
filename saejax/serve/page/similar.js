// The decoder rows nearest to a feature's, in its own dictionary and in others.

class SimilarPanel {
  // onChoose(id) opens a feature of the same dictionary; dictionaries() promises the names of all.
  constructor(dictionary, onChoose, dictionaries) {
    this.dictionary = dictionary;
    this.onChoose = onChoose;
    this.id = null;
    this.controller = null;
    this.select = el("select", {"aria-label": "Among the features of", onchange: () => this.ask()}, el("option", {value: dictionary}, `${dictionary} (this one)`));
    this.body = el("div", {class: "similar-body", "aria-live": "polite"});
    this.node = el("div", {class: "similar"},
      el("p", {class: "panel-lead"}, el("label", {}, "Nearest decoder rows by cosine, in ", this.select)), this.body);
    dictionaries().then((names) => this.select.append(...names.filter((name) => name !== dictionary).map((name) => el("option", {value: name}, name))));
  }

  show({id}) {
    if (this.id === id) return;
    this.id = id;
    this.ask();
  }

  async ask() {
    if (this.controller) this.controller.abort();
    const controller = this.controller = new AbortController();
    const other = this.select.value === this.dictionary ? "" : `&other=${encodeURIComponent(this.select.value)}`;
    this.body.setAttribute("aria-busy", "true");
    try {
      const answer = await api(`/api/similar/${inPath(this.dictionary)}?id=${this.id}&count=20${other}`, {signal: controller.signal});
      if (controller === this.controller) this.draw(answer.rows);
    } catch (error) {
      if (controller === this.controller && !wasAborted(error)) this.body.replaceChildren(el("p", {class: "note warn", role: "alert"}, error.message));
    }
    if (controller === this.controller) this.body.removeAttribute("aria-busy");
  }

  draw(rows) {
    this.body.replaceChildren(rows.length === 0 ? el("p", {class: "note"}, "There is no other feature.")
      : el("ol", {class: "similar-rows"}, rows.map((row) => this.row(row))));
  }

  row({dictionary, id, cosine, token, label, density}) {
    const bar = el("span", {class: "bar-track", "aria-hidden": "true"}, el("span", {class: `bar-fill ${cosine < 0 ? "down" : "up"}`}));
    bar.firstChild.style.width = `${Math.min(100, 100 * Math.abs(cosine))}%`;
    return el("li", {}, el("a", {
      href: featureAddress(dictionary, id),
      onclick: (event) => {
        if (dictionary !== this.dictionary || event.ctrlKey || event.metaKey || event.shiftKey) return;
        event.preventDefault();
        this.onChoose(id);
      },
    }, el("span", {class: "id"}, String(id)), bar, el("span", {class: "num"}, cosine.toFixed(3)),
    el("span", {class: "top"}, label ? el("bdi", {class: "label"}, visibleLine(label)) : token === null ? "" : tokenChip(token)),
    el("span", {class: "num soft"}, density === null || density === undefined ? "" : density > 0 ? percent(density) : "dead")));
  }
}
