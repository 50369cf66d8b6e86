"use strict";
// Tables: sort by any column (numbers as numbers, missing values last), filter by words, show all rows.
for (const block of document.querySelectorAll(".block.table")) {
  const body = block.querySelector("tbody");
  if (!body) continue;
  let table = null, order = null, all = false, sorted = -1, descending = false, words = [], lit = () => false, named = -1, address = "";
  const count = block.querySelector("[data-count]"), more = block.querySelector("[data-all]");

  const load = () => {
    if (table) return;
    table = tracekit.data(block);
    table.size = table.columns.length ? table.columns[0].values.length : 0;
    for (const column of table.columns) column.format = formatter(column);
    order = [...Array(table.size).keys()];
  };

  function formatter(column) {
    if (column.kind === "bytes") return bytes;
    if (column.kind === "share") return (value) => (value * 100).toFixed(1) + "%";
    if (column.kind === "text") return String;
    const digits = { minimumFractionDigits: column.digits, maximumFractionDigits: column.digits, useGrouping: column.grouped };
    const number = new Intl.NumberFormat("en-US", digits);
    return (value) => number.format(value);
  }

  function bytes(value) {
    for (const [unit, scale] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
      if (Math.abs(value) >= scale) return Number((value / scale).toPrecision(3)) + " " + unit;
    }
    return value + " B";
  }

  const compare = (column) => (a, b) => {
    const left = column.values[a], right = column.values[b];
    if (left === null || right === null) return (left === null) - (right === null) || a - b;
    const by = column.kind === "text" ? left.localeCompare(right, "en", { numeric: true }) : left - right;
    return (descending ? -by : by) || a - b;
  };

  const kept = (row) => words.every((word) => table.columns.some((column) => {
    const value = column.values[row];
    return value !== null && column.format(value).toLowerCase().includes(word);
  }));

  function cell(column, value) {
    const element = document.createElement("td");
    element.className = column.kind !== "text" ? "num" : column.long ? "long" : "";
    if (value === null) {
      element.classList.add("none");
      element.title = column.missing;
      element.textContent = "–";
    } else if (column.kind === "text") {
      const name = document.createElement("bdi");
      tracekit.setText(name, value);
      element.append(name);
    } else {
      element.textContent = column.format(value);
    }
    return element;
  }

  // The addresses of rows: what names them, as cells.py has it.
  function slugs() {
    const seen = new Map();
    return [...Array(table.size).keys()].map((row) => {
      const words = table.naming.map((index) => {
        const value = table.columns[index].values[row];
        return value === null ? "" : String(value).toLowerCase().replace(/[^a-z0-9_]+/g, "-").slice(0, 60).replace(/^-+|-+$/g, "");
      });
      const own = words.join("."), alike = (seen.get(own) ?? 0) + 1;
      seen.set(own, alike);
      return alike > 1 ? own + ".~" + alike : own;
    });
  }

  function draw() {
    load();
    const rows = words.length ? order.filter(kept) : order;
    const shown = all ? rows : rows.slice(0, table.first);
    body.replaceChildren(...shown.map((row) => {
      const line = document.createElement("tr");
      line.classList.toggle("lit", lit(row));
      if (row === named) line.id = address;
      line.append(...table.columns.map((column) => cell(column, column.values[row])));
      return line;
    }));
    const part = shown.length < rows.length ? shown.length + " of " : "";
    count.textContent = part + rows.length + (rows.length === 1 ? " row" : " rows") + (words.length ? (rows.length === 1 ? " that matches, " : " that match, ") + table.size + " in all" : "");
    if (more) { more.hidden = rows.length <= table.first; more.textContent = all ? "Show fewer" : "Show all " + rows.length; }
  }

  // A link to one row: it is shown, whatever was looked for or sorted before, and marked.
  document.addEventListener("tracekit:row", (event) => {
    if (!event.detail.id.startsWith(block.id + ".")) return;
    load();
    const row = slugs().indexOf(event.detail.id.slice(block.id.length + 1));
    if (row < 0) return;
    const filter = block.querySelector("[data-filter]");
    if (words.length && !kept(row)) { words = []; filter.value = ""; }
    named = row;
    address = event.detail.id;
    lit = (each) => each === row;
    if ((words.length ? order.filter(kept) : order).indexOf(row) >= table.first) all = true;
    draw();
  });

  // A link to this chapter that is about one rank: its rows are shown and marked.
  document.addEventListener("tracekit:rank", (event) => {
    if (block.closest("section")?.id !== event.detail.id) return;
    load();
    const column = table.columns.find((each) => each.title === "Rank");
    if (!column) return;
    lit = (row) => column.values[row] === event.detail.rank;
    if (order.findIndex(lit) >= table.first) all = true;
    draw();
  });

  // "0-7, 12, 16-28:4" as a question: is a rank among them?
  const among = (text, rank) => String(text).split(/[^\d:-]+/).some((part) => {
    const range = /^(\d+)(?:-(\d+)(?::(\d+))?)?$/.exec(part);
    if (!range) return false;
    const low = Number(range[1]), high = Number(range[2] ?? low), stride = Number(range[3] ?? 1) || 1;
    return rank >= low && rank <= high && (rank - low) % stride === 0;
  });

  // The rows of one rank, or of the groups it is in, for the panel of that rank.
  document.addEventListener("tracekit:panel", (event) => {
    if (block.closest("#coverage")) return;
    load();
    const { rank, into } = event.detail, own = table.columns.find((each) => each.title === "Rank");
    const groups = own ? null : table.columns.find((each) => each.title === "Ranks" && each.kind === "text");
    if (!own && !groups) return;
    const has = (row) => (own ? own.values[row] === rank : groups.values[row] !== null && among(groups.values[row], rank));
    const rows = [...Array(table.size).keys()].filter(has);
    if (!rows.length) return;
    const title = document.createElement("h3"), link = document.createElement("a"), frame = document.createElement("div");
    link.href = "#" + block.id;
    const chapter = block.closest("section").querySelector("h2").textContent, name = block.querySelector("figcaption h3").textContent;
    tracekit.setText(link, chapter === name ? name : chapter + ": " + name.toLowerCase());
    title.append(link);
    const grid = document.createElement("table"), head = document.createElement("tr"), lines = document.createElement("tbody");
    const columns = table.columns.filter((each) => each !== own);
    for (const column of columns) {
      const heading = document.createElement("th"), words = document.createElement("span");
      heading.scope = "col";
      words.className = "head";
      if (column.kind !== "text") heading.className = "num";
      tracekit.setText(words, column.title);
      heading.append(words);
      head.append(heading);
    }
    for (const row of rows.slice(0, 12)) {
      const line = document.createElement("tr");
      line.append(...columns.map((column) => cell(column, column.values[row])));
      lines.append(line);
    }
    const top = document.createElement("thead");
    top.append(head);
    grid.append(top, lines);
    frame.className = "scroll";
    frame.tabIndex = 0;
    frame.setAttribute("role", "region");
    frame.setAttribute("aria-label", title.textContent + ", rank " + rank);
    frame.append(grid);
    into.append(title, frame);
    if (rows.length > 12) {
      const rest = document.createElement("p");
      rest.className = "more";
      rest.textContent = `12 of ${rows.length} rows`;
      into.append(rest);
    }
  });

  for (const button of block.querySelectorAll("[data-sort]")) {
    button.addEventListener("click", () => {
      load();
      const index = Number(button.dataset.sort), column = table.columns[index];
      descending = sorted === index ? !descending : column.kind !== "text";
      sorted = index;
      order.sort(compare(column));
      for (const head of block.querySelectorAll("th")) head.removeAttribute("aria-sort");
      button.closest("th").setAttribute("aria-sort", descending ? "descending" : "ascending");
      draw();
    });
  }
  block.querySelector("[data-filter]")?.addEventListener("input", (event) => {
    words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
    draw();
  });
  // Long names are cut after three lines; a click shows the rest (unless it ends a selection).
  body.addEventListener("click", (event) => {
    if (getSelection().isCollapsed) event.target.closest("td.long bdi")?.classList.toggle("whole");
  });
  more?.addEventListener("click", () => { all = !all; draw(); });
}
