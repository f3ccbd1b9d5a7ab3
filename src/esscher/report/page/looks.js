// Which tokens a head looks at: the heaviest keys of some queries, in their text.

// Text of a model's tokens as it can be seen: control characters by their pictures, a space alone as an open box.
function seenText(text) {
  const drawn = text.replace(/[\u0000-\u001f]/g, (sign) => String.fromCharCode(0x2400 + sign.charCodeAt(0))).replaceAll("\u007f", "\u2421");
  return /^ +$/.test(drawn) ? drawn.replaceAll(" ", "\u2423") : drawn;
}

function quoted([before, token, after]) {
  return el("span", { class: "quoted" }, el("span", { class: "soft" }, outside(seenText(before))), " ", el("mark", {}, outside(seenText(token))), " ", el("span", { class: "soft" }, outside(seenText(after))));
}

function looksOf(atlas, i) {
  const stored = (atlas.looks || [])[i];
  if (!stored) return null;
  const away = (distance) => (distance === 0 ? "itself" : distance > 0 ? `${grouped(distance)} before` : `${grouped(-distance)} after`);
  const parts = stored.map(([asks, keys]) => {
    const rows = keys.map(([place, weight, distance]) => {
      const bar = el("span", { class: "bar" }, el("i", {}));
      bar.firstChild.style.width = `${100 * Math.min(1, weight)}%`;
      return el("li", {}, el("span", { class: "amount" }, percent(weight)), bar, quoted(atlas.looks_texts[place]), el("span", { class: "soft away" }, away(distance)));
    });
    return el("div", { class: "asks" }, el("div", {}, el("span", { class: "label" }, "from "), quoted(atlas.looks_texts[asks])), el("ol", {}, rows));
  });
  return el("details", { class: "looks", open: true }, el("summary", {}, "Which tokens it looks at"),
    el("p", { class: "soft" }, "The heaviest keys of some queries as the model runs, in the query's own window: share of the attention, the token in its text, how many tokens away."),
    el("div", { class: "twocol even" }, parts));
}
