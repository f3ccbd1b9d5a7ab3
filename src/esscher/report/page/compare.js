// Several runs side by side: a table of medians, profiles over depth, and head against head.

function compareOf(atlases) {
  if (atlases.length < 2) return null;
  const common = atlases[0].metrics().filter(({ key, scale }) => scale !== "words" && atlases.every((atlas) => atlas.metrics().some((metric) => metric.key === key)));
  if (!common.length) return null;
  let key = common.some((metric) => metric.key === "beta_fit") ? "beta_fit" : common[0].key;
  const box = el("div", { class: "twocol even" });
  function show() {
    box.replaceChildren(mountChart({ ...profileChart(atlases, key), title: "Over depth" }), ...pairCharts(atlases, key));
  }
  show();
  const ranks = DATA.ranks && DATA.ranks.count ? el("div", {}, el("h3", {}, "Ranks of heads between texts"),
    dataTable({ ...DATA.ranks, total: DATA.ranks.count, file: fileName("csv", "domains", "ranks"), link: null })) : null;
  return section("compare", "Side by side", el("div", { class: "row" }, medians(atlases, common), regimesSideBySide(atlases)),
    el("div", { class: "controls" }, menu("shown", common.map((metric) => [metric.key, metric.label]), key, (value) => { key = value; show(); })), box, ranks);
}

function middleOf(atlas, key) {
  const middle = median(atlas.ranked(key));
  return middle === Infinity ? "not reached" : written(middle);
}

function medians(atlases, metrics) {
  const header = el("tr", {}, el("th", {}, "median over heads"), atlases.map((atlas, i) => el("th", {}, `${i + 1}. `, outside(atlas.name))));
  const lines = metrics.map(({ key }) => el("tr", {}, el("th", { scope: "row" }, atlases[0].label(key)),
    atlases.map((atlas) => el("td", { class: "number" }, middleOf(atlas, key)))));
  const measured = el("tr", {}, el("th", { scope: "row" }, "heads measured"), atlases.map((atlas) =>
    el("td", { class: "number" }, `${atlas.rows.layer.filter((_, i) => atlas.ok(i)).length} of ${atlas.count}`)));
  return el("div", { class: "scroll" }, el("table", { class: "medians" }, el("thead", {}, header), el("tbody", {}, measured, lines)));
}

function regimesSideBySide(atlases) {
  const seen = [...new Set(atlases.flatMap((atlas) => atlas.column("regime").filter((word, i) => word && atlas.ok(i))))];
  if (!seen.length) return null;
  const header = el("tr", {}, el("th", {}, "heads by regime"), atlases.map((atlas, i) => el("th", {}, `${i + 1}. `, outside(atlas.name))));
  const lines = seen.map((word) => el("tr", {}, el("th", { scope: "row" }, outside(word)),
    atlases.map((atlas) => el("td", { class: "number" }, String(atlas.column("regime").filter((other, i) => other === word && atlas.ok(i)).length)))));
  return el("div", { class: "scroll" }, el("table", { class: "medians" }, el("thead", {}, header), el("tbody", {}, lines)));
}

// Every other run against the first, head by head; on the diagonal nothing changed.
function pairCharts(atlases, key) {
  const first = atlases[0], log = first.log(key);
  const series = [];
  atlases.slice(1).forEach((other, number) => {
    const pairs = [];
    for (const [name, i] of first.place) {
      const j = other.place.get(name);
      if (j === undefined || !first.ok(i) || !other.ok(j)) continue;
      const [x, y] = [first.value(key, i), other.value(key, j)];
      if (x !== null && y !== null) pairs.push([x, y, name]);
    }
    if (pairs.length) series.push({ label: `${number + 2}. ${other.name}`, mode: "points", color: number + 1, x: pairs.map(([x]) => x), y: pairs.map(([, y]) => y), names: pairs.map(([, , name]) => name) });
  });
  if (!series.length) return [el("p", { class: "soft" }, "These runs have no head in common, so no head can be compared with itself.")];
  const all = series.flatMap((one) => [...finite(one.x), ...finite(one.y)]).filter((value) => !log || value > 0);
  const ends = [all.reduce((a, b) => Math.min(a, b)), all.reduce((a, b) => Math.max(a, b))];
  series.push({ label: "equal", dash: "dotted", color: 7, thick: 1, silent: true, x: ends, y: ends });
  return [mountChart({ title: "Head against head", height: 300, x: { label: `${first.label(key)} in 1`, log }, y: { label: "in the others", log }, series })];
}
