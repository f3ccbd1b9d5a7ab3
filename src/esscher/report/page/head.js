// One head: its error curve with what theory says, local slope, scores, tail, sentence, numbers.

// Errors take colours by their place among those a run has words for, the second and every other one dashed.
const CURVE_COLORS = [0, 5, 2, 3];

function curveStyle(atlas, metric) {
  const place = Object.keys(atlas.errors).indexOf(metric);
  return place < 0 ? { label: metric, color: 7, dash: "solid" }
    : { label: atlas.errors[metric], color: CURVE_COLORS[place % CURVE_COLORS.length], dash: place % 2 ? "dashed" : "solid" };
}

const SLOW = "Theory gives these rates without a constant, so each line starts at the first point of the exact curve.";

function headView(atlas) {
  const box = el("section", { id: "head", hidden: true, tabindex: -1, "aria-live": "polite" });
  function show() {
    if (atlas.open === null) { box.hidden = true; box.replaceChildren(); return; }
    box.hidden = false;
    box.dataset.head = atlas.name_of(atlas.open);
    box.replaceChildren(...headContent(atlas, atlas.open));
  }
  atlas.on((change) => { if ("open" in change) show(); });
  return box;
}

function headContent(atlas, i) {
  const title = el("h2", {}, `Layer ${atlas.rows.layer[i]}, head ${atlas.rows.head[i]}`);
  const move = (by, text) => el("button", { type: "button", onclick: () => step(atlas, 0, by), title: "also with the arrow keys" }, text);
  const bar = el("div", { class: "headbar" }, title, move(-1, "‹ previous"), move(1, "next ›"),
    el("a", { href: `#${atlas.hash_of(i)}`, class: "linkto" }, `#${atlas.hash_of(i)}`),
    el("button", { type: "button", class: "close", onclick: () => { location.hash = "map"; } }, "close"));
  if (!atlas.ok(i)) {
    return [bar, el("p", { class: "warning" }, "This head was not measured: ", outside(atlas.value("reason", i) || "no reason was stored")), numbersOf(atlas, i)];
  }
  const curves = ((atlas.curves || [])[i] || []).filter((curve) => curve.rms);
  const charts = [];
  if (curves.length) charts.push(el("div", { class: "tall" }, mountChart(errorChart(atlas, i, curves)), slopeOf(atlas, i, curves)));
  else charts.push(el("p", { class: "soft" }, "No error curve was stored for this head."));
  const side = el("div", { class: "side" }, sentencesOf(atlas, i), tailChart(atlas, i));
  return [bar, el("div", { class: "headgrid" }, ...charts, side), convergedOf(atlas, i), frontierOf(atlas, i), numbersOf(atlas, i)].filter(Boolean);
}

function sentencesOf(atlas, i) {
  const text = el("div", { class: "told" });
  const regime = atlas.value("regime", i), reason = atlas.value("regime_reason", i), signs = atlas.value("signatures", i), verdict = atlas.value("score_verdict", i);
  if (regime) text.append(el("p", {}, "Regime: ", el("strong", {}, outside(regime)), reason ? ". " : "", reason ? outside(reason) : null));
  const needed = atlas.percents.map((percent) => {
    const value = atlas.rows[atlas.needs[percent]][i];
    return value === null ? `not reached for ${percent} %` : `${written(value)} for ${percent} %`;
  });
  const kind = atlas.value("kind", i), why = atlas.value("kind_reason", i);
  if (kind) text.append(el("p", {}, "Kind: ", el("strong", {}, outside(kind)), why ? ". " : "", why ? outside(why) : null));
  if (needed.length) text.append(el("p", {}, `For the errors allowed, ${atlas.need.label}: ${needed.join(", ")}.`));
  const frozen = atlas.value("freezing_tokens", i);
  if (frozen !== null) text.append(el("p", {}, `Freezing point: with fewer than about ${written(frozen)} tokens, a typical query attends to its few largest scores only.`));
  if (signs) text.append(el("p", {}, "Signs of trouble: ", outside(signs), "."));
  if (verdict) text.append(el("p", {}, "Scores: ", outside(verdict)));
  return text;
}

function exactOf(curves) {
  return curves.find((curve) => curve.metric === "l2" && curve.kind === "exact") || curves.find((curve) => curve.kind === "exact");
}

function errorChart(atlas, i, curves) {
  const series = [];
  for (const curve of curves) {
    const style = curveStyle(atlas, curve.metric);
    if (curve.kind === "montecarlo") {
      const wide = curve.stderr || curve.rms.map(() => 0);
      series.push({ label: `${curve.metric === "l2" ? "output" : style.label}, Monte Carlo`, mode: "points", color: curve.metric === "l2" ? 1 : style.color,
        x: curve.n, y: curve.rms, low: curve.rms.map((y, j) => y - 2 * wide[j]), high: curve.rms.map((y, j) => y + 2 * wide[j]) });
      continue;
    }
    series.push({ label: style.label, color: style.color, dash: style.dash, thick: 2.2, x: curve.n, y: curve.rms });
    if (curve.q95) series.push({ label: "95 % of queries stay below", color: style.color, dash: "dotted", thick: 1.4, x: curve.n, y: curve.q95 });
  }
  const endless = endlessErrors(atlas, i);
  if (endless) series.push(endless);
  const exact = exactOf(curves);
  if (exact) {
    const [n0, y0] = [exact.n[0], exact.rms[0]];
    for (const { key, label, dash, color } of atlas.theory) {
      const beta = atlas.value(key, i);
      if (beta !== null) series.push({ label, dash, color, thick: 1.3, unscaled: true, x: exact.n, y: exact.n.map((n) => y0 * (n / n0) ** -beta) });
    }
    const delta = atlas.value("delta_constant", i);
    if (delta !== null) series.push({ label: "delta method, constant/√n", dash: "dashdot", color: 7, thick: 1.1, unscaled: true, x: exact.n, y: exact.n.map((n) => delta / Math.sqrt(n)) });
  }
  const marks = [], limit = atlas.value("limit_rms", i), frozen = atlas.value("freezing_tokens", i);
  if (frozen !== null) marks.push({ x: frozen, label: `freezing point ${brief(frozen)}` });
  if (limit !== null) for (const percent of atlas.percents) marks.push({ y: (limit * percent) / 100, label: `${percent} % of the limit`, scaled: true });
  return { title: "Error against the limit", note: exact ? SLOW : "", height: 360, x: { label: "tokens n", log: true }, y: { label: "rms error", log: true }, series, marks };
}

function slopeOf(atlas, i, curves) {
  const exact = curves.filter((curve) => curve.local_slope && curve.kind === "exact");
  if (!exact.length) return null;
  const series = exact.map((curve) => {
    const style = curveStyle(atlas, curve.metric);
    return { label: style.label, color: style.color, dash: style.dash, x: curve.n, y: curve.local_slope.map((value) => (value === null ? null : -value)) };
  });
  series.forEach((one, j) => { one.hidden = j > 0; });
  const n = exact[0].n, ends = [n[0], n[n.length - 1]];
  for (const { key, label, dash, color } of atlas.theory) {
    const beta = atlas.value(key, i);
    if (beta !== null) series.push({ label, dash, color, thick: 1.3, x: ends, y: [beta, beta] });
  }
  return mountChart({ title: "Local exponent", height: 220, x: { label: "tokens n", log: true }, y: { label: "−d log error / d log n", low: 0 },
    marks: [{ y: 0.5, label: "1/2", scaled: true }], series });
}

function tailChart(atlas, i) {
  const stored = (atlas.tails || [])[i];
  if (!stored) return null;
  const [{ z, survival, gaussian }] = stored, khat = atlas.value("khat", i), low = atlas.value("khat_low", i), high = atlas.value("khat_high", i);
  const label = atlas.value("khat_label", i);
  let note = khat === null ? "" : `Tail of the weights: k-hat ${written(khat)}`;
  if (khat !== null && low !== null && high !== null) note += ` (${written(low)} to ${written(high)})`;
  if (khat !== null && label) note += `, ${label}`;
  const positive = finite(survival).filter((value) => value > 0);
  const floor = positive.length ? positive.reduce((a, b) => Math.min(a, b)) / 3 : 1e-6;
  return mountChart({ title: "Tail of the scores", note, height: 210, x: { label: "standardised score z" }, y: { label: "share above z", log: true, low: floor, high: 1.2 },
    series: [{ label: "scores", mode: "points", radius: 2.5, color: 0, x: z, y: survival }, { label: "Gaussian", color: 1, x: z, y: gaussian }] });
}

function numbersOf(atlas, i) {
  const rows = atlas.columns.map(({ key, label, help }) =>
    el("tr", {}, el("th", { scope: "row" }, label), el("td", {}, outside(typeof atlas.rows[key][i] === "string" ? atlas.rows[key][i] || "–" : written(atlas.rows[key][i], 4))), el("td", { class: "soft" }, help)));
  return el("details", { class: "numbers", open: innerWidth > 860 }, el("summary", {}, "All numbers of this head"), el("table", {}, el("tbody", {}, rows)));
}

// Arrow keys: left and right through the heads of a layer, up and down through the layers.
function step(atlas, layers, heads) {
  if (atlas.open === null) return;
  let next = null;
  if (heads) next = (atlas.open + heads + atlas.count) % atlas.count;
  else {
    const all = [...new Set(atlas.rows.layer)].sort((a, b) => a - b);
    const layer = all[(all.indexOf(atlas.rows.layer[atlas.open]) + layers + all.length) % all.length];
    const found = atlas.place.get(`L${layer}H${atlas.rows.head[atlas.open]}`);
    next = found === undefined ? atlas.rows.layer.indexOf(layer) : found;
  }
  location.hash = atlas.hash_of(next);
}
