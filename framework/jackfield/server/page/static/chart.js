// A small line chart of the last two minutes.

const SPAN_MS = 120_000;
const GAP_MS = 2_500;
const CHART_WIDTH = 240;
const CHART_HEIGHT = 72;

class Chart {
  /** Args: title: heading. lines: up to two of `{ key, name }`. unit: behind numbers. top: of the axis, or what fits. */
  constructor({ title, lines, unit = "", top = null }) {
    Object.assign(this, { title, lines, unit, top });
    this.values = lines.map(() => make("span", {}, "\u2013"));
    this.paths = lines.map((_, place) => makeSvg("g", { class: place ? "second" : "first" }));
    this.scale = make("span", {}, "");
    this.svg = makeSvg("svg", { viewBox: `0 0 ${CHART_WIDTH} ${CHART_HEIGHT}`, preserveAspectRatio: "none", role: "img" }, ...this.#grid(), ...this.paths);
    this.node = make("section", { class: "chart" }, make("h3", {}, title), make("div", { class: "values" }, ...this.#legend()), this.svg, this.#ends());
  }

  /** Draw readings (see `reading`), oldest first, up to a moment. */
  draw(readings, now) {
    const keys = this.lines.map(({ key }) => key);
    const most = this.top ?? roundUp(Math.max(1, ...readings.flatMap((one) => keys.map((key) => one[key] ?? 0))));
    this.scale.textContent = `${most}${this.unit}`;
    this.lines.forEach(({ key }, place) => {
      this.values[place].textContent = this.#number(lastOf(readings, key));
      this.paths[place].replaceChildren(...runs(readings, key).map((run) => this.#polyline(run, key, place, most, now)));
    });
    const told = this.lines.map(({ name }, place) => `${name ?? ""} ${this.values[place].textContent}`.trim());
    this.svg.setAttribute("aria-label", `${this.title}: ${told.join(", ")}`);
  }

  #polyline(run, key, place, most, now) {
    const points = run.map((one) => {
      const x = CHART_WIDTH * (1 - (now - one.at) / SPAN_MS);
      return `${x.toFixed(2)},${(CHART_HEIGHT * (1 - one[key] / most)).toFixed(2)}`;
    });
    return makeSvg("polyline", { points: points.join(" "), class: place ? "second" : "first" });
  }

  #legend() {
    return this.lines.map(({ name }, place) =>
      make("p", { class: place ? "value second" : "value" }, this.values[place], ...(name ? [make("small", {}, name)] : [])),
    );
  }

  #grid() {
    return [0, 0.5].map((part) => makeSvg("line", { class: "grid", x1: 0, x2: CHART_WIDTH, y1: CHART_HEIGHT * part, y2: CHART_HEIGHT * part }));
  }

  #ends() {
    const top = make("span", {}, "top ", this.scale);
    return make("div", { class: "scale", "aria-hidden": "true" }, make("span", {}, "2 min ago"), top, make("span", {}, "now"));
  }

  #number(value) {
    if (value === null) return "\u2013";
    return `${value < 10 && value % 1 ? value.toFixed(1) : Math.round(value)}${this.unit}`;
  }
}

const lastOf = (readings, key) => readings.findLast((one) => one[key] !== null)?.[key] ?? null;

/** Split readings where nothing was read for a while or there was no value. */
function runs(readings, key) {
  const found = [];
  let last = null;
  for (const one of readings) {
    if (one[key] !== null && last && one.at - last.at < GAP_MS) found.at(-1).push(one);
    else if (one[key] !== null) found.push([one]);
    last = one[key] === null ? null : one;
  }
  return found;
}

/** Return the next 1, 2 or 5 times a power of ten. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * power).find((bound) => bound >= value);
}
