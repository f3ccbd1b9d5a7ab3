// What a head can be coloured and compared by: the columns that have a scale, and what it needs for the error allowed: tokens, or
// of a query's own context, where rules were compared, the keys that the best of them keeps.

const NEEDED = { key: "needed", label: "tokens needed", scale: "log" }, FEWEST = { key: "kept", label: "fewest keys kept", scale: "log" };

function isNeed(key) { return key === NEEDED.key || key === FEWEST.key; }

class Atlas {
  constructor(run, number) {
    Object.assign(this, run);
    this.number = number;
    this.budget = recordsOf(this.budget || {});
    this.totals = (this.rules || []).length ? this.budget : [];
    this.count = this.rows.layer.length;
    this.percents = Object.keys(this.epsilons).sort((a, b) => a - b);
    this.percent = this.percents.includes("10") ? "10" : this.percents[0];
    this.known = new Map(this.columns.map((column) => [column.key, column]));
    this.need = this.percents.some((percent) => this.needs[percent] !== this.epsilons[percent]) ? FEWEST : NEEDED;
    this.known.set(this.need.key, this.need);
    this.orders = new Map();
    this.metric = this.metrics()[0] && this.metrics()[0].key;
    this.open = null;
    this.listeners = [];
    this.place = new Map();
    for (let i = 0; i < this.count; i++) this.place.set(this.name_of(i), i);
  }
  metrics() {
    const needed = new Set(Object.values(this.needs));
    const own = this.columns.filter(({ key, scale }) => scale && !needed.has(key) && (scale === "words" || finite(this.rows[key]).length));
    return [...(this.percents.length ? [this.need] : []), ...own];
  }
  name_of(i) { return `L${this.rows.layer[i]}H${this.rows.head[i]}`; }
  hash_of(i) { return (this.number ? `R${this.number + 1}-` : "") + this.name_of(i); }
  ok(i) { return this.rows.status ? this.rows.status[i] === "ok" : true; }
  column(key) { return this.rows[isNeed(key) ? this.needs[this.percent] : key] || []; }
  value(key, i) { const value = this.column(key)[i]; return value === undefined ? null : value; }
  // For medians: a head that never came down to the error needs more than any other.
  ranked(key) { return this.column(key).map((value, i) => (!this.ok(i) ? null : value === null && isNeed(key) ? Infinity : value)); }
  label(key) { return isNeed(key) ? `${this.need.label} for ${this.percent} %` : this.named(key).label; }
  named(key) { return this.known.get(key) || { key, label: key }; }
  log(key) { return this.named(key).scale === "log"; }
  // The colour of a word: by its place among those its column may hold, then among the others that are there.
  wordColor(key, word) {
    if (!this.orders.has(key)) this.orders.set(key, [...new Set([...(this.named(key).words || []), ...this.column(key).filter(Boolean).sort()])]);
    const place = this.orders.get(key).indexOf(word);
    return place < 0 ? 6 : DATA.words[Math.min(place, DATA.words.length - 1)];
  }
  on(listener) { this.listeners.push(listener); }
  set(change) { Object.assign(this, change); for (const listener of this.listeners) listener(change); }
}

// Rows of a table that comes as columns.
function recordsOf(columns) {
  const names = Object.keys(columns);
  return (columns[names[0]] || []).map((_, i) => Object.fromEntries(names.map((name) => [name, columns[name][i]])));
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
