// The report: the sections of the run, and its features.

function featuresSection(summary) {
  const host = el("div", {class: "feature-host"}, el("p", {class: "note", role: "status"}, "Unpacking the features\u2026"));
  if (!summary.has_features) return section("features", "Features", null, missing("No feature has been looked at yet; run", summary.commands.evaluate));
  unpack(document.getElementById("feature-data").textContent).then((data) => {
    if (data.features.length === 0) return host.replaceChildren(missing("The scan kept no feature; run it on more tokens with", summary.commands.evaluate));
    const browser = new FeatureBrowser(data);
    host.replaceChildren(browser.node);
    browser.start();
    host.before(el("p", {class: "lead"}, `Passages from ${compact(data.n_tokens)} tokens, coloured by activation. \u2190 and \u2192 step through the list.`));
  }).catch((error) => host.replaceChildren(el("p", {class: "note warn", role: "alert"}, error.message)));
  return section("features", "Features", null, host);
}

addSection(80, ["has_features", "commands"], featuresSection, false);

function navigation(sections) {
  return el("nav", {class: "contents", "aria-label": "Sections"}, sections.map((node) => el("a", {href: `#${node.id}`}, node.querySelector("h2").textContent)));
}

function drawPage() {
  const summary = JSON.parse(document.getElementById("summary-data").textContent);
  const sections = SECTIONS.map(({draw}) => draw(summary)).filter(Boolean);
  document.getElementById("page").replaceChildren(pageHeader(summary), navigation(sections), el("main", {}, sections));
  installTip(document.getElementById("page"), document.getElementById("tip"));
}

drawPage();
