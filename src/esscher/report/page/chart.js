// Charts as SVG. A chart is data: {x: {label, log, low, high}, y: {...}, series: [...], marks: [...], height}.
// A series: {label, x, y, mode: "line" | "points", low, high, dash, color, shades, names, links, faint, hidden}.
// A mark: {x or y, label, dash, color}: a line across the plot.
// low and high of an axis are where it ends; a straight one goes on to hold points beyond, a logarithmic one cuts what is tiny.
// What is shown while a reader looks closer: zoom: {x: [low, high], y: [low, high]}.
//
// By hand, because every page carries it: 27 kB with pointing and saving. Libraries, minified: uPlot 1.6 51 kB and Chart.js 4.6
// 210 kB, both on canvas, so that no text could be selected and no vectors saved; Plotly's smallest bundle, 4.1, 1192 kB, as SVG.

const DASH = { solid: null, dotted: "1.5 4", dashed: "7 4", dashdot: "8 3 2 3" };
let chartNumber = 0;

function mountChart(spec) {
  const plot = el("div", { class: "plot", tabindex: 0, role: "group",
    "aria-label": `${spec.y.label} against ${spec.x.label}; arrow keys read values, plus and minus zoom, 0 shows all` });
  const figure = el("figure", { class: "chart", "data-title": spec.title || `${spec.y.label} against ${spec.x.label}` });
  const chart = { spec, plot, tip: el("div", { class: "tip", hidden: true }), view: null };
  const redraw = () => { chart.view = drawChart(spec, Math.max(220, plot.clientWidth)); plot.replaceChildren(chart.view.picture, chart.tip); chart.tip.hidden = true; };
  const zoomed = (zoom) => { spec.zoom = zoom; redraw(); };
  figure.append(toolsOf(figure, zoomTools(chart, zoomed)), ...(spec.title ? [el("h3", {}, spec.title)] : []), plot, legend(spec, redraw));
  if (spec.note) figure.append(el("figcaption", {}, spec.note));
  readValues(chart);
  dragToZoom(chart, zoomed);
  steerWithKeys(chart, zoomed);
  let width = 0;
  new ResizeObserver(() => {
    if (Math.abs(plot.clientWidth - width) < 2) return;
    width = plot.clientWidth;
    redraw();
  }).observe(plot);
  return figure;
}

function legend(spec, redraw) {
  const entries = spec.series.filter((series) => series.label && !series.unlisted).map((series) => {
    const mark = series.tick ? svg("line", { x1: 6, x2: 16, y1: 6, y2: 6, stroke: colorOf(series), "stroke-width": 2 })
      : series.mode === "points"
      ? svg("circle", { cx: 11, cy: 6, r: 3.5, fill: colorOf(series) })
      : svg("line", { x1: 1, x2: 21, y1: 6, y2: 6, stroke: colorOf(series), "stroke-width": 2, "stroke-dasharray": DASH[series.dash] });
    const button = el("button", { type: "button", "aria-pressed": String(!series.hidden), title: "show or hide" },
      svg("svg", { width: 22, height: 12, "aria-hidden": "true" }, mark), outside(series.label));
    button.addEventListener("click", () => {
      series.hidden = !series.hidden;
      button.setAttribute("aria-pressed", String(!series.hidden));
      redraw();
    });
    return button;
  });
  return el("div", { class: "legend" }, entries);
}

function colorOf(series, i) {
  if (series.shades && i !== undefined) return series.shades[i];
  if (series.shade !== undefined) return shade(series.shade).css;
  return series.color === undefined ? "var(--c0)" : typeof series.color === "number" ? `var(--c${series.color})` : `var(--${series.color})`;
}

function extent(spec, axis) {
  return spec.zoom ? spec.zoom[axis] : wholeExtent(spec, axis);
}

function wholeExtent(spec, axis) {
  const log = spec[axis].log;
  let values = [];
  for (const series of spec.series) {
    if (series.hidden || series.unscaled) continue;
    const columns = axis === "x" ? [series.x] : [series.y, series.low, series.high];
    for (const column of columns) if (column) values.push(...finite(column));
  }
  for (const mark of spec.marks || []) if (mark[axis] !== undefined && mark.scaled) values.push(mark[axis]);
  if (log) values = values.filter((value) => value > 0);
  let low = values.reduce((a, b) => Math.min(a, b), Infinity);
  let high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  if (low > high) [low, high] = log ? [1, 10] : [0, 1];
  const [least, most] = [low, high];
  if (log) {
    const pad = Math.max(0.04 * Math.log(high / low), low === high ? 0.7 : 0);
    [low, high] = [low * Math.exp(-pad), high * Math.exp(pad)];
  } else {
    const pad = low === high ? Math.max(0.5, Math.abs(low) * 0.1) : 0.05 * (high - low);
    [low, high] = [low - pad, high + pad];
  }
  const { low: from, high: to } = spec[axis];
  if (from !== undefined && (log || least >= from)) low = from;
  if (to !== undefined && (log || most <= to)) high = to;
  return [low, high];
}

function ticksOf([low, high], { log, whole }, room) {
  if (!log) {
    const rough = (high - low) / room;
    const unit = 10 ** Math.floor(Math.log10(rough));
    const step = Math.max(whole ? 1 : 0, [1, 2, 5, 10].map((factor) => factor * unit).find((candidate) => candidate >= rough) || rough);
    const ticks = [];
    for (let i = Math.ceil(low / step); i * step <= high + 1e-9 * step; i++) ticks.push([i * step, written(Number((i * step).toPrecision(6)))]);
    return ticks;
  }
  const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9);
  const plain = (value) => (value >= 1e-3 && value < 1e5 ? written(value) : null);
  if (last - first >= 1 && Math.log10(high / low) * 3 > room) {
    const step = Math.max(1, Math.ceil((last - first + 1) / room));
    const ticks = [];
    for (let k = first; k <= last; k += step) ticks.push([10 ** k, plain(10 ** k) || power(k)]);
    return ticks;
  }
  const ticks = [];
  for (let k = first - 1; k <= last; k++)
    for (const factor of Math.log10(high / low) > 0.5 ? [1, 2, 5] : [1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9]) {
      const value = Number((factor * 10 ** k).toPrecision(3));
      if (value >= low && value <= high) ticks.push([value, plain(value) || written(value)]);
    }
  if (ticks.length < 2) return ticksOf([low, high], {}, room); // a range so narrow that its logarithm is straight
  return ticks.length > room ? ticks.filter((_, i) => i % Math.ceil(ticks.length / room) === 0) : ticks;
}

// The picture, and what is needed to read it: what was drawn where, and values of places.
function drawChart(spec, width) {
  const height = spec.height || 320;
  const pad = { left: 68, right: 12, top: 10, bottom: 42 };
  const xs = extent(spec, "x"), ys = extent(spec, "y");
  const X = scaleTo(xs, spec.x.log, pad.left, width - pad.right), Y = scaleTo(ys, spec.y.log, height - pad.bottom, pad.top);
  const id = `clip${++chartNumber}`;
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `${spec.y.label} against ${spec.x.label}` });
  const inside = { x: pad.left, y: pad.top, width: width - pad.left - pad.right, height: height - pad.top - pad.bottom };
  picture.append(svg("defs", {}, svg("clipPath", { id }, svg("rect", inside))));
  drawAxes(picture, spec, { xs, ys, X: X.place, Y: Y.place, width, height, pad });
  const data = svg("g", { "clip-path": `url(#${id})` }), drawn = [];
  picture.append(data);
  for (const mark of spec.marks || []) drawMark(data, mark, { X: X.place, Y: Y.place, inside });
  for (const series of spec.series) if (!series.hidden) drawSeries(data, series, { X: X.place, Y: Y.place, drawn, bottom: height - pad.bottom });
  return { picture, drawn, inside, x: X.value, y: Y.value };
}

// From values to places, and back.
function scaleTo(range, log, from, to) {
  const f = log ? Math.log : (value) => value, [low, high] = range.map(f);
  return {
    place: (value) => (log && !(value > 0) ? NaN : from + ((f(value) - low) / (high - low)) * (to - from)),
    value: (place) => { const at = low + ((place - from) / (to - from)) * (high - low); return log ? Math.exp(at) : at; },
  };
}

function drawAxes(picture, spec, { xs, ys, X, Y, width, height, pad }) {
  for (const [value, text] of ticksOf(xs, spec.x, Math.max(2, Math.floor(width / 90)))) {
    picture.append(svg("line", { class: "grid", x1: X(value), x2: X(value), y1: pad.top, y2: height - pad.bottom }),
      svg("text", { x: X(value), y: height - pad.bottom + 16, "text-anchor": "middle" }, text));
  }
  for (const [value, text] of ticksOf(ys, spec.y, Math.max(2, Math.floor(height / 55)))) {
    picture.append(svg("line", { class: "grid", x1: pad.left, x2: width - pad.right, y1: Y(value), y2: Y(value) }),
      svg("text", { x: pad.left - 6, y: Y(value) + 4, "text-anchor": "end" }, text));
  }
  picture.append(
    svg("path", { class: "axis", d: `M${pad.left} ${pad.top}V${height - pad.bottom}H${width - pad.right}` }),
    svg("text", { class: "name", x: (pad.left + width - pad.right) / 2, y: height - 6, "text-anchor": "middle" }, spec.x.label),
    svg("text", { class: "name", x: 12, y: (pad.top + height - pad.bottom) / 2, "text-anchor": "middle",
      transform: `rotate(-90 12 ${(pad.top + height - pad.bottom) / 2})` }, spec.y.label));
}

function drawMark(layer, mark, { X, Y, inside }) {
  const vertical = mark.x !== undefined && mark.x !== null;
  const place = vertical ? X(mark.x) : Y(mark.y);
  if (!Number.isFinite(place) || (vertical && (place < inside.x || place > inside.x + inside.width))) return;
  const ends = vertical
    ? { x1: place, x2: place, y1: inside.y, y2: inside.y + inside.height }
    : { x1: inside.x, x2: inside.x + inside.width, y1: place, y2: place };
  layer.append(svg("line", { ...ends, class: "mark", "stroke-dasharray": DASH[mark.dash || "dotted"] }));
  const late = vertical && place > inside.x + inside.width * 0.6;
  const at = vertical ? { x: place + (late ? -5 : 5), y: inside.y + 12 } : { x: inside.x + inside.width - 4, y: place + (place < inside.y + 14 ? 12 : -4) };
  layer.append(svg("text", { ...at, class: "marktext", "text-anchor": vertical && !late ? "start" : "end" }, mark.label || ""));
}

function drawSeries(layer, series, { X, Y, drawn, bottom }) {
  const places = series.x.map((x, i) => [X(x), series.y[i] === null ? NaN : Y(series.y[i]), i]);
  const shown = places.filter(([x, y]) => Number.isFinite(x) && Number.isFinite(y));
  const group = svg("g", { class: `series ${series.mode || "line"}` });
  // of its interval; a low end of 0 has no place on a log scale
  const ends = (i) => (series.low && series.low[i] !== null && series.high[i] !== null ? [Y(series.high[i]), Number.isFinite(Y(series.low[i])) ? Y(series.low[i]) : bottom] : null);
  for (const [x, , i] of shown) {
    const bar = ends(i);
    if (bar) group.append(svg("line", { x1: x, x2: x, y1: bar[1], y2: bar[0], class: "bar", stroke: colorOf(series, i), "stroke-width": 1.2, opacity: 0.7 }));
  }
  if (series.mode === "points") {
    for (const [x, y, i] of shown) {
      const shape = series.tick
        ? svg("line", { x1: x - 4, x2: x + 4, y1: y, y2: y, stroke: colorOf(series, i), "stroke-width": 1.6 })
        : svg("circle", { cx: x, cy: y, r: series.radius || 3.5, fill: colorOf(series, i), opacity: series.faint ? 0.45 : 0.9 });
      if (series.links) shape.classList.add("link");
      group.append(shape);
    }
  } else {
    let path = "", pen = false;
    for (const [x, y] of places) {
      const here = Number.isFinite(x) && Number.isFinite(y);
      if (here) path += `${pen ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
      pen = here;
    }
    const lonely = shown.filter(([, , i]) => ![i - 1, i + 1].some((j) => places[j] && Number.isFinite(places[j][0]) && Number.isFinite(places[j][1])));
    for (const [x, y] of lonely) group.append(svg("circle", { cx: x, cy: y, r: 3, fill: colorOf(series) }));
    group.append(svg("path", { d: path, fill: "none", stroke: colorOf(series), "stroke-width": series.thick || 1.8,
      "stroke-dasharray": DASH[series.dash], opacity: series.faint ? 0.45 : 1 }));
  }
  if (!series.silent) drawn.push({ series, places: shown.map(([x, y, i]) => ({ x, y, i })) });
  layer.append(group);
}
