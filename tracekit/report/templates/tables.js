"use strict";
// Tables: sort by any column (numbers as numbers, missing values last), filter by words, show all rows.
for (const block of document.querySelectorAll(".block.table")) {
  const body = block.querySelector("tbody");
  if (!body) continue;
  let table = null, order = null, all = false, sorted = -1, descending = false, words = [], lit = () => false;
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

  function draw() {
    load();
    const rows = words.length ? order.filter(kept) : order;
    const shown = all ? rows : rows.slice(0, table.first);
    body.replaceChildren(...shown.map((row) => {
      const line = document.createElement("tr");
      line.classList.toggle("lit", lit(row));
      line.append(...table.columns.map((column) => cell(column, column.values[row])));
      return line;
    }));
    const part = shown.length < rows.length ? shown.length + " of " : "";
    count.textContent = part + rows.length + (rows.length === 1 ? " row" : " rows") + (words.length ? (rows.length === 1 ? " that matches, " : " that match, ") + table.size + " in all" : "");
    if (more) { more.hidden = rows.length <= table.first; more.textContent = all ? "Show fewer" : "Show all " + rows.length; }
  }

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
