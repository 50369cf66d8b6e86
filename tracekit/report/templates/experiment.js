"use strict";
// The step-by-step picture: one row a rank, a cell for each thing it holds, arrows for the messages of the step.
for (const block of document.querySelectorAll("[data-picture]")) {
  const { roles, moments } = tracekit.data(block);
  const part = (name) => block.querySelector("[data-" + name + "]");
  const slider = part("at"), where = part("where"), title = part("title"), text = part("text");
  const ranks = part("ranks"), arrows = part("arrows"), sent = part("messages");
  const button = (name) => block.querySelector("[data-go=" + name + "]");
  const peak = Math.max(1, ...moments.map((moment) => moment.ranks.reduce((most, rank) => Math.max(most, rank.live_bytes), 0)));
  const SHOWN_MESSAGES = 200, SHOWN_CELLS = 400, SECOND = 1200;
  let at = 0, timer = null;
  slider.max = moments.length - 1;

  const element = (name, className, words) => {
    const made = document.createElement(name);
    if (className) made.className = className;
    if (words !== undefined) tracekit.setText(made, words);
    return made;
  };
  const svg = (name, attributes) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };

  function bytes(value) {
    for (const [unit, scale] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
      if (value >= scale) return Number((value / scale).toPrecision(3)) + " " + unit;
    }
    return value + " B";
  }

  const known = (cell) => [cell.kind, cell.label, cell.detail, cell.bytes].join("\u0000");

  function cellOf(cell, isNew) {
    const made = element("div", "cell" + (isNew ? " new" : "") + (cell.kind === "padding" ? " padding" : ""));
    made.style.setProperty("--kind", "var(--role-" + (roles[cell.kind] || "p7") + ")");
    const name = element("b");
    name.append(element("span", "", cell.label), element("span", "size", bytes(cell.bytes)));
    made.append(name);
    if (cell.detail) made.append(element("small", "", cell.detail));
    made.title = tracekit.visible(cell.kind.replaceAll("_", " ") + ": " + cell.label + (cell.detail ? " " + cell.detail : ""));
    return made;
  }

  function rowOf(rank, before) {
    const row = element("div", "rank"), name = element("div", "rank-name", "rank " + rank.rank), cells = element("div", "cells");
    name.append(element("small", "", bytes(rank.live_bytes) + " live"));
    const live = element("div", "live"), share = element("i");
    share.style.width = (100 * rank.live_bytes / peak) + "%";
    live.append(share);
    name.append(live);
    const old = before && new Set(before.cells.map(known));
    cells.append(...rank.cells.slice(0, SHOWN_CELLS).map((cell) => cellOf(cell, old && !old.has(known(cell)))));
    if (rank.cells.length > SHOWN_CELLS) cells.append(element("span", "cut", "and " + (rank.cells.length - SHOWN_CELLS) + " more"));
    if (!rank.cells.length) cells.append(element("span", "empty", "nothing"));
    row.append(name, cells);
    return row;
  }

  function table(messages) {
    if (!messages.length) return [];
    const made = element("table", "sent"), body = element("tbody");
    const all = messages.reduce((sum, message) => sum + message.bytes, 0);
    made.append(element("caption", "", messages.length + (messages.length === 1 ? " message, " : " messages, ") + bytes(all)), body);
    for (const message of messages.slice(0, SHOWN_MESSAGES)) {
      const row = element("tr");
      row.append(element("td", "", "rank " + message.source + " → rank " + message.target), element("td", "num", bytes(message.bytes)), element("td", "", message.label));
      body.append(row);
    }
    const more = messages.length - SHOWN_MESSAGES;
    return more > 0 ? [made, element("p", "cut", "and " + more + " more messages")] : [made];
  }

  // Arrows run left of the rows, further out the longer their way is; one for each pair of ranks.
  function draw(messages) {
    const rows = [...ranks.children], height = ranks.offsetHeight, width = arrows.clientWidth || 96;
    arrows.setAttribute("viewBox", "0 0 " + width + " " + height);
    arrows.style.height = height + "px";
    const middle = (rank) => rows[rank].offsetTop + rows[rank].offsetHeight / 2;
    const pairs = new Map(messages.slice(0, SHOWN_MESSAGES).map((message) => [message.source + " " + message.target, message]));
    const drawn = [];
    for (const { source, target } of pairs.values()) {
      if (!rows[source] || !rows[target]) continue;
      const down = target > source ? 1 : -1, right = width - 8;
      const from = middle(source) + 4 * down, to = middle(target) - 6 * down;
      const left = right - 2 * Math.min(width * 0.46, 14 + width * 0.4 * Math.abs(target - source) / Math.max(1, rows.length - 1));
      drawn.push(svg("path", { d: "M" + right + " " + from + " C" + left + " " + from + " " + left + " " + to + " " + (right - 5) + " " + to }));
      drawn.push(svg("path", { class: "head", d: "M" + (right + 2) + " " + to + " l-9 -4 l0 8 z" }));
    }
    arrows.replaceChildren(...drawn);
  }

  function show(number) {
    at = Math.min(Math.max(number, 0), moments.length - 1);
    const moment = moments[at], before = at > 0 ? moments[at - 1] : null;
    slider.value = at;
    where.textContent = (at + 1) + " / " + moments.length;
    tracekit.setText(title, moment.title + (moment.logical_step === null ? "" : " · logical step " + moment.logical_step));
    tracekit.setText(text, moment.text);
    ranks.replaceChildren(...moment.ranks.map((rank, index) => rowOf(rank, before && before.ranks[index])));
    sent.replaceChildren(...table(moment.messages));
    draw(moment.messages);
    button("first").disabled = button("previous").disabled = at === 0;
    button("next").disabled = at === moments.length - 1;
  }

  function play(on) {
    clearInterval(timer);
    timer = on ? setInterval(() => { at + 1 < moments.length ? show(at + 1) : play(false); }, SECOND) : null;
    button("play").setAttribute("aria-pressed", String(on));
    button("play").textContent = on ? "❚❚ pause" : "▶ play";
  }

  const moves = {
    first: () => show(0),
    previous: () => show(at - 1),
    next: () => show(at + 1),
    play: () => { if (timer === null && at === moments.length - 1) show(0); play(timer === null); return true; },
  };
  for (const [name, move] of Object.entries(moves)) button(name).addEventListener("click", () => { if (!move()) play(false); });
  slider.addEventListener("input", () => { play(false); show(Number(slider.value)); });
  block.addEventListener("keydown", (event) => {
    if (event.target === slider || event.target.closest("button") || event.altKey || event.ctrlKey || event.metaKey) return;
    const move = { ArrowLeft: moves.previous, ArrowRight: moves.next, Home: moves.first, End: () => show(moments.length - 1) }[event.key];
    if (move) { event.preventDefault(); play(false); move(); }
  });
  window.addEventListener("resize", () => draw(moments[at].messages));
  const wanted = /^#step=(\d+)$/.exec(location.hash);
  show(wanted ? Number(wanted[1]) - 1 : 0);
}
