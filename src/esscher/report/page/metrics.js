// What a head can be coloured and compared by. "log": on a logarithmic scale; "good": which end is the easy one.

const REGIMES = ["diffuse", "selective", "frozen", "sink-dominated"];
const METRICS = [
  { key: "needed", label: "tokens needed", log: true },
  { key: "beta_fit", label: "measured exponent" },
  { key: "coupling", label: "coupling Ψ", log: true },
  { key: "horizon2", label: "two-sided horizon", log: true },
  { key: "horizon", label: "horizon", log: true },
  { key: "effective_tokens", label: "effective tokens", log: true },
  { key: "khat", label: "k-hat" },
  { key: "regime", label: "regime", words: true },
  { key: "sink_mass", label: "sink mass" },
  { key: "relative_at_n", label: "relative error", log: true },
];

class Atlas {
  constructor(run, number) {
    Object.assign(this, run);
    this.number = number;
    this.count = this.rows.layer.length;
    this.percents = Object.keys(this.epsilons).sort((a, b) => a - b);
    this.percent = this.percents.includes("10") ? "10" : this.percents[0];
    this.metric = this.metrics()[0] && this.metrics()[0].key;
    this.open = null;
    this.listeners = [];
    this.place = new Map();
    for (let i = 0; i < this.count; i++) this.place.set(this.name_of(i), i);
  }
  metrics() {
    return METRICS.filter(({ key }) => (key === "needed" ? this.percents.length : this.rows[key] && (key === "regime" || finite(this.rows[key]).length)));
  }
  name_of(i) { return `L${this.rows.layer[i]}H${this.rows.head[i]}`; }
  hash_of(i) { return (this.number ? `R${this.number + 1}-` : "") + this.name_of(i); }
  ok(i) { return this.rows.status ? this.rows.status[i] === "ok" : true; }
  column(key) { return this.rows[key === "needed" ? this.epsilons[this.percent] : key] || []; }
  value(key, i) { const value = this.column(key)[i]; return value === undefined ? null : value; }
  // For medians: a head that never came down to the error needs more than any other.
  ranked(key) { return this.column(key).map((value, i) => (!this.ok(i) ? null : value === null && key === "needed" ? Infinity : value)); }
  label(key) {
    const metric = METRICS.find((candidate) => candidate.key === key);
    return key === "needed" ? `tokens needed for ${this.percent} %` : metric ? metric.label : key;
  }
  grid(place) { return this.grids[place]; }
  on(listener) { this.listeners.push(listener); }
  set(change) { Object.assign(this, change); for (const listener of this.listeners) listener(change); }
}

function metricOf(key) { return METRICS.find((metric) => metric.key === key); }

function regimeColor(word) {
  const place = REGIMES.indexOf(word);
  return place < 0 ? 6 : [2, 0, 1, 4][place];
}

// The share of the scale that a value takes, or null.
function scaleOf(values, log) {
  const usable = finite(values).filter((value) => !log || value > 0);
  if (!usable.length) return { share: () => null, low: null, high: null };
  const f = log ? Math.log : (value) => value;
  const low = usable.reduce((a, b) => Math.min(a, b)), high = usable.reduce((a, b) => Math.max(a, b));
  const share = (value) => {
    if (value === null || (log && !(value > 0))) return null;
    return high > low ? (f(value) - f(low)) / (f(high) - f(low)) : 0.5;
  };
  const at = (place) => (log ? Math.exp(f(low) + place * (f(high) - f(low))) : low + place * (high - low));
  return { share, low, high, at };
}
