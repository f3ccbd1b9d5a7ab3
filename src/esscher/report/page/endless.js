// Whether the numbers of a head have converged: on this pool, on halves of it, and in an endless text.

function convergedOf(atlas, i) {
  const rows = (atlas.endless || [])[i];
  if (!rows) return null;
  const interval = (low, high) => (low === null && high === null ? "not known" : low === null ? `at most ${written(high)}` : high === null ? `at least ${written(low)}` : `${written(low)} to ${written(high)}`);
  const { number, value, half, estimate, status } = atlas.labels.endless;
  const body = rows.map((row) => {
    const [now, before, guess, low, high] = ["value", "half", "estimate", "low", "high"].map((name) => (row[name] ? row[name][0] : null));
    const expected = atlas.bounded.includes(row.status) ? null : guess; // a number with a bound at best has no estimate
    return el("tr", {}, el("th", { scope: "row" }, atlas.named(row.number).label), ...[now, before, expected].map((one) => el("td", { class: "number" }, written(one))),
      el("td", {}, interval(low, high)), el("td", {}, outside(row.status)));
  });
  return el("details", { class: "endless", open: true }, el("summary", {}, "Will these numbers hold on more text?"),
    el("p", { class: "soft" }, "Each number on this text, its mean over halves of this text, and an estimate for an unlimited text of the same kind, with a 90 % interval."),
    el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, [number, value, half, estimate, "90 % interval", status].map((text) => el("th", { scope: "col" }, text)))), el("tbody", {}, body))));
}

// The intervals of the relative error at fixed n, in the units of the error curve.
function endlessErrors(atlas, i) {
  const limit = atlas.value("limit_rms", i), found = { x: [], y: [], low: [], high: [] };
  if (limit === null) return null;
  for (const { key } of atlas.columns) {
    const match = /^relative_(\d+)$/.exec(key);
    const low = match && atlas.value(`${key}_low`, i), high = match && atlas.value(`${key}_high`, i);
    if (!match || low === null || high === null || low === undefined || high === undefined) continue;
    found.x.push(Number(match[1]));
    found.y.push(limit * Math.sqrt(low * high));
    found.low.push(limit * low);
    found.high.push(limit * high);
  }
  return found.x.length ? { label: "endless text, 90 %", mode: "points", color: 2, radius: 3, ...found } : null;
}
