// The live view: /metrics once a second while the page can be seen.

const EVERY_MS = 1000;
const CHARTS = [
  { title: "Sequences", lines: [{ key: "running", name: "running" }, { key: "waiting", name: "waiting" }] },
  { title: "Tokens per second", lines: [{ key: "tokens" }] },
  { title: "Time between tokens", lines: [{ key: "gap" }], unit: " ms" },
  { title: "KV cache in use", lines: [{ key: "cache" }], unit: " %", top: 100 },
  { title: "Prefix cache hits", lines: [{ key: "prefix" }], unit: " %", top: 100 },
  { title: "Preemptions per second", lines: [{ key: "preemptions" }] },
];
const TOTALS = {
  request_success_total: "Finished requests",
  generation_tokens_total: "Generated tokens",
  prompt_tokens_total: "Prompt tokens",
  prompt_tokens_cached_total: "of these cached",
  num_preemptions_total: "Preemptions",
};

class Live {
  #samples = [];
  #readings = [];
  #timer = null;
  #paused = false;
  #charts = CHARTS.map((about) => new Chart(about));

  constructor() {
    byId("charts").append(...this.#charts.map(({ node }) => node));
    byId("pause").addEventListener("click", () => this.#togglePause());
    document.addEventListener("visibilitychange", () => this.#schedule(0));
    this.#schedule(0);
  }

  #schedule(delay) {
    clearTimeout(this.#timer);
    if (!document.hidden && !this.#paused) this.#timer = setTimeout(() => this.#poll(), delay);
  }

  async #poll() {
    const started = performance.now();
    try {
      const text = await (await ask("metrics", { quiet: true, signal: AbortSignal.timeout(10_000) })).text();
      this.#take({ at: performance.now(), ...parseMetrics(text) });
      say("live-status", "");
    } catch (error) {
      say("live-status", `The server does not tell its figures: ${error.message}`);
    }
    this.#schedule(Math.max(0, EVERY_MS - (performance.now() - started)));
  }

  #take(sample) {
    const before = this.#samples.at(-1);
    const restarted = before && sample.values.get("generation_tokens_total") < before.values.get("generation_tokens_total");
    if (restarted) this.#samples = this.#readings = [];
    else if (before) this.#readings.push(reading(before, sample));
    this.#samples.push(sample);
    const recent = (one) => sample.at - one.at <= SPAN_MS;
    this.#samples = this.#samples.filter(recent);
    this.#readings = this.#readings.filter(recent);
    this.#show(sample);
  }

  #show(sample) {
    if (byId("live").hidden) return;
    for (const chart of this.#charts) chart.draw(this.#readings, sample.at);
    byId("totals").replaceChildren(
      ...Object.entries(TOTALS).flatMap(([name, label]) => [make("dt", {}, label), make("dd", {}, Math.round(sample.values.get(name) ?? 0).toLocaleString("en"))]),
    );
    const rows = Object.entries(LATENCIES).map(([name, label]) => this.#latency(sample, name, label));
    byId("latency").tBodies[0].replaceChildren(...rows);
  }

  /** Draw what there is, as the view has just been opened. */
  open() {
    if (this.#samples.length) this.#show(this.#samples.at(-1));
  }

  #latency(now, name, label) {
    const before = this.#samples[0];
    const cells = [0.5, 0.9, 0.99].map((part) => percentile(before, now, name, part));
    const count = countsBetween(before, now, name).at(-1)?.[1] ?? 0;
    const texts = [...cells.map((value) => (value === null ? "\u2013" : seconds(value * 1000))), String(count)];
    return make("tr", {}, make("th", { scope: "row" }, label), ...texts.map((text) => make("td", {}, text)));
  }

  #togglePause() {
    this.#paused = !this.#paused;
    byId("pause").setAttribute("aria-pressed", String(this.#paused));
    say("live-status", this.#paused ? "Paused." : "");
    this.#schedule(0);
  }
}
