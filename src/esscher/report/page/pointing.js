// A reader and a chart: values under the pointer or by arrow keys, and a closer look by dragging, keys or buttons.

const NEAR = 30; // pixels from the pointer to what it asks for
const BESIDE = 7; // what lies so close to the pointer is told as well
const TOLD = 4; // at most so many at once
const DRAG = 8; // a shorter way is a click

// Where a series is nearest to a place: at a point, on its interval, or between two points of a line.
function nearestOf({ series, places }, x, y) {
  let best = null;
  const offer = (place, far) => { if (!best || far < best.far) best = { series, far, ...place }; };
  places.forEach((place, j) => {
    const up = place.ends && place.ends[0] < y && y < place.ends[1] ? 0 : y - place.y;
    offer(place, Math.hypot(place.x - x, up));
    const next = places[j + 1];
    if ((series.mode || "line") !== "line" || !next || next.i !== place.i + 1) return;
    const [dx, dy] = [next.x - place.x, next.y - place.y], long = dx * dx + dy * dy;
    const share = long ? ((x - place.x) * dx + (y - place.y) * dy) / long : 0;
    if (share <= 0 || share >= 1) return;
    const between = { x: place.x + share * dx, y: place.y + share * dy, i: null };
    if (Math.min(share, 1 - share) * Math.sqrt(long) > 5) offer(between, Math.hypot(between.x - x, between.y - y));
  });
  return best;
}

// The nearest first, then those as good as under the pointer; points before lines, which can be read elsewhere too.
function nearest(view, x, y) {
  const [left, top] = [view.inside.x - DRAG, view.inside.y - DRAG], { width, height } = view.inside;
  const shown = (hit) => hit.x >= left && hit.x <= left + width + 2 * DRAG && hit.y >= top && hit.y <= top + height + 2 * DRAG;
  const found = view.drawn.map((drawn) => nearestOf(drawn, x, y)).filter((hit) => hit && hit.far <= NEAR && shown(hit));
  const order = (hit) => hit.far - (hit.series.mode === "points" ? BESIDE : 0);
  found.sort((a, b) => order(a) - order(b));
  return found.filter((hit, j) => j === 0 || hit.far <= BESIDE).slice(0, TOLD);
}

function tell(chart, hits) {
  const { spec, plot, tip, view } = chart;
  view.picture.querySelectorAll(".here").forEach((ring) => ring.remove());
  tip.hidden = !hits.length;
  if (!hits.length) return;
  const parts = hits.map(({ series, i, x, y }) => {
    const [at, value] = i === null ? [view.x(x), view.y(y)] : [series.x[i], series.y[i]];
    const lines = [series.names && i !== null ? series.names[i] : series.label, `${spec.x.label}: ${written(at, 4)}`, `${spec.y.label}: ${written(value, 4)}`];
    if (i !== null && series.low && series.low[i] !== null) lines.push(`interval ${written(series.low[i])} to ${written(series.high[i])}`);
    return el("div", {}, lines.filter(Boolean).map((line) => el("div", {}, outside(line))));
  });
  tip.replaceChildren(...parts);
  const [{ x, y }] = hits;
  view.picture.append(svg("circle", { class: "here", cx: x, cy: y, r: 6 }));
  tip.style.left = `${Math.max(0, Math.min(x + 12, plot.clientWidth - tip.offsetWidth - 4))}px`;
  tip.style.top = `${Math.max(0, y - tip.offsetHeight - 10)}px`;
}

// A pointer's place in the units of the picture.
function placeOf(chart, event) {
  const box = chart.view.picture.getBoundingClientRect(), zoom = chart.view.picture.viewBox.baseVal.width / box.width;
  return [(event.clientX - box.left) * zoom, (event.clientY - box.top) * zoom];
}

function readValues(chart) {
  const { plot } = chart, read = (event) => { if (chart.view) tell(chart, nearest(chart.view, ...placeOf(chart, event))); };
  plot.addEventListener("pointermove", read);
  plot.addEventListener("pointerdown", read); // a finger does not hover
  plot.addEventListener("pointerleave", () => { if (chart.view) tell(chart, []); });
  plot.addEventListener("click", (event) => {
    if (!chart.view || chart.dragged) return;
    const hit = nearest(chart.view, ...placeOf(chart, event)).find(({ series, i }) => series.links && i !== null);
    if (hit) location.hash = hit.series.links[hit.i];
  });
}

// With a mouse alone: a finger that moves scrolls the page, and has the buttons.
function dragToZoom(chart, zoomed) {
  const { plot } = chart;
  let start = null, box = null;
  const within = ([x, y]) => {
    const { inside } = chart.view;
    return [Math.min(Math.max(x, inside.x), inside.x + inside.width), Math.min(Math.max(y, inside.y), inside.y + inside.height)];
  };
  // A way along one axis keeps the range of the other.
  const frame = (end) => {
    const { inside } = chart.view, [wide, high] = [Math.abs(end[0] - start[0]) >= DRAG, Math.abs(end[1] - start[1]) >= DRAG];
    return { x: wide ? Math.min(start[0], end[0]) : inside.x, width: wide ? Math.abs(end[0] - start[0]) : inside.width,
      y: high ? Math.min(start[1], end[1]) : inside.y, height: high ? Math.abs(end[1] - start[1]) : inside.height, dragged: wide || high };
  };
  plot.addEventListener("pointerdown", (event) => {
    chart.dragged = false;
    if (event.pointerType !== "mouse" || event.button !== 0 || !chart.view) return;
    start = within(placeOf(chart, event));
    plot.setPointerCapture(event.pointerId);
  });
  plot.addEventListener("mousedown", (event) => event.preventDefault()); // nothing is selected, and keys stay where they are
  plot.addEventListener("pointermove", (event) => {
    if (!start) return;
    const { dragged, ...place } = frame(within(placeOf(chart, event)));
    if (box) box.remove();
    box = dragged ? svg("rect", { class: "zoombox", ...place }) : null;
    if (box) chart.view.picture.append(box);
  });
  plot.addEventListener("pointerup", (event) => {
    if (!start) return;
    const { dragged, ...place } = frame(within(placeOf(chart, event)));
    start = null;
    if (box) box.remove();
    box = null;
    chart.dragged = dragged;
    if (dragged) zoomed(rangesOf(chart, place));
  });
  plot.addEventListener("pointercancel", () => { start = null; if (box) box.remove(); });
  plot.addEventListener("dblclick", () => zoomed(null));
}

function rangesOf({ view }, { x, y, width, height }) {
  return { x: [view.x(x), view.x(x + width)], y: [view.y(y + height), view.y(y)] };
}

// What is shown, stretched about its middle and moved by shares of itself, but never past the whole; null: all of it.
function moved(chart, stretch, right = 0, up = 0) {
  const { spec, view } = chart, { x, y, width, height } = view.inside;
  const place = { width: width * stretch, height: height * stretch, x: x + width * ((1 - stretch) / 2 + right), y: y + height * ((1 - stretch) / 2 - up) };
  const ranges = rangesOf(chart, place);
  let all = true;
  for (const axis of ["x", "y"]) {
    const whole = wholeExtent(spec, axis), [low, high] = ranges[axis];
    if (stretch === 1 && (low < whole[0] || high > whole[1])) ranges[axis] = spec.zoom ? spec.zoom[axis] : whole;
    else ranges[axis] = [Math.max(low, whole[0]), Math.min(high, whole[1])];
    all = all && ranges[axis][0] <= whole[0] && ranges[axis][1] >= whole[1];
  }
  return all ? null : ranges;
}

const CLOSER = 2 / 3;

function zoomTools(chart, zoomed) {
  const tool = (text, title, act) => el("button", { type: "button", title, "aria-label": title, onclick: () => { if (chart.view) zoomed(act()); } }, text);
  return [tool("+", "zoom in; or drag over a part", () => moved(chart, CLOSER)), tool("−", "zoom out", () => moved(chart, 1 / CLOSER)),
    tool("all", "show all; or click twice", () => null)];
}

// Arrow keys read the values of a curve and go to the next one; with Shift they move what is shown.
function steerWithKeys(chart, zoomed) {
  let at = [0, -1];
  const read = (right, down) => {
    const { drawn } = chart.view;
    if (!drawn.length) return;
    const line = (at[0] + down + drawn.length) % drawn.length, { series, places } = drawn[line];
    at = [line, Math.min(places.length - 1, Math.max(0, at[1] + right))];
    if (places.length) tell(chart, [{ series, ...places[at[1]] }]);
  };
  const arrows = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  chart.plot.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target !== chart.plot || !chart.view) return;
    const arrow = arrows[event.key], busy = chart.spec.zoom || !chart.tip.hidden;
    if (arrow && event.shiftKey) zoomed(chart.spec.zoom ? moved(chart, 1, 0.15 * arrow[0], -0.15 * arrow[1]) : null);
    else if (arrow) read(...arrow);
    else if (event.key === "+" || event.key === "=") zoomed(moved(chart, CLOSER));
    else if (event.key === "-") zoomed(moved(chart, 1 / CLOSER));
    else if (event.key === "0" || (event.key === "Escape" && busy)) zoomed(null);
    else return;
    event.preventDefault();
    event.stopPropagation(); // the page's own arrow keys go to other heads
  });
}
