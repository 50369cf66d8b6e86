"use strict";
// Shared by all parts of the page. Whatever comes from the trace is set as text, never as markup.
const tracekit = (() => {
  document.documentElement.classList.add("js");
  const acting = /[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]/g;

  const codeOf = (character) => "U+" + character.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0");
  const picture = (character) => {
    const code = character.charCodeAt(0);
    return code < 0x20 ? String.fromCharCode(0x2400 + code) : "[" + codeOf(character) + "]";
  };

  // Text with characters that would act (turn the line around, end it) shown by their code.
  function setText(element, text) {
    element.textContent = "";
    let end = 0;
    for (const found of text.matchAll(acting)) {
      if (found.index > end) element.append(text.slice(end, found.index));
      const mark = document.createElement("span");
      mark.className = "ctl";
      mark.dataset.code = codeOf(found[0]);
      mark.textContent = found[0] < "\u00a0" ? picture(found[0]) : found[0];
      element.append(mark);
      end = found.index + found[0].length;
    }
    element.append(text.slice(end));
  }

  const visible = (text) => text.replace(acting, picture);
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // What stands in a script element, unpacked where it says how many bytes it holds (unpack.js).
  function contents(element) {
    const size = element.dataset.size;
    return size === undefined ? element.textContent : new TextDecoder().decode(unpack(element.textContent, Number(size)));
  }
  const data = (block) => JSON.parse(contents(block.querySelector(":scope > script[type='application/json']")));

  // plotly, run when the first chart is about to be seen; null where the file that it is shared in is missing.
  function plotly() {
    const packed = document.getElementById("plotly");
    if (typeof Plotly === "undefined" && packed) {
      const script = document.createElement("script");
      script.textContent = contents(packed);
      packed.replaceWith(script);
    }
    return typeof Plotly === "undefined" ? null : Plotly;
  }

  function quantity(us) {
    const size = Math.abs(us);
    for (const [unit, scale] of [["s", 1e6], ["ms", 1e3], ["us", 1]]) {
      if (size >= scale) return Number((us / scale).toPrecision(4)) + " " + unit;
    }
    return Number((us * 1000).toFixed(0)) + " ns";
  }

  // Calls `draw` when the element is about to be seen, and before printing.
  function whenSeen(element, draw) {
    let drawn = false;
    const once = () => { if (!drawn) { drawn = true; watcher.disconnect(); draw(); } };
    const watcher = new IntersectionObserver((entries) => { if (entries.some((entry) => entry.isIntersecting)) once(); }, { rootMargin: "600px" });
    watcher.observe(element);
    window.addEventListener("beforeprint", once);
  }

  const onScheme = (redraw) => {
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    window.addEventListener("beforeprint", () => { document.documentElement.classList.add("paper"); redraw(); });
    window.addEventListener("afterprint", () => { document.documentElement.classList.remove("paper"); redraw(); });
  };

  // Charts are drawn late and change the height of what is above a target: stay with it until the reader moves or all is still.
  // A row of a table (#pipeline-3.2) is looked for by its table; what stands behind ? (#timeline?step=4&rank=7) says what a chapter shows.
  let leave = () => {};
  function land(place) {
    leave();
    const [id, rest] = place.split("?");
    if (rest !== undefined) document.dispatchEvent(new CustomEvent("tracekit:at", { detail: { id, at: new URLSearchParams(rest) } }));
    if (id.includes(".")) document.dispatchEvent(new CustomEvent("tracekit:row", { detail: { id } }));
    const target = id && (document.getElementById(id) ?? document.getElementById(id.split(".")[0]));
    if (!target) return;
    const block = target.matches("tr") ? "center" : "start";
    const folded = target.closest("details");
    if (folded) folded.open = true;
    let watching = true;
    const go = () => { if (watching) target.scrollIntoView({ behavior: "instant", block, inline: "nearest" }); };
    const watcher = new ResizeObserver(go), stop = () => { watching = false; watcher.disconnect(); };
    for (const kind of ["wheel", "touchstart", "keydown", "pointerdown"]) window.addEventListener(kind, stop, { once: true, passive: true });
    watcher.observe(document.querySelector("main"));
    setTimeout(stop, 3000);
    leave = stop; // the next target takes over
    go();
  }
  window.addEventListener("hashchange", () => land(decodeURIComponent(location.hash.slice(1))));
  window.addEventListener("load", () => land(decodeURIComponent(location.hash.slice(1))));
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[href^='#']");
    if (!link) return;
    const id = link.hash.slice(1);
    if (link.dataset.rank !== undefined) document.dispatchEvent(new CustomEvent("tracekit:rank", { detail: { id, rank: Number(link.dataset.rank) } }));
    if (location.hash === link.hash) land(decodeURIComponent(id));
  });

  const links = new Map([...document.querySelectorAll("nav li a")].map((link) => [link.hash.slice(1), link]));
  const inView = new Set();
  const spy = new IntersectionObserver((entries) => {
    for (const entry of entries) entry.isIntersecting ? inView.add(entry.target.id) : inView.delete(entry.target.id);
    const current = [...links.keys()].find((id) => inView.has(id));
    for (const [id, link] of links) id === current ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current");
  }, { rootMargin: "-12% 0px -70% 0px" });
  for (const id of links.keys()) { const target = document.getElementById(id); if (target) spy.observe(target); }

  return { setText, visible, color, data, plotly, land, quantity, whenSeen, onScheme };
})();
