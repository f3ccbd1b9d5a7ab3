// Put the page together, and let the address and the keys move between heads.

const DATA = JSON.parse(document.getElementById("data").textContent);

function build() {
  const main = document.getElementById("main"), intros = [...main.querySelectorAll(".intro")];
  const views = DATA.runs.map((run, number) => (run.kind === "atlas" ? new Atlas(run, number) : { ...run, number }));
  const atlases = views.filter((view) => view instanceof Atlas && view.count);
  const state = { current: 0 };
  const content = el("div", { id: "content" });
  const compared = compareOf(atlases);
  const built = views.map(() => null);
  function contentOf(view) {
    const parts = view instanceof Atlas ? atlasParts(view) : chartParts(view);
    return parts.filter(Boolean);
  }
  function showRun(number) {
    state.current = number;
    intros.forEach((intro, i) => { intro.hidden = i !== number && views.length > 1; });
    if (!built[number]) built[number] = contentOf(views[number]);
    content.dataset.run = number;
    content.replaceChildren(...built[number]);
    document.querySelectorAll("#runs button").forEach((button, i) => button.setAttribute("aria-pressed", String(i === number)));
    navigation(content, compared);
  }
  if (views.length > 1) {
    const runs = choice("run", views.map((view, i) => [i, `${i + 1}. ${view.name}`]), 0, (number) => { showRun(number); history.replaceState(null, "", "#map"); });
    runs.id = "runs";
    main.prepend(runs);
  }
  if (compared) main.append(compared);
  main.append(content);
  showRun(0);
  follow(views, state, showRun);
}

function atlasParts(atlas) {
  if (!atlas.count) return [section("map", "Map of heads", el("p", { class: "soft" }, "No head was measured, so there is no map."))];
  const parts = atlas.percents.length || atlas.metrics().length ? [overviewOf(atlas)] : [];
  if (atlas.losses) parts.unshift(section("losses", "How small can the cache be", mountChart(atlas.losses)));
  const table = section("table", "All heads", dataTable({ columns: atlas.columns, rows: atlas.rows, total: atlas.count,
    file: fileName("csv", atlas.name, "heads"), link: (i) => atlas.hash_of(i) }));
  return [...parts, keptOf(atlas), headView(atlas), rulesOf(atlas), scatterOf(atlas), scalesOf(atlas), layersOf(atlas), table];
}

function chartParts(view) {
  const pictures = (id, title, charts) => (charts.length ? section(id, title, el("div", { class: "twocol even" }, charts.map(mountChart))) : null);
  const kept = keptOf(view), first = kept ? 2 : view.charts.length; // the text stands below the first pictures
  const tables = view.tables.map((table, i) => section(`table${i || ""}`, `Stored table “${table.name}”`,
    dataTable({ columns: table.columns, rows: table.rows, total: table.count, file: fileName("csv", view.name, table.name), link: null })));
  return [pictures("charts", "Pictures", view.charts.slice(0, first)), kept, pictures("more", "More pictures", view.charts.slice(first)), ...tables];
}

function navigation(content, compared) {
  const links = [...(compared ? [compared] : []), ...content.querySelectorAll("section[id]:not(#head)")].map((part) =>
    el("a", { href: `#${part.id}` }, part.querySelector("h2").textContent));
  document.getElementById("nav").replaceChildren(...links, themeButton());
}

function themeButton() {
  const root = document.documentElement;
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  const button = el("button", { type: "button", id: "theme", "aria-label": "switch between light and dark" });
  const name = () => { button.textContent = dark() ? "☀ light" : "☾ dark"; };
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; name(); });
  name();
  return button;
}

// #L3H5 is head 5 of layer 3 of the first run, #R2-L3H5 that of the second.
function follow(views, state, showRun) {
  function read() {
    const found = /^#(?:R(\d+)-)?(L-?\d+H-?\d+)$/.exec(location.hash);
    if (!found) {
      const view = views[state.current];
      if (view instanceof Atlas && view.open !== null && location.hash === "#map") view.set({ open: null });
      return;
    }
    const number = found[1] ? Number(found[1]) - 1 : 0, atlas = views[number];
    if (!(atlas instanceof Atlas) || !atlas.place.has(found[2])) return;
    if (state.current !== number) showRun(number);
    atlas.set({ open: atlas.place.get(found[2]) });
    const box = document.getElementById("head");
    const seen = box.getBoundingClientRect();
    box.focus({ preventScroll: true });
    if (seen.top < 0 || seen.top > innerHeight * 0.6) box.scrollIntoView({ block: "start" });
  }
  addEventListener("hashchange", read);
  addEventListener("keydown", (event) => {
    const box = document.getElementById("head");
    const mine = box && !box.hidden && (box.contains(document.activeElement) || document.activeElement === document.body);
    if (!mine || event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (event.key === "Escape") location.hash = "map";
    else if (moves[event.key]) step(views[state.current], ...moves[event.key]);
    else return;
    event.preventDefault();
  });
  read();
}

build();
