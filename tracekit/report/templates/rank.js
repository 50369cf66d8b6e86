"use strict";
// One rank: what every table says of it, and the groups it is in. #rank-77 opens it for rank 77.
(() => {
  const section = document.getElementById("rank");
  if (!section) return;
  const input = section.querySelector("input"), into = section.querySelector("[data-rows]"), on = section.querySelector("[data-on]");

  function show(rank) {
    into.replaceChildren();
    on.hidden = true;
    if (rank === null) return;
    document.dispatchEvent(new CustomEvent("tracekit:panel", { detail: { rank, into } }));
    if (!into.childElementCount) {
      const nothing = document.createElement("p");
      nothing.className = "nothing";
      nothing.textContent = `No table of this page has a rank ${rank}.`;
      into.append(nothing);
      return;
    }
    const link = on.querySelector("a");
    if (link) {
      link.dataset.rank = String(rank);
      on.hidden = false;
    }
  }

  const wanted = () => (/^\s*\d{1,7}\s*$/.test(input.value) ? Number(input.value) : null);
  input.addEventListener("change", () => {
    show(wanted());
    if (wanted() !== null) history.replaceState(null, "", "#rank-" + wanted());
  });

  function follow() {
    const found = /^#rank-(\d{1,7})$/.exec(location.hash);
    if (!found) return;
    input.value = found[1];
    show(Number(found[1]));
    tracekit.land("rank");
  }
  window.addEventListener("hashchange", follow);
  window.addEventListener("load", follow);
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[href^='#rank-']");
    if (link && location.hash === link.hash) follow();
  });
})();
