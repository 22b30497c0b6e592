// Jobs: the list, and one job with its log as it is written.

const JOBS_MS = 2000;
// Of a longer log the beginning is dropped here; the file has it.
const MOST_LOG = 400000;

VIEWS.set("jobs", {
  title: () => "Jobs",
  draw(host) {
    const {node, body} = listing([["job", 0], ["state", 0], ["time", 1], ["begun", 1]], "Jobs", "plain");
    const rows = new KeyedRows(body, (row) => row.key, plainRow(["time", "begun"]));
    const empty = el("p", {class: "note", hidden: true}, "No job has been started here. Commands that a shell runs are seen in the overview.");
    node.hidden = true;
    host.append(headed("Jobs", el("a", {class: "button first", href: "#/start"}, "Start a training")), node, empty);
    return watch("/api/jobs", JOBS_MS, ({jobs}) => {
      node.hidden = jobs.length === 0;
      empty.hidden = jobs.length > 0;
      rows.show(jobs.map(jobAsRow));
    }, (error) => toast(error.message, "bad"));
  },
});

class JobView {
  constructor(host, id) {
    this.id = id;
    this.title = el("h1", {}, "Job");
    this.badge = stateBadge();
    this.facts = el("dl", {class: "facts"});
    this.words = el("pre", {class: "command"});
    this.cancel = el("button", {type: "button", title: "It saves and ends", onclick: () => this.act(this.cancel, "cancel")}, "Cancel");
    this.again = el("button", {type: "button", onclick: () => this.act(this.again, "continue")}, "Continue");
    this.run = el("a", {class: "button"}, "Its run");
    this.text = document.createTextNode("");
    this.log = el("pre", {class: "log", tabindex: 0, role: "log", "aria-label": "Log", "aria-live": "off"}, this.text);
    this.jump = el("button", {type: "button", hidden: true, onclick: () => { this.log.scrollTop = this.log.scrollHeight; }}, "To its end");
    this.log.addEventListener("scroll", () => { this.jump.hidden = this.atEnd(); });
    host.append(el("header", {class: "masthead"}, el("p", {class: "crumb"}, el("a", {href: "#/jobs"}, "jobs"), ` / ${id}`), el("div", {class: "title-row"}, this.title, this.badge.node),
      this.facts, el("div", {class: "actions"}, this.run, this.cancel, this.again)),
    section("log", "Log", null, this.log, el("div", {class: "actions"}, this.jump)), section("words", "What it runs", null, this.words));
    this.follow = null;
    this.pending = "";
    this.begin();
  }

  async begin() {
    try {
      this.show(await api(`/api/jobs/${this.id}`));
      this.follow = live(`/ws/jobs/${this.id}`, (message) => this.take(message), this.seen ??= {log: 0});
    } catch (error) {
      if (error.status === 0) window.addEventListener("answers", () => this.begin(), {once: true});
      else this.log.replaceChildren(error.message);
    }
  }

  atEnd() { return this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 24; }

  take(message) {
    if (message.kind === "job") this.show(message.job);
    if (message.kind !== "log") return;
    this.pending += message.text;
    this.frame ??= requestAnimationFrame(() => {
      this.frame = undefined;
      const follows = this.atEnd();
      this.text.appendData(this.pending);
      this.pending = "";
      if (this.text.length > MOST_LOG) this.text.deleteData(0, this.text.length - MOST_LOG);
      if (follows) this.log.scrollTop = this.log.scrollHeight;
    });
  }

  show(job) {
    setText(this.title, `${job.command} ${job.name}`);
    this.badge.show(job.state);
    const ends = job.ended ? moment(job.ended) : null, code = job.code === null ? null : String(job.code);
    this.facts.replaceChildren(...[["asked for", moment(job.created)], ["begun", job.started ? moment(job.started) : null], ["ended", ends], ["exit code", code], ["process", job.pid]]
      .filter(([, value]) => value !== null).map(([label, value]) => el("div", {}, el("dt", {}, label), el("dd", {}, String(value)))));
    setText(this.words, job.words.map((line) => line.map(quoted).join(" ")).join("\n"));
    this.cancel.disabled = !["queued", "starting", "running"].includes(job.state);
    this.again.disabled = !job.can_continue;
    fill(this.run, {href: job.run ? address(job.sweep ? "sweep" : "run", job.run) : "#/", "aria-disabled": String(!job.run)}, []);
  }

  async act(button, what) {
    const job = await acting(button, () => post(`/api/jobs/${this.id}/${what}`, {}));
    if (job === null) return;
    this.show(job);
    if (what === "cancel") return toast("It was told to save and end.");
    // The socket of an ended job is closed; the next attempt is followed anew, from where its log was.
    if (this.follow) this.follow();
    this.follow = live(`/ws/jobs/${this.id}`, (message) => this.take(message), this.seen);
  }

  stop() { if (this.follow) this.follow(); }
}

VIEWS.set("job", {
  title: (rest) => `Job ${rest}`,
  draw(host, rest) {
    const view = new JobView(host, rest);
    return () => view.stop();
  },
});
