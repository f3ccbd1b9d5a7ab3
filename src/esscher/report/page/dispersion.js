// How far a head spreads: effective tokens and the largest weight against the number of keys.

function spreadOf(atlas, i) {
  const stored = (atlas.dispersion || [])[i];
  if (!stored) return null;
  const [[place, tokens, largest]] = stored, [keys, spread, weight] = atlas.spread_labels, n = atlas.grid(place), x = { label: keys, log: true };
  const ends = [Math.min(...n), Math.max(...n)], power = atlas.value("tokens_exponent", i), half = atlas.value("half_weight_at", i);
  const first = mountChart({ title: "Effective tokens against keys", height: 260, x, y: { label: spread, log: true },
    series: [{ label: "n random keys", x: n, y: tokens, color: 0, thick: 2 }, { label: "uniform: n", color: 6, dash: "dotted", thick: 1.2, x: ends, y: ends }],
    note: power === null ? "" : `Effective tokens of random keys grow as n to the power ${written(power)}.` });
  const second = mountChart({ title: "Largest weight against keys", height: 260, x, y: { label: weight, log: true, high: 1.1 },
    series: [{ label: "n random keys", x: n, y: largest, color: 0, thick: 2 }], marks: [{ y: 0.5, label: "1/2", scaled: true }],
    note: half === null ? "The largest weight is not below a half at the last n." : `The largest weight stays below a half from about ${written(half)} random keys on.` });
  return el("div", { class: "twocol even spread" }, first, second);
}
