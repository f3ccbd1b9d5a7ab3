// Overview, scatter and layers of one atlas.

function overviewOf(atlas) {
  const controls = el("div", { class: "controls" },
    choice("error allowed", atlas.percents.map((percent) => [percent, `${percent} %`]), atlas.percent, (percent) => atlas.set({ percent })),
    menu("colour", atlas.metrics().map(({ key, label }) => [key, label]), atlas.metric, (metric) => atlas.set({ metric })));
  return section("map", "Map of heads", controls, el("div", { class: "twocol" }, headMap(atlas), wordsOf(atlas)));
}

function wordsOf(atlas) {
  const box = el("div", { class: "words" });
  function show() {
    // the least demanding first; a head that never came down to the error demands most of all
    const end = (value) => (value === null ? Infinity : value), by = (key) => (i, j) => { const [a, b] = [end(atlas.value(key, i)), end(atlas.value(key, j))]; return a === b ? 0 : a - b; };
    const order = [...Array(atlas.count).keys()].filter((i) => atlas.ok(i) && atlas.percents.length).sort((i, j) => by(atlas.need.key)(i, j) || by("relative_at_n")(i, j) || i - j);
    const list = (title, heads) => heads.length ? [el("h3", {}, title), el("ul", {}, heads.map((i) =>
      el("li", {}, el("a", { href: `#${atlas.hash_of(i)}` }, atlas.name_of(i)), " ", outside(needOf(atlas, i)))))] : [];
    const names = atlas.count > 1 ? ["Most demanding heads", "Least demanding heads"] : ["The head", ""], share = Math.min(3, Math.max(1, Math.floor(order.length / 2)));
    box.replaceChildren(...list(names[0], order.slice(-share).reverse()), ...list(names[1], order.length > 1 ? order.slice(0, share) : []));
  }
  atlas.on((change) => { if ("percent" in change) show(); });
  show();
  return box;
}

// What a head needs for the error allowed: keys kept of those a query sees, or tokens drawn.
function needOf(atlas, i) {
  const value = atlas.value(atlas.need.key, i), keys = atlas.value("n_keys", i), error = atlas.value("relative_at_n", i);
  const shared = atlas.value("effective_tokens", i), regime = atlas.value("regime", i), rule = reached(atlas, atlas.percent, "cache_rule", i);
  const { words = [], meanings = [] } = atlas.named("regime"), meaning = meanings[words.indexOf(regime)];
  let text = atlas.need === FEWEST ? `keeps ${written(value)} key${value === 1 ? "" : "s"} by ${rule}` : `needs ${written(value)} tokens`;
  if (atlas.need === NEEDED && keys !== null && value > keys) text = `needs ${written(value)} draws with replacement from ${written(keys)} keys`;
  if (value === null) text = `does not reach ${atlas.percent} % at any size that was measured${error === null ? "" : ` (error at the last: ${percent(error)})`}`;
  else text += ` for an error of ${atlas.percent} %`;
  return `${text}${shared === null ? "" : `; it attends to about ${written(shared, 2)} keys`}${regime ? `. ${regime}${meaning ? `: ${meaning}` : ""}` : ""}.`;
}

const AXES = ["horizon2", "coupling", "horizon"];

function scatterOf(atlas) {
  const has = (key) => atlas.rows[key] && finite(atlas.rows[key]).length > 0;
  const axes = AXES.filter(has).map((key) => [key, atlas.label(key)]), kinds = atlas.columns.filter(({ key, metric }) => metric && has(key)).map(({ key, label }) => [key, label]);
  if (!axes.length || !kinds.length) return null;
  let axis = axes[0][0], kind = kinds[0], colour = "layer";
  const box = el("div", {});
  function show() { box.replaceChildren(mountChart(scatterChart(atlas, axis, kind, colour))); }
  const controls = el("div", { class: "controls" },
    choice("against", axes, axis, (value) => { axis = value; show(); }),
    kinds.length > 1 ? menu("exponent", kinds.map(([key, label]) => [key, label]), kind[0], (value) => { kind = kinds.find(([key]) => key === value); show(); }) : null,
    choice("colour", [["layer", "layer"], ["regime", "regime"]], colour, (value) => { colour = value; show(); }));
  show();
  return section("scatter", "Measured exponents beside theory", el("p", {}, "A point per head; the higher, the faster its error falls with more tokens. Theory is evaluated at every head."), controls, box, el("p", { class: "soft" }, "The rate of [B] is for the mean and covariance of outputs; the measured exponent is for the L2 error of outputs."));
}

function scatterChart(atlas, axis, [key, title], colour) {
  const chosen = [...Array(atlas.count).keys()].filter((i) => atlas.ok(i) && atlas.value(axis, i) > 0 && atlas.value(key, i) !== null);
  const pick = (name) => chosen.map((i) => atlas.value(name, i));
  const last = Math.max(1, ...finite(atlas.rows.layer));
  const shades = chosen.map((i) => (colour === "layer" ? shade((0.95 * atlas.rows.layer[i]) / last).css : `var(--c${atlas.wordColor("regime", atlas.value("regime", i))})`));
  const [low, high] = atlas.named(key).ends || [], few = atlas.count <= 300; // intervals of more would hide the points
  const series = [{ label: `measured (${title})`, mode: "points", x: pick(axis), y: pick(key), shades, names: chosen.map((i) => `${atlas.name_of(i)} (${atlas.value("regime", i) || "no regime"})`),
    links: chosen.map((i) => atlas.hash_of(i)), radius: atlas.count > 300 ? 2.5 : 4, low: few && atlas.rows[low] && pick(low), high: few && atlas.rows[high] && pick(high) }];
  for (const { key: name, label, of, dash, color } of atlas.theory) {
    const points = chosen.map((i) => [atlas.value(axis, i), atlas.value(name, i)]).filter(([, y]) => y !== null).sort((a, b) => a[0] - b[0]);
    if (!points.length) continue;
    const line = of === axis && points.length > 1;
    series.push({ label, mode: line ? "line" : "points", tick: !line, dash, color, x: points.map(([x]) => x), y: points.map(([, y]) => y) });
  }
  const note = colour === "layer" ? "Dark points: early layers; light points: late ones." : "Colours: regimes, as on the map.";
  return { note: `${note} Click a point to open its head.`, height: 380, x: { label: atlas.label(axis), log: true }, y: { label: "exponent", low: 0 }, marks: [{ y: 0.5, label: "1/2" }], series };
}

function layersOf(atlas) {
  const metrics = atlas.metrics().filter(({ scale }) => scale !== "words");
  if (!metrics.length || new Set(atlas.rows.layer).size < 2) return null;
  let key = metrics[0].key;
  const box = el("div", {});
  function show() { box.replaceChildren(mountChart(profileChart([atlas], key))); }
  atlas.on((change) => { if ("percent" in change && isNeed(key)) show(); });
  show();
  return section("layers", "Layers", el("p", {}, "How the heads change with depth: a dot per head, the line through the median of each layer."),
    el("div", { class: "controls" }, menu("shown", metrics.map((metric) => [metric.key, metric.label]), key, (value) => { key = value; show(); })), box, wholesOf(atlas), tokensOf(atlas));
}

// Sampled errors of the moments of whole layers, where a probe measured them.
function wholesOf(atlas) {
  const layers = Object.keys(atlas.wholes || {}), last = Math.max(1, ...layers.map(Number));
  const metrics = [...new Set(layers.flatMap((layer) => atlas.wholes[layer].map((curve) => curve.metric)))];
  if (!metrics.length) return null;
  return el("div", { class: "twocol even" }, metrics.map((metric) => mountChart({
    title: `Whole layers: ${curveStyle(atlas, metric).label}`, note: "Monte Carlo, with two standard errors.", height: 280,
    x: { label: "tokens n", log: true }, y: { label: "rms error", log: true },
    series: layers.flatMap((layer) => atlas.wholes[layer].filter((curve) => curve.metric === metric).map((curve) => {
      const wide = curve.stderr || curve.rms.map(() => 0);
      return { label: `layer ${layer}`, mode: "points", shade: (0.95 * layer) / last, x: curve.n, y: curve.rms,
        low: curve.rms.map((y, j) => y - 2 * wide[j]), high: curve.rms.map((y, j) => y + 2 * wide[j]) };
    })),
  })));
}

// What the probe says of the tokens of each layer.
function tokensOf(atlas) {
  if (!atlas.layers || !atlas.layers.count) return null;
  return el("div", {}, el("h3", {}, "Tokens of each layer"), dataTable({ ...atlas.layers, total: atlas.layers.count, file: fileName("csv", atlas.name, "layers"), link: null }));
}

// ``share``: layers by their share of the depth, where models have different numbers of them.
function profileChart(atlases, key, share = false) {
  const series = [], log = atlases[0].log(key);
  atlases.forEach((atlas, number) => {
    const layers = [...new Set(atlas.rows.layer)].sort((a, b) => a - b), values = atlas.column(key), ranked = atlas.ranked(key);
    const last = share ? Math.max(1, ...layers) : 1, depth = (layer) => layer / last;
    const chosen = values.map((_, i) => i).filter((i) => atlas.ok(i) && values[i] !== null);
    const middle = layers.map((layer) => median(ranked.filter((_, i) => atlas.rows.layer[i] === layer)));
    const who = atlases.length > 1 ? `${number + 1}. ${atlas.name}` : "";
    series.push({ label: who ? `${who}: heads` : "heads", unlisted: Boolean(who), mode: "points", color: number, faint: true, radius: 3, x: chosen.map((i) => depth(atlas.rows.layer[i])), y: chosen.map((i) => values[i]),
      names: chosen.map((i) => `${who ? `${atlas.name} ` : ""}${atlas.name_of(i)}`), links: chosen.map((i) => atlas.hash_of(i)) });
    series.push({ label: who || "median of the layer", color: number, thick: 2.4, x: layers.map(depth), y: middle });
  });
  return { height: 300, x: share ? { label: "share of the depth" } : { label: "layer", whole: true }, y: { label: atlases[0].label(key), log }, series };
}
