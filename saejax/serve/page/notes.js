// The reader's own label and note of a feature, edited in place and kept in the run's folder.

class NoteEditor {
  // saved(id, note) is told what the server has kept.
  constructor(dictionary, saved) {
    this.dictionary = dictionary;
    this.saved = saved;
    this.id = null;
    this.kept = {label: "", note: ""};
    // What could not be saved stays here until it can be, also when the reader looks at other features meanwhile.
    this.drafts = new Map();
    const either = {autocomplete: "off", spellcheck: "false", dir: "auto"};
    this.label = el("input", {type: "text", class: "label-field", placeholder: "Add a label", "aria-label": "Label of this feature", ...either});
    this.note = el("textarea", {class: "note-field", rows: 1, placeholder: "Add a note", "aria-label": "Note on this feature", ...either});
    this.status = el("p", {class: "note-status", role: "status"});
    for (const field of [this.label, this.note]) {
      field.addEventListener("keydown", (event) => this.key(event, field));
      field.addEventListener("input", () => { this.fit(); this.say(this.changed() ? "not saved yet" : ""); });
      field.addEventListener("change", () => this.save());
    }
    this.node = el("div", {class: "notes"}, el("div", {class: "label-line"}, this.label, this.status), this.note);
  }

  show(id, note) {
    if (this.id !== null && this.id !== id && this.changed()) this.save();
    this.id = id;
    this.kept = {label: note ? note.label : "", note: note ? note.note : ""};
    const draft = this.drafts.get(id);
    this.put(draft ?? this.kept);
    this.say(draft === undefined ? "" : draft.error ?? "saving\u2026", draft !== undefined && draft.error !== null);
  }

  put({label, note}) {
    this.label.value = label;
    this.note.value = note;
    this.fit();
  }

  // As high as its text, up to what the style sheet allows.
  fit() {
    this.note.style.height = "auto";
    if (this.note.value !== "") this.note.style.height = `${this.note.scrollHeight + 2}px`;
  }

  changed() { return this.label.value !== this.kept.label || this.note.value !== this.kept.note; }

  say(text, warn = false) {
    this.status.className = `note-status${warn ? " warn" : ""}`;
    this.status.replaceChildren(text);
  }

  // Enter saves; in a note, where Enter begins a line, with Ctrl. Escape brings back what is kept.
  key(event, field) {
    if (event.key === "Escape") {
      this.drafts.delete(this.id);
      this.put(this.kept);
      this.say("");
      field.blur();
    } else if (event.key === "Enter" && !event.isComposing && (field === this.label || event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      this.save();
    }
  }

  async save() {
    const {id, label: {value: label}, note: {value: note}} = this;
    if (!this.changed()) return;
    const before = this.drafts.get(id);
    if (before && before.label === label && before.note === note && before.error === null) return;
    this.drafts.set(id, {label, note, error: null});
    this.say("saving\u2026");
    try {
      await api(`/api/notes/${inPath(this.dictionary)}`, {method: "PUT", body: {id, label, note}});
      this.drafts.delete(id);
      this.saved(id, label === "" && note === "" ? null : {label, note});
      if (this.id !== id) return;
      this.kept = {label, note};
      this.say(this.changed() ? "not saved yet" : "saved");
    } catch (error) {
      this.drafts.set(id, {label, note, error: `not saved: ${error.message}`});
      if (this.id === id) this.say(`not saved: ${error.message}`, true);
    }
  }
}
