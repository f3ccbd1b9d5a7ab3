"use strict";
// Elements are made with textContent alone: no text of a run is ever read as markup.

const SVG = "http://www.w3.org/2000/svg";

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  return fill(node, attributes, children);
}

function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) if (child !== null && child !== undefined) node.append(child);
  return node;
}

// Text from outside, kept apart from the direction of what stands around it.
function outside(text) {
  return el("bdi", {}, String(text));
}

const SUPERSCRIPT = "⁰¹²³⁴⁵⁶⁷⁸⁹";

function power(exponent) {
  const digits = String(Math.abs(exponent)).replace(/\d/g, (digit) => SUPERSCRIPT[digit]);
  return (exponent < 0 ? "10⁻" : "10") + digits;
}

function trimmed(text) {
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

// 16,384; the browser's own way is ten times slower, which a thousand cells feel.
function grouped(whole) {
  return String(whole).replace("-", "−").replace(/\B(?=(\d{3})+$)/g, ",");
}

// A number as people write it: 0.043, 1.27, 16,384, 3.1×10⁹.
function written(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (Number.isInteger(value) && size < 1e7) return grouped(value);
  if (size >= 1e7 || size < 1e-4) {
    const [mantissa, exponent] = value.toExponential(digits - 1).split("e");
    return `${trimmed(mantissa)}×${power(Number(exponent))}`.replace("-", "−");
  }
  if (size >= 10 ** digits) return grouped(Math.round(value));
  return trimmed(value.toPrecision(digits)).replace("-", "−");
}

// Four characters at most, for the cells of a map.
function brief(value) {
  if (value === null || Number.isNaN(value)) return "";
  const size = Math.abs(value);
  if (size >= 9.95e5) return size >= 1e9 ? power(Math.round(Math.log10(size))) : `${trimmed((value / 1e6).toPrecision(2))}M`;
  if (size >= 1e4) return `${Math.round(value / 1e3)}k`;
  if (size >= 995) return `${(value / 1e3).toFixed(1)}k`;
  if (size >= 10) return String(Math.round(value));
  return trimmed(value.toPrecision(2)).replace("-", "−").replace(/^0\./, ".");
}

function percent(value) {
  if (value === null || value === undefined) return "–";
  const share = 100 * value;
  return `${Math.abs(share) >= 10 ? Math.round(share) : trimmed(share.toPrecision(2))} %`;
}

function finite(values) {
  return values.filter((value) => typeof value === "number" && Number.isFinite(value));
}

// Infinity counts: what was never reached stands above everything.
function median(values) {
  const sorted = values.filter((value) => typeof value === "number").sort((a, b) => a - b);
  if (!sorted.length) return null;
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

// One colour scale for everything ordered (cividis: also for colour-blind readers, also in grey).
function shade(share) {
  const stops = DATA.scale;
  const place = Math.min(1, Math.max(0, share)) * (stops.length - 1);
  const low = Math.min(stops.length - 2, Math.floor(place));
  const mix = stops[low].map((value, i) => Math.round(value + (place - low) * (stops[low + 1][i] - value)));
  return { css: `rgb(${mix.join(",")})`, dark: 0.299 * mix[0] + 0.587 * mix[1] + 0.114 * mix[2] < 140 };
}

// Buttons of which one is pressed.
function choice(label, options, chosen, onchoose) {
  const buttons = options.map(([value, text]) =>
    el("button", { type: "button", "data-value": value, "aria-pressed": String(value === chosen), onclick: () => choose(value) }, text));
  function choose(value) {
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.value === String(value)));
    onchoose(value);
  }
  return el("div", { class: "choice", role: "group", "aria-label": label }, el("span", { class: "label" }, label), buttons);
}

function menu(label, options, chosen, onchoose) {
  const select = el("select", { onchange: () => onchoose(select.value) },
    options.map(([value, text]) => el("option", { value, selected: value === chosen }, text)));
  return el("label", { class: "choice" }, el("span", { class: "label" }, label), select);
}

function section(id, title, ...content) {
  return el("section", { id }, el("h2", {}, title), ...content);
}

// Of letters that every file system takes; a part that is missing is left out.
function fileName(ending, ...parts) {
  const plain = parts.filter(Boolean).map((part) => String(part).replace(/[^A-Za-z0-9._-]+/g, "_").slice(0, 60));
  return `esscher-${plain.join("-")}.${ending}`;
}

function download(name, content, type) {
  const address = URL.createObjectURL(new Blob([content], { type }));
  const link = el("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}
