// The decision report: which plugin was chosen for each place of the engine, which were not, and why.

class Decisions {
  #shown = false;

  /** Fetch and show the report, once: it does not change while the server runs. */
  async open() {
    if (this.#shown) return;
    this.#shown = true;
    try {
      const report = await (await ask("server/decisions")).json();
      byId("decisions").replaceChildren(...reportNodes(report));
    } catch (error) {
      this.#shown = error.status === 404;
      byId("decisions").replaceChildren(make("p", {}, sentence(error.message)));
    }
  }
}

const sentence = (text) => `${text.charAt(0).toUpperCase()}${text.slice(1)}.`;

function reportNodes(report) {
  const patches = make("div", { class: "patches" }, ...report.decisions.map(decisionNode));
  const proposals = report.proposals.map(
    (one) => `${one.owner} proposes ${one.field} = ${one.value}: ${one.reason} (${one.applied ? "applied" : one.note || "not applied"})`,
  );
  const lost = report.counterfactuals.map((one) => `${one.field} = ${one.value} excluded ${one.name} (${one.band}) for ${one.place}`);
  return [
    make("p", { class: "summary" }, report.summary),
    patches,
    ...listNodes("What your settings excluded", lost),
    ...listNodes("Notes", report.notes),
    ...listNodes("Proposed settings", proposals),
  ];
}

function listNodes(title, texts) {
  if (!texts.length) return [];
  return [make("h3", {}, title), make("ul", { class: "notes" }, ...texts.map((text) => make("li", {}, text)))];
}

function decisionNode(decision) {
  const { request, chosen } = decision;
  const what = request.subject || request.kind;
  const place = [decision.family.replaceAll("_", " "), request.component === "target" ? "" : request.component].filter(Boolean).join(", ");
  const summary = make(
    "summary",
    {},
    make("span", {}, place, " ", make("small", {}, what)),
    make("span", { class: "cord" }),
    make("span", {}, chosen.name, " ", make("small", {}, chosen.preference?.band.toLowerCase() ?? "")),
  );
  return make("details", {}, summary, make("div", { class: "inside" }, make("p", { class: "hint" }, about(decision)), candidates(decision)));
}

/** Return how the choice came about, and what was needed. */
function about({ how, setting, origin, fallback, request }) {
  const set = [setting && `by ${setting}`, origin && `(${origin})`].filter(Boolean).join(" ");
  const needs = request.needs.length ? `Needed: ${request.needs.join(", ")}.` : "";
  return [`How it was chosen: ${how} ${set}`.trim() + ".", needs, fallback && sentence(fallback)].filter(Boolean).join(" ");
}

function candidates({ chosen, verdicts }) {
  const head = ["Candidate", "Verdict", "Reasons"].map((text) => make("th", { scope: "col" }, text));
  const rows = verdicts.map((verdict) => candidateRow(verdict, verdict.target === chosen.target));
  const table = make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows));
  return make("div", { class: "wide-table" }, table);
}

function candidateRow(verdict, chosen) {
  const accepted = verdict.stage === "accepted";
  const band = verdict.preference?.band.toLowerCase();
  const said = chosen ? `chosen, ${band}` : accepted ? `possible, ${band}` : `rejected: ${verdict.stage.replaceAll("_", " ")}`;
  const reasons = accepted ? [make("div", {}, verdict.preference?.why ?? "")] : verdict.reasons.map(reasonNode);
  return make("tr", { class: chosen ? "chosen" : null }, make("td", {}, verdict.name), make("td", {}, said), make("td", {}, ...reasons));
}

function reasonNode({ fact, detail, remedy }) {
  return make("div", {}, `${fact}: ${detail}`, ...(remedy ? [make("div", { class: "remedy" }, `Remedy: ${remedy}`)] : []));
}
