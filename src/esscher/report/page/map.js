// The map: a row per layer, a column per head. Cells are made once; a switch only changes their colours and texts.

const LEGIBLE = 24, NARROW = 7; // pixels of a column: for numbers in it, and to be hit at all

// Without a key it shows what the menu says.
function headMap(atlas, key = null) {
  const layers = [...new Set(atlas.rows.layer)].sort((a, b) => a - b), heads = [...new Set(atlas.rows.head)].sort((a, b) => a - b);
  const widest = heads.length > 24 ? 21 : heads.length > 14 ? 32 : 44, tall = layers.length > 24 ? 17 : 30, left = 34, top = 22;
  const height = top + layers.length * tall + 2;
  const picture = svg("svg", { class: "map", role: "grid", "aria-label": "map of layers and heads", height });
  const shown = () => key || atlas.metric, hatch = `hatch${atlas.number}${key || ""}`;
  picture.append(svg("defs", {}, svg("pattern", { id: hatch, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    svg("rect", { width: 6, height: 6, class: "hatchback" }), svg("line", { x1: 0, y1: 0, x2: 0, y2: 6, class: "hatchline" }))));
  const names = heads.map((head) => svg("text", { y: 14, "text-anchor": "middle" }, head));
  picture.append(...names, ...layers.map((layer, i) => svg("text", { x: left - 6, y: top + (i + 0.5) * tall + 4, "text-anchor": "end" }, `L${layer}`)));
  const cells = [];
  for (let i = 0; i < atlas.count; i++) {
    const y = top + layers.indexOf(atlas.rows.layer[i]) * tall;
    const rect = svg("rect", { y: y + 1, height: tall - 2, rx: 3, class: "cell", "data-head": atlas.name_of(i), role: "gridcell" });
    rect.append(svg("title", {}));
    const text = widest >= LEGIBLE ? svg("text", { y: y + tall / 2 + 3.5, "text-anchor": "middle", class: "celltext" }) : null;
    picture.append(rect);
    if (text) picture.append(text);
    cells.push({ rect, text, column: heads.indexOf(atlas.rows.head[i]) });
  }
  // Columns share the room there is; where numbers would not fit they stay away, and below NARROW the map scrolls.
  function layOut(room) {
    const size = Math.max(NARROW, Math.min(widest, (room - left - 2) / heads.length)), width = left + heads.length * size + 2;
    for (const [name, value] of Object.entries({ width, viewBox: `0 0 ${width} ${height}` })) picture.setAttribute(name, value);
    picture.classList.toggle("bare", size < LEGIBLE);
    picture.classList.toggle("tight", size < 32);
    picture.classList.toggle("wordless", size < 42); // a word is whole or not there; the key has the colours
    const step = Math.max(1, Math.ceil(18 / size));
    names.forEach((name, i) => { name.setAttribute("x", left + (i + 0.5) * size); name.toggleAttribute("hidden", i % step > 0); });
    for (const { rect, text, column } of cells) {
      rect.setAttribute("x", left + column * size + 1);
      rect.setAttribute("width", size - Math.min(2, size / 5));
      if (text) text.setAttribute("x", left + (column + 0.5) * size);
    }
  }
  picture.addEventListener("click", (event) => {
    const cell = event.target.closest(".cell");
    if (cell) location.hash = atlas.hash_of(atlas.place.get(cell.dataset.head));
  });
  picture.addEventListener("pointerover", (event) => {
    const cell = event.target.closest(".cell");
    if (cell) cell.firstChild.textContent = cellName(atlas, shown(), atlas.place.get(cell.dataset.head));
  });
  const legend = el("div", { class: "key" });
  function paint() {
    const metric = atlas.named(shown()), values = atlas.column(shown());
    const words = metric.scale === "words", scale = words ? null : scaleOf(values.filter((_, i) => atlas.ok(i)), metric.scale === "log");
    cells.forEach(({ rect, text }, i) => {
      const value = atlas.ok(i) ? values[i] : null;
      const color = cellColor(atlas, metric, scale, value);
      const beyond = atlas.ok(i) && isNeed(metric.key) && value === null;
      rect.setAttribute("fill", color ? color.css : beyond ? "var(--beyond)" : `url(#${hatch})`);
      if (!text) return;
      text.textContent = color ? (words ? value : brief(value)) : beyond ? "never" : atlas.ok(i) ? "–" : "×";
      text.setAttribute("class", `celltext${words ? " word" : ""}${color ? (color.dark ? " light" : " dark") : beyond ? " dark" : ""}`);
    });
    legend.replaceChildren(...mapKey(atlas, metric, scale, hatch));
    figure.dataset.title = atlas.label(shown());
  }
  function mark() {
    cells.forEach(({ rect }, i) => rect.classList.toggle("open", i === atlas.open));
  }
  atlas.on((change) => {
    if (!key && ("metric" in change || ("percent" in change && isNeed(atlas.metric)))) paint();
    if ("open" in change) mark();
  });
  const figure = el("figure", { class: "mapbox" });
  const box = el("div", { class: "scroll" }, picture);
  figure.append(toolsOf(figure), el("div", { class: "axisname" }, "layers down, heads across", el("span", { class: "screen" }, "; click a cell to open its head")), box, legend);
  paint();
  layOut(left + heads.length * widest + 2);
  new ResizeObserver(() => { if (box.clientWidth) layOut(box.clientWidth); }).observe(box);
  return figure;
}

// Written when the mouse comes: for all cells at once it would cost more than their colours.
function cellName(atlas, key, i) {
  const value = atlas.value(key, i);
  const shown = !atlas.ok(i) ? "not measured" : typeof value === "string" ? value || "–" : value === null && isNeed(key) ? "not reached" : written(value);
  return `${atlas.name_of(i)}: ${atlas.label(key)} ${shown}`;
}

function cellColor(atlas, metric, scale, value) {
  if (value === null || value === "" || value === undefined) return null;
  if (!scale) return { css: `var(--c${atlas.wordColor(metric.key, value)})`, dark: atlas.wordColor(metric.key, value) !== 4 };
  const share = scale.share(value);
  return share === null ? null : shade(share);
}

function swatch(color) {
  return svg("svg", { width: 14, height: 14, "aria-hidden": "true" }, svg("rect", { width: 14, height: 14, rx: 3, fill: color }));
}

function mapKey(atlas, metric, scale, hatch) {
  const needed = isNeed(metric.key), missing = [];
  const some = (test) => atlas.rows.layer.some((_, i) => test(i));
  if (needed && some((i) => atlas.ok(i) && atlas.value(metric.key, i) === null)) missing.push(el("span", { class: "swatch" }, swatch("var(--beyond)"), "never within what was measured"));
  if (some((i) => !atlas.ok(i) || (!needed && atlas.value(metric.key, i) === null))) missing.push(el("span", { class: "swatch" }, swatch(`url(#${hatch})`), "not measured"));
  if (!scale) {
    const order = (word) => (metric.words || []).indexOf(word) + 1 || Infinity;
    const seen = [...new Set(atlas.column(metric.key).filter((word, i) => atlas.ok(i) && word))].sort((a, b) => order(a) - order(b) || 0);
    return [...seen.map((word) => {
      const meaning = (metric.meanings || [])[(metric.words || []).indexOf(word)];
      return el("span", { class: "swatch" }, swatch(`var(--c${atlas.wordColor(metric.key, word)})`), outside(meaning ? `${word}: ${meaning}` : word));
    }), ...missing];
  }
  if (scale.low === null) return missing;
  const bar = svg("svg", { class: "ramp", viewBox: "0 0 48 4", preserveAspectRatio: "none" }, [...Array(48).keys()].map((i) => svg("rect", { x: i, width: 1.1, height: 4, fill: shade(i / 47).css })));
  return [el("span", {}, written(scale.low)), bar, el("span", {}, written(scale.high)),
    el("span", { class: "soft" }, `${atlas.label(metric.key)}${metric.scale === "log" ? ", log scale" : ""}`), ...missing];
}
