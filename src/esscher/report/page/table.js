// A table that sorts, filters and downloads itself. Rows come as columns: rows[key][i].

const PAGE = 100;
const FEW = 16;
const LONGEST = 1000; // characters of a cell

function dataTable({ columns, rows, total, file, link }) {
  const count = columns.length ? rows[columns[0].key].length : 0;
  const numeric = new Set(columns.map(({ key }) => key).filter((key) => finite(rows[key]).length));
  const state = { order: [...Array(count).keys()], key: null, down: false, shown: PAGE, all: columns.length <= FEW };
  const search = el("input", { type: "search", placeholder: link ? "filter: frozen  coupling>5  layer=3" : "filter: a word, or column>5", "aria-label": "filter rows", spellcheck: "false" });
  const told = el("span", { class: "soft" }), head = el("thead", {}), body = el("tbody", {});
  const more = el("button", { type: "button", onclick: () => { state.shown = count; show(); } });
  const wider = el("button", { type: "button", onclick: () => { state.all = !state.all; show(); } });
  const save = el("button", { type: "button", class: "csv", onclick: () => download(file, csvOf(columns, rows, state.order), "text/csv;charset=utf-8") }, "Download CSV");
  const visible = () => (state.all ? columns : columns.slice(0, FEW));
  function sortBy(key) {
    state.down = state.key === key ? !state.down : false;
    state.key = key;
    arrange();
  }
  function arrange() {
    const fits = filterOf(search.value, columns, rows, link);
    state.order = [...Array(count).keys()].filter(fits);
    if (state.key) {
      const column = rows[state.key], sign = state.down ? -1 : 1;
      state.order.sort((a, b) => compare(column[a], column[b], sign) || a - b);
    }
    state.shown = PAGE;
    show();
  }
  function show() {
    const keys = visible();
    head.replaceChildren(el("tr", {}, link ? el("td", {}) : null, keys.map(({ key, label, help }) => el("th", { scope: "col", title: help,
      "aria-sort": state.key === key ? (state.down ? "descending" : "ascending") : "none" },
      el("button", { type: "button", "data-key": key, onclick: () => sortBy(key) }, label, state.key === key ? (state.down ? " ▼" : " ▲") : "")))));
    body.replaceChildren(...state.order.slice(0, state.shown).map((i) => el("tr", {}, link ? el("td", {}, el("a", { href: `#${link(i)}` }, link(i))) : null, keys.map(({ key }) => {
      const value = rows[key][i];
      const text = typeof value === "string" ? outside(value.length > LONGEST ? `${value.slice(0, LONGEST)}…` : value) : written(value);
      const long = !numeric.has(key) && String(value).length > 40; // two lines of it until a click
      return el("td", long ? { class: "long", title: value, onclick: (event) => event.currentTarget.classList.toggle("open") } : { class: numeric.has(key) ? "number" : "brief" }, text);
    }))));
    told.textContent = `${grouped(state.order.length)} of ${grouped(count)} rows${total > count ? ` (the stored table has ${grouped(total)})` : ""}`;
    more.hidden = state.order.length <= state.shown;
    more.textContent = `Show all ${grouped(state.order.length)} rows`;
    wider.hidden = columns.length <= FEW;
    wider.textContent = state.all ? "Fewer columns" : `All ${columns.length} columns`;
  }
  let waiting = 0;
  search.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(arrange, 60); });
  const meanings = el("details", {}, el("summary", {}, "What the columns mean"),
    el("dl", {}, columns.map(({ label, help }) => [el("dt", {}, label), el("dd", {}, help)])));
  show();
  return el("div", { class: "datatable" }, el("div", { class: "controls" }, search, told, wider, save), el("div", { class: "scroll" }, el("table", {}, head, body)), more, meanings);
}

// Missing values come last in both directions.
function compare(a, b, sign) {
  const absent = (value) => value === null || value === "";
  if (absent(a) || absent(b)) return absent(a) - absent(b);
  return typeof a === "number" && typeof b === "number" ? sign * (a - b) : sign * String(a).localeCompare(String(b), "en", { numeric: true });
}

// Every word must be in some text of the row, or be a condition such as coupling>5 on one of its columns.
function filterOf(text, columns, rows, link) {
  const tests = text.trim().split(/\s+/).filter(Boolean).map((word) => {
    const condition = /^([A-Za-z0-9_]+)(<=|>=|<|>|=)(.+)$/.exec(word);
    const column = condition && columns.find(({ key }) => key === condition[1].toLowerCase());
    if (column) {
      const limit = Number(condition[3]), values = rows[column.key];
      if (condition[2] === "=") return (i) => (typeof values[i] === "number" ? values[i] === limit : String(values[i]).toLowerCase() === condition[3].toLowerCase());
      const holds = { "<": (v) => v < limit, ">": (v) => v > limit, "<=": (v) => v <= limit, ">=": (v) => v >= limit }[condition[2]];
      return (i) => values[i] !== null && holds(values[i]);
    }
    const low = word.toLowerCase();
    return (i) => (link && link(i).toLowerCase() === low) || columns.some(({ key }) => typeof rows[key][i] === "string" && rows[key][i].toLowerCase().includes(low));
  });
  return (i) => tests.every((test) => test(i));
}

function csvOf(columns, rows, order) {
  const cell = (value) => {
    if (value === null || value === undefined) return "";
    let text = String(value);
    if (typeof value === "string" && /^[=+\-@\t\r]/.test(text)) text = `'${text}`; // a spreadsheet would run it
    return /[",\n\r]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
  };
  const lines = [columns.map(({ key }) => cell(key)), ...order.map((i) => columns.map(({ key }) => cell(rows[key][i])))];
  return lines.map((line) => line.join(",")).join("\r\n") + "\r\n";
}
