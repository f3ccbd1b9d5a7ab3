// Which keys: a head's error against the keys that each rule keeps, the kinds of heads, and what the whole cache keeps.

const EXACT = 1e-4; // a relative error below is as good as none: where curves leave the picture

function ruleStyle(atlas, rule) {
  if (rule === atlas.floor) return { color: 7, dash: "dashed", thick: 2.2 };
  const place = atlas.rules.filter((other) => other !== atlas.floor).indexOf(rule);
  return { color: place % 7, dash: place < 7 ? "solid" : "dashdot" };
}

function frontierOf(atlas, i) {
  const stored = (atlas.frontier || [])[i];
  if (!stored) return null;
  const series = stored.map(({ rule, kept, relative }) => ({ label: rule === atlas.floor ? `${rule} (floor)` : rule, ...ruleStyle(atlas, rule), x: kept || [], y: relative || [] }));
  const kept = atlas.percents.map((percent) => [percent, reached(atlas, percent, "best_rule", i), reached(atlas, percent, "best_kept", i)]).filter(([, , keys]) => keys !== null);
  if (kept.length) series.push({ label: "fewest keys for an error", mode: "points", color: 7, radius: 4.5, x: kept.map(([, , keys]) => keys), y: kept.map(([percent]) => percent / 100),
    names: kept.map(([percent, rule, keys]) => `${percent} %: ${rule} keeps ${written(keys)} keys`) });
  const marks = atlas.percents.map((percent) => ({ y: percent / 100, label: `${percent} %`, scaled: true }));
  const least = series.flatMap(({ y }) => finite(y)).filter((error) => error > 0).reduce((a, b) => Math.min(a, b), 1);
  const chart = mountChart({ title: "Which keys: error against keys kept, by rule", height: 340, x: { label: atlas.labels.frontier.kept, log: true }, y: { label: atlas.labels.frontier.relative, log: true, low: least < EXACT ? EXACT : undefined }, series, marks,
    note: `Keys of the cache kept, on average over the queries. Rules that choose once for all queries choose by earlier queries than the judged ones.${atlas.rules.includes(atlas.floor) ? " Dashed: keys drawn with the probabilities of least error, to first order; about the fewest keys of any rule." : ""}` });
  return el("div", { class: "frontier" }, chart, reachedOf(atlas, i));
}

// A column that there is one of for each error.
function reached(atlas, percent, name, i) {
  return atlas.value(atlas.epsilons[percent].replace("tokens_needed", name), i);
}

function reachedOf(atlas, i) {
  const words = (rule, keys) => (keys === null ? "none that was measured" : [outside(rule), ` ${written(keys)}`]);
  const lines = atlas.percents.filter((percent) => reached(atlas, percent, "best_rule", i)).map((percent) => {
    const [best, cache] = ["best", "cache"].map((kind) => words(reached(atlas, percent, `${kind}_rule`, i), reached(atlas, percent, `${kind}_kept`, i)));
    const floor = reached(atlas, percent, "floor_kept", i);
    return el("tr", {}, el("th", { scope: "row" }, `${percent} %`), el("td", {}, best), el("td", {}, cache), el("td", { class: "number" }, written(floor)));
  });
  if (!lines.length) return null;
  const header = el("tr", {}, ["keys for an error of", "fewest", "fewest of a cache", "floor"].map((name) => el("th", {}, name)));
  return el("div", { class: "scroll" }, el("table", { class: "medians" }, el("thead", {}, header), el("tbody", {}, lines)));
}

function rulesOf(atlas) {
  const kinds = atlas.named("kind").scale === "words" && atlas.column("kind").some(Boolean), totals = atlas.totals.length > 0;
  if (!kinds && !totals) return null;
  const map = kinds ? el("div", {}, el("h3", {}, "Kinds of heads"), headMap(atlas, "kind"), el("p", { class: "soft" }, atlas.named("kind").help)) : null;
  return section("rules", "Which keys", el("div", { class: kinds && totals ? "twocol" : "" }, map, totals ? totalsOf(atlas) : null));
}

const SPLITS = ["best split", "uniform", "every head at the error"];

function totalsOf(atlas) {
  const box = el("div", { class: "totals" });
  function show() {
    const rows = atlas.totals.filter(({ epsilon }) => Math.abs(100 * epsilon - atlas.percent) < 1e-6);
    const lines = atlas.rules.flatMap((rule) => {
      const own = new Map(rows.filter((row) => row.rule === rule).map((row) => [row.split, row])), best = own.get("best split");
      if (!best) return [];
      const bar = el("span", { class: "bar" }, el("i", {}));
      bar.firstChild.style.width = `${100 * Math.min(1, best.ratio)}%`;
      return [el("tr", { "data-rule": rule }, el("th", { scope: "row" }, outside(rule), best.where === "needs all keys" ? " *" : null), el("td", { class: "barcell" }, bar),
        SPLITS.map((split) => el("td", { class: "number" }, own.has(split) ? percent(own.get(split).ratio) : "–")),
        el("td", { class: "number" }, outside(best.worst_head), ` ${percent(best.worst)}`))];
    });
    const header = el("tr", {}, [atlas.labels.frontier.rule, "", ...SPLITS, "largest error: layer.kv head"].map((name, i) => el("th", { class: i > 1 ? "wrap number" : i ? "barcell" : null }, name)));
    box.replaceChildren(el("h3", {}, `Keys kept for a total error of ${atlas.percent} %, by rule`),
      lines.length ? el("div", { class: "scroll" }, el("table", { class: "medians" }, el("thead", {}, header), el("tbody", {}, lines))) : el("p", { class: "soft" }, `Nothing was stored for ${atlas.percent} %.`),
      el("p", { class: "soft" }, "Shares are keys kept over keys that the cache holds, summed over layers and key-value heads; a sliding-window layer holds at most its window. They are for this text and these windows. The total error is the root mean square of the heads' relative errors, weighted by the gradient of log p " +
        "where it was measured. The best split makes it least; single heads may have far larger errors (last column). * Chosen for each query: the share is what a query reads, and the cache holds all keys."));
  }
  atlas.on((change) => { if ("percent" in change) show(); });
  show();
  return box;
}
