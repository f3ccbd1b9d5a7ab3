// Horizon ablation: exponents of heads whose scores were multiplied, against the squared factor.

function scalesOf(atlas) {
  const found = atlas.scales;
  if (!found) return null;
  const { rows } = found, names = rows.layer.map((layer, j) => `L${layer}H${rows.head[j]}`), scales = [...new Set(rows.scale)].sort((a, b) => a - b), x = scales.map((scale) => scale ** 2);
  const middles = (key) => scales.map((scale) => median(rows[key].filter((_, j) => rows.scale[j] === scale)));
  const series = [
    { label: "a head", mode: "points", radius: 2.5, faint: true, color: 0, x: rows.scale.map((scale) => scale ** 2), y: rows.beta_fit, low: rows.beta_low, high: rows.beta_high, names },
    { label: "median of the heads", color: 0, thick: 2.2, x, y: middles("beta_fit") },
    ...found.theory.map((line) => ({ ...line, thick: 1.4, x, y: middles(line.key) })),
  ];
  const chart = mountChart({ title: "Exponents against the squared scale", height: 340, x: { label: "squared scale α²", log: true }, y: { label: "exponent", low: 0, high: 0.6 },
    marks: [{ y: 0.5, label: "1/2" }], series, note: `Theory: medians over the same heads, coupling times α² and horizon times α. ${found.help}` });
  return section("scales", "Scores multiplied", el("p", {}, "Every head measured again with its scores times α: what the horizon alone does to the rate."), chart);
}
