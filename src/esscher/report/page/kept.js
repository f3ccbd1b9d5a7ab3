// What a compression kept: a prompt with its tokens coloured by how many heads keep them, and the kinds of tokens.

function keptOf(view) {
  const kept = view.kept;
  if (!kept || !kept.tokens.length) return null;
  const layers = kept.heads.map((_, i) => i), all = "all";
  let size = 0, layer = all;
  const text = el("div", { class: "kepttext", tabindex: "0", role: "region", "aria-label": "prompt" }), shares = el("div", { class: "scroll" });
  const spans = kept.tokens.map((token) => outside(/^ +$/.test(token) ? token : token.replace(/[\u0000-\u0008\u000b-\u001f\u007f]/g, "\ufffd")));
  text.append(...spans);
  function show() {
    const own = kept.sizes[size], chosen = layer === all ? layers : [Number(layer)];
    const most = chosen.reduce((sum, i) => sum + kept.heads[i], 0);
    spans.forEach((span, place) => {
      const count = chosen.reduce((sum, i) => sum + own.heads[i][place], 0), colour = shade(count / most);
      span.style.background = count ? colour.css : "";
      span.style.color = count ? (colour.dark ? "#fff" : "#000") : "";
      span.title = `kept by ${count} of ${most} heads`;
    });
    if (!own.kinds) return;
    const rows = own.kinds.map((kind, i) => el("tr", {}, el("td", {}, outside(kind)),
      el("td", { class: "number" }, percent(own.kept_share[i])), el("td", { class: "number" }, percent(own.held_share[i]))));
    shares.replaceChildren(el("table", {}, el("thead", {}, el("tr", {}, ["kind of token", "of kept keys", "of all keys"].map((name) => el("th", {}, name)))), el("tbody", {}, rows)));
  }
  const controls = el("div", { class: "controls" },
    kept.sizes.length > 1 ? choice("kept", kept.sizes.map(({ keep }, i) => [i, percent(keep)]), size, (i) => { size = i; show(); }) : null,
    menu("layer", [[all, "all layers"], ...layers.map((i) => [String(i), String(kept.layers[i])])], layer, (i) => { layer = i; show(); }));
  show();
  const cut = kept.total > kept.tokens.length ? ` Shown: the first ${grouped(kept.tokens.length)} of ${grouped(kept.total)} tokens.` : "";
  return section("kept", "What was kept", el("p", {}, "The first prompt under ", outside(kept.rule), " (", outside(kept.split), `). Tokens without colour: no head keeps them. The brighter a token, the more key-value heads keep it.${kept.sizes[0].kinds ? " The table is over all prompts and layers." : ""}${cut}`), controls, text, shares);
}
