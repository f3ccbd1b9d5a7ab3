// Several runs side by side: what each measured, medians, budgets, profiles over depth; heads are paired within one model alone.

function compareOf(atlases) {
  if (atlases.length < 2) return null;
  const common = atlases[0].metrics().filter(({ key, scale }) => scale !== "words" && atlases.every((atlas) => atlas.metrics().some((metric) => metric.key === key)));
  if (!common.length) return null;
  let key = common.some((metric) => metric.key === "beta_fit") ? "beta_fit" : common[0].key;
  const box = el("div", { class: "twocol even" }), related = atlases.every((atlas) => sameModel(atlas, atlases[0]));
  function show() {
    box.replaceChildren(mountChart({ ...profileChart(atlases, key, !related), title: "Over depth" }), ...pairCharts(atlases, key));
  }
  show();
  const notes = [];
  if (!related) notes.push("These are different models: head 3 of one has nothing to do with head 3 of another, so no heads are paired across models.");
  if (atlases.some((atlas) => atlas.identity.pool !== atlases[0].identity.pool)) notes.push("The pools differ in kind or size: exponents and errors at a fixed n compare, while effective tokens and shares of the pool go with the number of keys.");
  return section("compare", "Side by side", factsOf(atlases), notes.map((note) => el("p", { class: "warning" }, note)),
    el("div", { class: "row" }, medians(atlases, common), el("div", {}, budgetsOf(atlases), regimesSideBySide(atlases))),
    el("div", { class: "controls" }, menu("shown", common.map((metric) => [metric.key, metric.label]), key, (value) => { key = value; show(); })), box);
}

function sameModel(a, b) {
  return a.identity.weights === b.identity.weights;
}

// A table with a column for each run; lines: [name, a cell for each run].
function beside(title, atlases, lines, numeric = true) {
  const header = el("tr", {}, el("th", {}, title), atlases.map((atlas, i) => el("th", {}, `${i + 1}. `, outside(atlas.name))));
  const body = lines.map(([name, cells]) => el("tr", {}, el("th", { scope: "row" }, outside(name)), cells.map((cell) => el("td", { class: numeric ? "number" : null }, outside(cell)))));
  return el("div", { class: "scroll" }, el("table", { class: "medians beside" }, el("thead", {}, header), el("tbody", {}, body)));
}

function factsOf(atlases) {
  const known = atlases.map((atlas) => new Map(atlas.identity.facts)), names = [...new Set(known.flatMap((facts) => [...facts.keys()]))];
  return beside("what was measured", atlases, names.map((name) => [name, known.map((facts) => facts.get(name) || "–")]), false);
}

// Keys that each run keeps for an error: at random, and by each keep rule where a run compared them.
function budgetsOf(atlases) {
  const percents = [...new Set(atlases.flatMap((atlas) => atlas.percents))].sort((a, b) => a - b);
  const kept = (atlas, wanted) => {
    const rows = atlas.budget.map(({ epsilon, rule, split, ratio }) => [epsilon, split, rule, ratio]);
    return new Map(rows.filter(([epsilon, split]) => SPLITS.slice(0, 2).includes(split) && Math.abs(100 * epsilon - wanted) < 1e-6).map(([, split, rule, ratio]) => [`${rule}, ${split}`, ratio]));
  };
  if (!atlases.some((atlas) => atlas.budget.length)) return null;
  const box = el("div", {});
  function show(wanted) {
    const own = atlases.map((atlas) => kept(atlas, wanted)), names = [...new Set(own.flatMap((one) => [...one.keys()]))];
    box.replaceChildren(beside(`keys kept for an error of ${wanted} %`, atlases, names.map((name) => [name, own.map((one) => (one.has(name) ? percent(one.get(name)) : "–"))])));
  }
  const first = percents.includes("10") ? "10" : percents[0];
  show(first);
  return el("div", { class: "budgets" }, choice("error allowed", percents.map((wanted) => [wanted, `${wanted} %`]), first, show), box);
}

function middleOf(atlas, key) {
  const middle = median(atlas.ranked(key));
  return middle === Infinity ? "not reached" : written(middle);
}

function medians(atlases, metrics) {
  return beside("median over heads", atlases, metrics.map(({ key }) => [atlases[0].label(key), atlases.map((atlas) => middleOf(atlas, key))]));
}

function regimesSideBySide(atlases) {
  const seen = [...new Set(atlases.flatMap((atlas) => atlas.column("regime").filter((word, i) => word && atlas.ok(i))))];
  if (!seen.length) return null;
  const count = (atlas, word) => String(atlas.column("regime").filter((other, i) => other === word && atlas.ok(i)).length);
  return beside("heads by regime", atlases, seen.map((word) => [word, atlases.map((atlas) => count(atlas, word))]));
}

// Every other run of the same model against the first, head by head; on the diagonal nothing changed.
function pairCharts(atlases, key) {
  const first = atlases[0], log = first.log(key);
  const series = [];
  atlases.slice(1).forEach((other, number) => {
    const pairs = [];
    if (!sameModel(first, other)) return;
    for (const [name, i] of first.place) {
      const j = other.place.get(name);
      if (j === undefined || !first.ok(i) || !other.ok(j)) continue;
      const [x, y] = [first.value(key, i), other.value(key, j)];
      if (x !== null && y !== null) pairs.push([x, y, name]);
    }
    if (pairs.length) series.push({ label: `${number + 2}. ${other.name}`, mode: "points", color: number + 1, x: pairs.map(([x]) => x), y: pairs.map(([, y]) => y), names: pairs.map(([, , name]) => name) });
  });
  if (!series.length) return [el("p", { class: "soft" }, "No other run has a head of the first one's model, so no head can be compared with itself.")];
  const all = series.flatMap((one) => [...finite(one.x), ...finite(one.y)]).filter((value) => !log || value > 0);
  const ends = [all.reduce((a, b) => Math.min(a, b)), all.reduce((a, b) => Math.max(a, b))];
  series.push({ label: "equal", dash: "dotted", color: 7, thick: 1, silent: true, x: ends, y: ends });
  return [mountChart({ title: "Head against head", height: 300, x: { label: `${first.label(key)} in 1`, log }, y: { label: "in the others", log }, series })];
}
