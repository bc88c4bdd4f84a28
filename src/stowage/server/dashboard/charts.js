// Charts of the history: the sums of the samples become rates, the shares lines.
const WIDE = 300;
const HIGH = 100;

// What is drawn: a function from two samples that follow one another to a number, for each line.
function chartsOf(names, tiers) {
  const at = Object.fromEntries(names.map((name, number) => [name, number]));
  const grown = (name) => (before, now) => (now[at[name]] - before[at[name]]) / (now[0] - before[0]);
  const share = (name) => (before, now) => now[at["used." + name]];
  const mean = (sum, number) => (before, now) => {
    const count = now[at[number]] - before[at[number]];
    return count > 0 ? (now[at[sum]] - before[at[sum]]) / count : null;
  };
  const held = ["device", "host", ...tiers].filter((tier) => "used." + tier in at);
  const charts = [
    {
      title: "Prompt tokens", unit: "tokens/s", stacked: true, show: (n) => rate(n, "tokens/s"),
      lines: [["not recomputed", "reused", grown("tokens_reused")], ["computed", "computed", grown("prompt_tokens_computed")]],
    },
    { title: "Time to first token", show: seconds, lines: [["mean", "device", mean("first_token_s", "first_tokens")]] },
    { title: "KV memory that is filled", most: 1, show: percent, lines: held.map((tier) => [tier, tone(tier), share(tier)]) },
  ];
  if ("promoted_bytes" in at) {
    charts.push({
      title: "Transfers", binary: true, show: (n) => rate(n, "B"),
      lines: [["from tiers to host", "device", grown("promoted_bytes")], ["from host to tiers", "disk", grown("spilled_bytes")]],
    });
  } else {
    charts.push({ title: "Answers", show: (n) => rate(n, "tokens/s"), lines: [["tokens", "device", grown("answer_tokens")]] });
  }
  return charts;
}

// The next round number above `n`, of a scale that people read easily.
function above(n, binary) {
  if (!(n > 0)) return binary ? 1024 : 1;
  const base = binary ? 2 : 10;
  const power = base ** Math.floor(Math.log(n) / Math.log(base));
  return (binary ? [1, 2] : [1, 2, 5, 10]).map((step) => step * power).find((step) => step >= n * 0.999);
}

class Chart {
  constructor(parent, what) {
    this.what = what;
    this.points = [];
    this.cursor = null;
    this.when = make("span.when");
    this.svg = draw("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, preserveAspectRatio: "none", "aria-hidden": "true" });
    this.svg.append(draw("line", { class: "grid", x1: 0, x2: WIDE, y1: 0.5, y2: 0.5 }));
    this.svg.append(draw("line", { class: "grid", x1: 0, x2: WIDE, y1: HIGH / 2, y2: HIGH / 2 }));
    this.paths = what.lines.map(([, look]) => draw("path", { class: (what.stacked ? "area " : "line ") + look }));
    this.svg.append(...this.paths);
    this.hair = draw("line", { class: "cursor", y1: 0, y2: HIGH, visibility: "hidden" });
    this.svg.append(this.hair);
    this.most = make("span.most");
    this.plot = make("div.plot", { role: "img" }, this.svg, this.most);
    this.begin = make("span");
    this.values = what.lines.map(() => make("b"));
    const keys = what.lines.map(([name, look], n) => make(`span.key.${look}`, {}, name + " ", this.values[n]));
    const title = make("h3", {}, make("span", {}, what.title), this.when);
    const axis = make("div.axis", { "aria-hidden": "true" }, this.begin, make("span", {}, "now"));
    parent.append(make("div.chart", {}, title, this.plot, axis, make("p.legend", {}, ...keys)));
    this.plot.addEventListener("pointermove", (event) => this.point(event));
    this.plot.addEventListener("pointerleave", () => this.point(null));
  }

  show(samples, now_s, span_s) {
    this.now_s = now_s;
    this.span_s = span_s;
    this.points = [];
    for (let n = 1; n < samples.length; n += 1) {
      if (samples[n][0] < now_s - span_s) continue;
      const values = this.what.lines.map(([, , read]) => read(samples[n - 1], samples[n]));
      this.points.push({ at_s: samples[n][0], values });
    }
    const tops = this.points.map(({ values }) => (this.what.stacked ? values.reduce((a, b) => a + b, 0) : Math.max(...values)));
    const highest = Math.max(0, ...tops);
    this.top = this.what.most || above(highest, this.what.binary);
    this.paths.forEach((path, line) => mark(path, "d", this.what.stacked ? this.area(line) : this.line(line)));
    say(this.most, highest || this.what.most ? this.what.show(this.top).replace(/\.0+ /, " ") : "");
    say(this.begin, "−" + duration(span_s).replace(" 0 s", "").replace(" 0 min", ""));
    this.tell();
    const last = this.points.at(-1);
    const words = this.what.lines.map(([name], n) => `${name} ${this.what.show(last ? last.values[n] : null)}`);
    mark(this.plot, "aria-label", `${this.what.title}: now ${words.join(", ")}; at most ${this.what.show(highest)}.`);
  }

  x(at_s) {
    return (WIDE * (1 - (this.now_s - at_s) / this.span_s)).toFixed(2);
  }

  y(value) {
    return (HIGH * (1 - Math.min(1, value / this.top))).toFixed(2);
  }

  // A line breaks where nothing is known for long; a value alone is a dot.
  line(number) {
    let path = "";
    let before = null;
    for (const { at_s, values } of this.points) {
      const value = values[number];
      if (value == null) continue;
      const joined = before != null && at_s - before < this.span_s / 10;
      path += `${joined ? "L" : "M"}${this.x(at_s)} ${this.y(value)}${joined ? "" : "h.01"}`;
      before = at_s;
    }
    return path;
  }

  // Between the sum of the lines before this one, and the sum with it.
  area(number) {
    if (!this.points.length) return "";
    const edge = (count) => ({ at_s, values }) => `${this.x(at_s)} ${this.y(values.slice(0, count).reduce((a, b) => a + b, 0))}`;
    return "M" + this.points.map(edge(number + 1)).join("L") + "L" + [...this.points].reverse().map(edge(number)).join("L") + "Z";
  }

  point(event) {
    this.cursor = null;
    if (event && this.points.length) {
      const box = this.plot.getBoundingClientRect();
      const at_s = this.now_s - this.span_s * (1 - (event.clientX - box.left) / box.width);
      this.cursor = this.points.reduce((a, b) => (Math.abs(b.at_s - at_s) < Math.abs(a.at_s - at_s) ? b : a)).at_s;
    }
    this.tell();
  }

  // The values under the pointer, or the newest.
  tell() {
    const pointed = this.cursor == null ? null : this.points.find(({ at_s }) => at_s === this.cursor);
    const shown = pointed || this.points.at(-1);
    this.values.forEach((node, n) => say(node, this.what.show(shown ? shown.values[n] : null)));
    say(this.when, pointed ? ago(this.now_s - pointed.at_s) : "");
    mark(this.hair, "visibility", pointed ? "visible" : "hidden");
    if (pointed) for (const end of ["x1", "x2"]) mark(this.hair, end, this.x(pointed.at_s));
  }
}
