// What `saejax plan` predicts of the form's settings, shown before the button that starts them.

const PLAN_MS = 500;
// The other stages of a plan (graphs, interventions) are commands of their own.
const PLANNED = ["capture", "train", "evaluate", "report"];

class Prediction {
  // asked(): what the form asks for. wrong(error): told of a setting that is refused.
  constructor(asked, wrong) {
    this.asked = asked;
    this.wrong = wrong;
    this.turn = 0;
    this.button = el("button", {type: "button", onclick: () => this.make()}, "Predict");
    this.said = el("div", {class: "prediction", role: "status"}, el("p", {class: "quiet"}, "Memory, disk and time of every stage, before anything runs."));
    this.node = el("div", {class: "card"}, el("h2", {}, "Prediction"), this.said, el("div", {class: "actions"}, this.button));
  }

  // The settings are others now than those of what is shown.
  outdated() {
    this.turn += 1;
    this.button.disabled = false;
    if (this.shown) this.said.replaceChildren(el("p", {class: "quiet"}, "The settings have changed since; predict again."));
    this.shown = false;
  }

  async make() {
    const turn = ++this.turn, begun = performance.now();
    this.button.disabled = true;
    this.shown = true;
    const seconds = el("span", {}, "0 s");
    this.said.replaceChildren(el("p", {}, el("span", {class: "spinner", "aria-hidden": "true"}), "Compiling the programs to see what they take: ", seconds));
    try {
      let plan = await post("/api/plan", this.asked());
      while (plan.state === "running") {
        await new Promise((done) => setTimeout(done, PLAN_MS));
        if (turn !== this.turn || !this.node.isConnected) return;
        setText(seconds, `${Math.round((performance.now() - begun) / 1000)} s`);
        plan = await api(`/api/plan/${plan.id}`);
      }
      if (turn !== this.turn) return;
      this.said.replaceChildren(...(plan.state === "done" ? this.draw(plan) : [problem(new Error(plan.error))]));
    } catch (error) {
      if (turn !== this.turn) return;
      this.said.replaceChildren(problem(error));
      this.wrong(error);
    } finally {
      if (turn === this.turn) this.button.disabled = false;
    }
  }

  draw({estimates, text}) {
    const [first] = estimates;
    if (!first) return [el("pre", {class: "command"}, text)];
    const stages = first.stages.filter((one) => PLANNED.includes(one.stage));
    const cells = (one) => [largeBytes(Math.round(one.device_bytes ?? 0)), largeBytes(Math.round(one.host_bytes ?? 0)), largeBytes(Math.round(one.disk_bytes)), duration(Math.round(one.seconds))]
      .map((value) => el("td", {class: "num"}, value));
    const most = (key) => Math.max(...stages.map((one) => one[key] ?? 0));
    const total = {device_bytes: most("device_bytes"), host_bytes: most("host_bytes"), disk_bytes: first.disk_bytes, seconds: first.seconds};
    return [el("p", {class: first.fits ? "passed" : "failing"}, first.refused || (first.fits ? `\u2713 It fits on one ${first.device} device.` : `\u2717 It does not fit on one ${first.device} device.`)),
      el("table", {}, el("thead", {}, el("tr", {}, ["stage", "device", "host", "disk", "time"].map((head, i) => el("th", {scope: "col", class: i ? "num" : null}, head)))),
        el("tbody", {}, stages.map((one) => el("tr", {title: one.bound ? `bound by ${one.bound}` : ""}, el("th", {scope: "row"}, one.stage), cells(one)))),
        el("tfoot", {}, el("tr", {}, el("th", {scope: "row", title: "memory: the most of a stage; disk and time: the sum"}, "in all"), cells(total)))),
      fold("As saejax plan prints it", el("pre", {class: "command"}, text))];
  }
}
