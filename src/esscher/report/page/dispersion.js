// How far a head spreads: effective tokens, and the largest and the planted weight, against the number of keys.

function spreadOf(atlas, i) {
  const stored = (atlas.dispersion || [])[i];
  if (!stored) return null;
  const [keys, tokens, largest, planted] = atlas.spread_labels, x = { label: keys, log: true };
  const lines = (column, name, color, dash) => atlas.origins.flatMap((said, j) => {
    if (!stored[j] || !finite(stored[j][column]).length) return [];
    return [{ label: name ? `${name}, ${said}` : said, x: atlas.grid(stored[j][0]), y: stored[j][column], color: color + j, dash: j ? "dashed" : dash, thick: 2 }];
  });
  const spread = lines(1, "", 0, "solid"), n = finite(spread.flatMap((one) => one.x)), ends = [Math.min(...n), Math.max(...n)];
  const power = atlas.value("tokens_exponent", i), half = atlas.value("half_weight_at", i);
  const first = mountChart({ title: "Effective tokens against keys", height: 260, x, y: { label: tokens, log: true },
    series: [...spread, { label: "uniform: n", color: 6, dash: "dotted", thick: 1.2, x: ends, y: ends }],
    note: power === null ? "" : `Effective tokens of random keys grow as n to the power ${written(power)}.` });
  const second = mountChart({ title: "Largest weight against keys", height: 260, x, y: { label: "weight", log: true, high: 1.1 },
    series: [...lines(2, largest, 0, "solid"), ...lines(3, planted, 3, "dashdot")], marks: [{ y: 0.5, label: "1/2", scaled: true }],
    note: half === null ? "The largest weight is not below a half at the last n." : `The largest weight stays below a half from about ${written(half)} random keys on.` });
  return el("div", { class: "twocol even spread" }, first, second);
}
