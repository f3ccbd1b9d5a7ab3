// Any figure of the page as a file: its pictures and its words laid out in one SVG as they stand on the page, or that as PNG.

const KEPT = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-size", "font-weight", "font-family", "text-anchor"];
const SHARPER = 3; // pixels of a PNG for one of the page
const ROOM = 8; // around the figure
const UNSAVED = ".tools, .tip, .screen, [hidden], [aria-pressed='false'], .here, .zoombox";

function toolsOf(figure, others = []) {
  const save = (kind, make) => el("button", { type: "button", class: kind, title: `save this figure as ${kind.toUpperCase()}`,
    onclick: () => make(pictureOf(figure), pictureName(figure, kind)) }, kind.toUpperCase());
  return el("div", { class: "tools" }, others, save("svg", saveSvg), save("png", savePng));
}

// Which run, which part of the page, which figure.
function pictureName(figure, ending) {
  const part = figure.closest("section"), run = figure.closest("#content");
  return fileName(ending, run ? DATA.runs[Number(run.dataset.run)].name : "side_by_side", part.dataset.head || part.id, figure.dataset.title);
}

// On white whatever the page's colours are: it goes into a paper.
function pictureOf(figure) {
  const root = document.documentElement, theme = root.dataset.theme;
  root.dataset.theme = "light";
  const box = figure.getBoundingClientRect(), nodes = [...marksOf(figure, box), ...wordsIn(figure, box)];
  const style = getComputedStyle(document.body), back = style.backgroundColor, font = style.fontFamily;
  if (theme === undefined) delete root.dataset.theme; else root.dataset.theme = theme;
  const [width, height] = ["right", "bottom"].map((end) => Math.ceil(Math.max(...nodes.map((node) => node[end]))) + 2 * ROOM);
  return svg("svg", { xmlns: SVG, width, height, viewBox: `${-ROOM} ${-ROOM} ${width} ${height}`, "font-family": font },
    svg("title", {}, legal(figure.dataset.title || "")), svg("rect", { x: -ROOM, y: -ROOM, width, height, fill: back }), nodes.map(({ node }) => node));
}

// The pictures of a figure, and bars of colour, where they stand.
function marksOf(figure, box) {
  const found = [];
  for (const node of figure.querySelectorAll("svg, .bar, .bar i")) {
    const place = node.getBoundingClientRect();
    if (node.closest(UNSAVED) || !place.width) continue;
    const at = { x: place.left - box.left, y: place.top - box.top, width: place.width, height: place.height };
    const copy = node.tagName === "svg" ? fill(plainCopy(node), at, []) : svg("rect", { ...at, rx: 3, fill: getComputedStyle(node).backgroundColor });
    found.push({ node: copy, right: at.x + at.width, bottom: at.y + at.height });
  }
  return found;
}

// A copy that needs no style sheet.
function plainCopy(node) {
  const copy = node.cloneNode(false);
  copy.removeAttribute("class");
  copy.removeAttribute("style");
  const style = getComputedStyle(node);
  for (const name of KEPT) if (style.getPropertyValue(name)) copy.setAttribute(name, style.getPropertyValue(name).replaceAll('"', "'"));
  for (const child of node.childNodes) {
    if (child.nodeType === Node.TEXT_NODE) copy.append(legal(child.data));
    else if (!child.matches(UNSAVED)) copy.append(plainCopy(child));
  }
  return copy;
}

// Every line of every text outside the pictures, where it stands.
function wordsIn(figure, box) {
  const walker = document.createTreeWalker(figure, NodeFilter.SHOW_TEXT), found = [], range = document.createRange();
  while (walker.nextNode()) {
    const text = walker.currentNode, parent = text.parentElement;
    if (parent.closest("svg") || parent.closest(UNSAVED)) continue;
    const style = getComputedStyle(parent), lines = [];
    for (const { 0: word, index } of text.data.matchAll(/\S+\s*/g)) {
      range.setStart(text, index);
      range.setEnd(text, index + word.trimEnd().length);
      const place = range.getBoundingClientRect(), last = lines[lines.length - 1];
      if (!place.width) continue;
      if (last && Math.abs(last.place.top - place.top) < 3) Object.assign(last, { text: last.text + word, right: place.right });
      else lines.push({ text: word, place, right: place.right });
    }
    for (const { text: line, place, right } of lines) {
      const node = svg("text", { x: place.left - box.left, y: place.bottom - box.top - 0.28 * place.height, fill: style.color, "font-size": style.fontSize, "font-weight": style.fontWeight }, legal(line.trimEnd()));
      found.push({ node, right: right - box.left, bottom: place.bottom - box.top });
    }
  }
  return found;
}

// Text without what XML has no way to write.
function legal(text) {
  return text.toWellFormed().replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/g, "\ufffd");
}

function saveSvg(picture, name) {
  download(name, new XMLSerializer().serializeToString(picture), "image/svg+xml");
}

function savePng(picture, name) {
  const image = new Image(), [width, height] = ["width", "height"].map((side) => Number(picture.getAttribute(side)));
  image.addEventListener("load", () => {
    const canvas = el("canvas", { width: SHARPER * width, height: SHARPER * height });
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    canvas.toBlob((data) => download(name, data, "image/png"), "image/png");
  });
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(new XMLSerializer().serializeToString(picture))}`;
}
