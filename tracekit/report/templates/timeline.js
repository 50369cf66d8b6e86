"use strict";
// The timeline: spans on lanes, drawn on a canvas. Only what is in view is visited, and what would fall into one pixel is drawn once.
for (const block of document.querySelectorAll(".block.timeline")) {
  const stage = block.querySelector("[data-stage]");
  if (!stage) continue;
  const view = stage.querySelector("[data-view]"), map = stage.querySelector("[data-map]"), tip = stage.querySelector("[data-tip]");
  const RULER = 22, MAP = 40, HEAD = 17, TALL = 2400, TALLEST = 12000;
  let given = null, current = 0, wanted = () => true, spans = null, lanes = [], groups = [], colors = [], theme = {}, names = [], hiddenKinds = new Set(), found = null;
  let from = 0, to = 1, last = 1, width = 0, height = 0, gutter = 110, rowHeight = 14, hovered = -1, picked = -1, band = null, pending = false;

  // ---- data -------------------------------------------------------------------------------------------------------------
  // Five columns of 32 bits of `count` spans, unpacked: all first bytes of a column, then all second ones, ...
  function columns(text, count) {
    const bytes = unpack(text, 20 * count);
    return [0, 1, 2, 3, 4].map((column) => {
      const words = new Uint32Array(count);
      for (let byte = 0; byte < 4; byte++) {
        const first = (4 * column + byte) * count, shift = 8 * byte;
        for (let i = 0; i < count; i++) words[i] |= bytes[first + i] << shift;
      }
      return words;
    });
  }

  function load() {
    given = tracekit.data(block);
    names = given.names;
    const ranks = new Set(given.shown.map((rank) => "rank " + rank));
    wanted = (name, place) => (ranks.size ? ranks.has(name) || !/^rank /.test(name) : place < 16);
    open(given.first);
  }

  // The spans of one step, with those groups shown that are wanted.
  function open(number) {
    current = number;
    const step = given.steps[number], count = step.spans, [start, duration, name, category, merged] = columns(step.packed, count);
    spans = { start: new Float64Array(count), duration: new Float64Array(count), name, category, merged, categories: given.categories };
    spans.row = new Uint8Array(count);
    spans.reach = new Float64Array(count); // the latest end so far in the lane: lets a search stop early
    last = 1;
    for (let i = 0, at = 0; i < count; i++) {
      at = (at + start[i]) >>> 0; // steps back, at the next lane, come around
      spans.start[i] = at * step.tick_us;
      spans.duration[i] = duration[i] * step.tick_us;
      last = Math.max(last, spans.start[i] + spans.duration[i]);
    }
    const byGroup = new Map();
    lanes = [];
    step.lanes.forEach((lane, index) => {
      const own = { label: tracekit.visible(lane.label), first: step.offsets[index], end: step.offsets[index + 1], rows: 1, y: 0 };
      stack(own);
      lanes.push(own);
      if (!byGroup.has(lane.group)) byGroup.set(lane.group, { name: tracekit.visible(lane.group), lanes: [], shown: false, cut: false, y: 0 });
      byGroup.get(lane.group).lanes.push(own);
    });
    groups = [...byGroup.values()];
    groups.forEach((group, place) => { group.shown = wanted(group.name, place); });
    picked = hovered = -1;
    from = 0;
    to = last;
  }

  // Spans that overlap on one lane go to rows of their own: nested calls below what called them.
  function stack(lane) {
    const ends = [];
    let reach = -Infinity;
    for (let i = lane.first; i < lane.end; i++) {
      const start = spans.start[i], end = start + spans.duration[i];
      let row = ends.findIndex((busy) => busy <= start + 1e-4);
      if (row < 0) row = ends.length < 12 ? ends.length : 11;
      ends[row] = end;
      spans.row[i] = row;
      spans.reach[i] = reach = Math.max(reach, end);
    }
    lane.rows = Math.max(1, ends.length);
  }

  // First span of a lane that reaches past `time`.
  function firstAt(lane, time) {
    let low = lane.first, high = lane.end;
    while (low < high) { const middle = (low + high) >> 1; spans.reach[middle] < time ? low = middle + 1 : high = middle; }
    return low;
  }

  // ---- layout -----------------------------------------------------------------------------------------------------------
  const shownGroups = () => groups.filter((group) => group.shown && !group.cut);

  function layout() {
    width = stage.clientWidth;
    gutter = width < 620 ? 74 : 136;
    for (const group of groups) group.cut = false;
    const shown = shownGroups(), rows = shown.reduce((sum, group) => sum + group.lanes.reduce((n, lane) => n + lane.rows, 0), 0);
    rowHeight = Math.max(11, Math.min(15, Math.floor((TALL - shown.length * HEAD) / Math.max(1, rows))));
    let y = RULER;
    for (const group of shown) {
      group.cut = y > TALLEST; // a canvas has a largest height
      if (group.cut) continue;
      group.y = y;
      y += groups.length > 1 || group.name ? HEAD : 4;
      for (const lane of group.lanes) { lane.y = y; y += lane.rows * rowHeight + 3; }
    }
    height = Math.max(RULER + 40, y + 6);
    const drawn = shown.filter((group) => !group.cut).length, short = block.querySelector("[data-cut]");
    short.hidden = drawn === shown.length;
    short.textContent = `Only the first ${drawn} of the ${shown.length} groups of lanes that are chosen have room: choose fewer ranks.`;
    for (const [canvas, tall] of [[view, height], [map, MAP]]) {
      const ratio = window.devicePixelRatio || 1;
      canvas.style.height = tall + "px";
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(tall * ratio);
      canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    }
  }

  function themed() {
    theme = Object.fromEntries(["--sheet", "--ink", "--soft", "--faint", "--line", "--hair", "--focus"].map((key) => [key.slice(2), tracekit.color(key)]));
    theme.font = getComputedStyle(document.body).fontFamily;
    colors = spans.categories.map((category) => {
      const fill = tracekit.color("--role-" + category.role), value = parseInt(fill.slice(1), 16);
      const light = 0.3 * (value >> 16) + 0.59 * ((value >> 8) & 255) + 0.11 * (value & 255);
      return { fill, text: light > 140 ? "#10201c" : "#ffffff" };
    });
  }

  // ---- drawing ----------------------------------------------------------------------------------------------------------
  const scale = () => (width - gutter) / (to - from);
  const xOf = (time) => gutter + (time - from) * scale();
  const timeAt = (x) => from + (x - gutter) / scale();

  function draw() {
    pending = false;
    const pen = view.getContext("2d");
    pen.clearRect(0, 0, width, height);
    pen.textBaseline = "middle";
    ruler(pen);
    pen.save();
    pen.beginPath();
    pen.rect(gutter, RULER, width - gutter, height - RULER);
    pen.clip();
    pen.font = "10px " + theme.font;
    for (const group of shownGroups()) for (const lane of group.lanes) drawLane(pen, lane);
    outline(pen, hovered, theme.ink, 1);
    outline(pen, picked, theme.ink, 2);
    if (band) { pen.fillStyle = theme.focus; pen.globalAlpha = 0.18; pen.fillRect(Math.min(...band), RULER, Math.abs(band[1] - band[0]), height); pen.globalAlpha = 1; }
    pen.restore();
    labels(pen);
    drawMap();
  }

  const called = (i) => names[spans.name[i]] + (spans.merged[i] > 1 ? ` + ${spans.merged[i] - 1} more` : "");

  function drawLane(pen, lane) {
    const k = scale(), painted = new Float64Array(lane.rows).fill(-1), tall = Math.max(3, rowHeight - 1);
    let alpha = 1, category = -1;
    for (let i = firstAt(lane, from); i < lane.end; i++) {
      const start = spans.start[i];
      if (start > to) break;
      const kind = spans.category[i];
      if (hiddenKinds.has(kind)) continue;
      const row = spans.row[i], left = gutter + (start - from) * k, right = Math.max(left + 1, left + spans.duration[i] * k);
      if (right <= painted[row] || right < gutter) continue;
      painted[row] = Math.ceil(left) + (right - left < 1.5 ? 0 : right - left - 1);
      const wanted = found && !found.has(spans.name[i]) ? 0.13 : 1;
      if (wanted !== alpha) pen.globalAlpha = alpha = wanted;
      if (kind !== category) { category = kind; pen.fillStyle = colors[kind].fill; }
      const x = Math.max(gutter - 2, left), wide = Math.min(width + 2, right) - x, y = lane.y + row * rowHeight;
      pen.fillRect(x, y, wide > 3 ? wide - 0.5 : wide, tall);
      if (wide > 34 && tall >= 10 && alpha === 1) {
        const fits = Math.floor((wide - 6) / 5.4), name = called(i);
        pen.fillStyle = colors[kind].text;
        pen.fillText(tracekit.visible(name.length > fits ? name.slice(0, Math.max(1, fits - 1)) + "…" : name), x + 3, y + tall / 2 + 0.5, wide - 5);
        category = -1;
      }
    }
    pen.globalAlpha = 1;
  }

  function outline(pen, index, color, weight) {
    if (index < 0) return;
    const lane = lanes.find((each) => index >= each.first && index < each.end);
    if (!shownGroups().some((group) => group.lanes.includes(lane))) return;
    const left = Math.max(gutter - 4, xOf(spans.start[index])), right = Math.min(width + 4, xOf(spans.start[index] + spans.duration[index]));
    pen.strokeStyle = color;
    pen.lineWidth = weight;
    pen.strokeRect(left - 0.5, lane.y + spans.row[index] * rowHeight - 0.5, Math.max(2, right - left) + 1, Math.max(3, rowHeight - 1) + 1);
  }

  function ruler(pen) {
    const rough = (to - from) / Math.max(2, (width - gutter) / 110), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
    pen.font = "11px " + theme.font;
    pen.textAlign = "left";
    for (let time = Math.ceil(from / step) * step; time <= to; time += step) {
      const x = Math.round(xOf(time)) + 0.5;
      pen.strokeStyle = theme.hair;
      pen.lineWidth = 1;
      pen.beginPath(); pen.moveTo(x, RULER - 6); pen.lineTo(x, height); pen.stroke();
      pen.fillStyle = theme.soft;
      if (x < width - 40) pen.fillText(time === 0 ? "0" : tracekit.quantity(time), x + 3, RULER / 2 - 1);
    }
  }

  function labels(pen) {
    pen.fillStyle = theme.sheet;
    pen.fillRect(0, RULER, gutter - 1, height);
    pen.strokeStyle = theme.line;
    pen.beginPath(); pen.moveTo(gutter - 0.5, 0); pen.lineTo(gutter - 0.5, height); pen.stroke();
    for (const group of shownGroups()) {
      pen.fillStyle = theme.hair;
      pen.fillRect(0, group.y, width, 1);
      pen.font = "600 11px " + theme.font;
      pen.fillStyle = theme.ink;
      pen.fillText(fitted(pen, group.name, gutter - 12), 7, group.y + HEAD / 2 + 1);
      pen.font = "10.5px " + theme.font;
      pen.fillStyle = theme.soft;
      for (const lane of group.lanes) pen.fillText(fitted(pen, lane.label, gutter - 18), 12, lane.y + rowHeight / 2);
    }
  }

  function fitted(pen, text, room) {
    if (pen.measureText(text).width <= room) return text;
    let keep = text.length;
    while (keep > 1 && pen.measureText(text.slice(0, keep) + "…").width > room) keep--;
    return text.slice(0, keep) + "…";
  }

  // The whole timeline in small, with the part in view framed. Painted once, then copied.
  let mapImage = null;
  function drawMap() {
    const pen = map.getContext("2d"), k = (width - gutter) / last;
    if (!mapImage) {
      pen.clearRect(0, 0, width, MAP);
      const shown = shownGroups().flatMap((group) => group.lanes), tall = Math.max(1, (MAP - 8) / Math.max(1, shown.length));
      shown.forEach((lane, place) => {
        let end = -1;
        for (let i = lane.first; i < lane.end; i++) {
          const left = gutter + spans.start[i] * k, right = Math.max(left + 0.6, left + spans.duration[i] * k);
          if (right < end || hiddenKinds.has(spans.category[i])) continue;
          end = right;
          pen.fillStyle = colors[spans.category[i]].fill;
          pen.fillRect(left, 4 + place * tall * ((MAP - 8) / Math.max(MAP - 8, tall * shown.length)), right - left, Math.max(0.8, tall - 0.3));
        }
      });
      mapImage = document.createElement("canvas");
      mapImage.width = map.width;
      mapImage.height = map.height;
      mapImage.getContext("2d").drawImage(map, 0, 0);
    }
    pen.clearRect(0, 0, width, MAP);
    pen.drawImage(mapImage, 0, 0, width, MAP);
    pen.fillStyle = theme.sheet;
    pen.globalAlpha = 0.72;
    const left = gutter + from * k, right = gutter + to * k;
    pen.fillRect(gutter, 0, left - gutter, MAP);
    pen.fillRect(right, 0, width - right, MAP);
    pen.globalAlpha = 1;
    pen.strokeStyle = theme.focus;
    pen.lineWidth = 1.5;
    pen.strokeRect(left + 0.75, 0.75, Math.max(2, right - left - 1.5), MAP - 1.5);
    pen.fillStyle = theme.soft;
    pen.font = "11px " + theme.font;
    pen.textBaseline = "middle";
    pen.fillText(tracekit.quantity(to - from), 7, MAP / 2, gutter - 12);
  }

  const redraw = () => { if (!pending) { pending = true; requestAnimationFrame(draw); } };
  const relayout = () => { mapImage = null; layout(); redraw(); };

  // ---- moving about -----------------------------------------------------------------------------------------------------
  function show(low, high) {
    const span = Math.min(last, Math.max(0.02, high - low));
    from = Math.max(0, Math.min(last - span, low));
    to = from + span;
    redraw();
  }
  const zoom = (factor, at = (from + to) / 2) => show(at - (at - from) * factor, at + (to - at) * factor);
  const pan = (share) => show(from + share * (to - from), to + share * (to - from));
  const place = (event) => { const box = view.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };

  function hit(x, y) {
    if (x < gutter) return -1;
    const lane = shownGroups().flatMap((group) => group.lanes).find((each) => y >= each.y && y < each.y + each.rows * rowHeight);
    if (!lane) return -1;
    const row = Math.floor((y - lane.y) / rowHeight), time = timeAt(x), slack = 2 / scale();
    let best = -1;
    for (let i = firstAt(lane, time - slack); i < lane.end && spans.start[i] <= time + slack; i++) {
      const inside = spans.start[i] + spans.duration[i] >= time - slack;
      if (inside && spans.row[i] === row && !hiddenKinds.has(spans.category[i]) && (best < 0 || spans.duration[i] <= spans.duration[best])) best = i;
    }
    return best;
  }

  function told(index) {
    const lane = lanes.find((each) => index >= each.first && index < each.end), group = groups.find((each) => each.lanes.includes(lane));
    const where = [group.name, lane.label].filter(Boolean).join(" · "), kind = tracekit.visible(spans.categories[spans.category[index]].name);
    return `${tracekit.quantity(spans.duration[index])} · ${kind} · from ${tracekit.quantity(spans.start[index])} · ${where}`;
  }

  function describe(target, index) {
    const title = document.createElement("b"), rest = document.createElement("span");
    tracekit.setText(title, called(index));
    rest.textContent = " " + told(index);
    target.replaceChildren(title, rest);
  }

  function hover(event) {
    const [x, y] = place(event), index = hit(x, y);
    tip.hidden = index < 0;
    if (index >= 0) {
      describe(tip, index);
      const top = view.offsetTop + y + 18, left = Math.min(x + 12, width - tip.offsetWidth - 8);
      tip.style.left = Math.max(4, left) + "px";
      tip.style.top = top + "px";
    }
    if (index !== hovered) { hovered = index; redraw(); }
  }

  const touches = new Map();
  let moved = 0, apart = 0;
  view.addEventListener("pointerdown", (event) => {
    touches.set(event.pointerId, event.clientX);
    moved = 0;
    apart = touches.size === 2 ? Math.abs([...touches.values()][0] - [...touches.values()][1]) : 0;
    if (event.shiftKey) band = [place(event)[0], place(event)[0]];
    view.setPointerCapture(event.pointerId);
  });
  view.addEventListener("pointermove", (event) => {
    if (!touches.has(event.pointerId)) return hover(event);
    const step = event.clientX - touches.get(event.pointerId);
    touches.set(event.pointerId, event.clientX);
    moved += Math.abs(step);
    if (band) { band[1] = place(event)[0]; redraw(); return; }
    if (touches.size === 2) {
      const [a, b] = [...touches.values()], now = Math.max(8, Math.abs(a - b));
      if (apart) zoom(apart / now, timeAt((a + b) / 2 - view.getBoundingClientRect().left));
      apart = now;
    } else {
      show(from - step / scale(), to - step / scale());
    }
  });
  const release = (event) => {
    if (!touches.delete(event.pointerId)) return;
    apart = 0;
    if (band) { const [a, b] = [Math.min(...band), Math.max(...band)]; band = null; if (b - a > 4) show(timeAt(a), timeAt(b)); else redraw(); return; }
    if (moved < 4 && event.type === "pointerup") {
      picked = hit(...place(event));
      if (picked >= 0) describe(block.querySelector("[data-picked]"), picked);
      redraw();
    }
  };
  view.addEventListener("pointerup", release);
  view.addEventListener("pointercancel", release);
  view.addEventListener("pointerleave", () => { tip.hidden = true; hovered = -1; redraw(); });
  view.addEventListener("dblclick", (event) => {
    const index = hit(...place(event));
    if (index < 0) return zoom(0.4, timeAt(place(event)[0]));
    const room = Math.max(0.05, spans.duration[index] * 0.3);
    show(spans.start[index] - room, spans.start[index] + spans.duration[index] + room);
  });
  stage.addEventListener("wheel", (event) => {
    const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (!event.ctrlKey && !event.metaKey && !sideways) return;
    event.preventDefault();
    if (event.ctrlKey || event.metaKey) zoom(Math.exp(Math.max(-50, Math.min(50, event.deltaY)) * 0.006), timeAt(place(event)[0]));
    else pan((event.deltaX || event.deltaY) / (width - gutter));
  }, { passive: false });
  map.addEventListener("pointerdown", (event) => { map.setPointerCapture(event.pointerId); centre(event); });
  map.addEventListener("pointermove", (event) => { if (event.buttons) centre(event); });
  function centre(event) {
    const middle = (place(event)[0] - gutter) / (width - gutter) * last, half = (to - from) / 2;
    show(middle - half, middle + half);
  }
  const keys = { w: () => zoom(0.7), s: () => zoom(1 / 0.7), a: () => pan(-0.2), d: () => pan(0.2), 0: () => show(0, last) };
  Object.assign(keys, { "+": keys.w, "=": keys.w, "-": keys.s, ArrowLeft: keys.a, ArrowRight: keys.d });
  stage.addEventListener("keydown", (event) => {
    const act = keys[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (act && !event.ctrlKey && !event.metaKey && !event.altKey) { event.preventDefault(); act(); }
  });

  // ---- finding and taking away ------------------------------------------------------------------------------------------
  // Spans whose name was looked for, of what is shown, by their start.
  function hits() {
    if (!found) return [];
    const result = [];
    for (const group of shownGroups()) for (const lane of group.lanes) for (let i = lane.first; i < lane.end; i++) {
      if (found.has(spans.name[i]) && !hiddenKinds.has(spans.category[i])) result.push(i);
    }
    return result.sort((a, b) => spans.start[a] - spans.start[b] || a - b);
  }

  function count() {
    const all = hits(), at = all.indexOf(picked);
    block.querySelector("[data-hits]").textContent = !found ? "" : at < 0 ? all.length + " found" : `${at + 1} of ${all.length}`;
  }

  function next(step) {
    const all = hits();
    if (!all.length) return;
    const at = all.indexOf(picked);
    const first = step > 0 ? all.findIndex((i) => spans.start[i] >= from) : all.findLastIndex((i) => spans.start[i] <= to);
    const wanted = at >= 0 ? (at + step + all.length) % all.length : Math.max(0, first);
    picked = all[wanted];
    const start = spans.start[picked], end = start + spans.duration[picked];
    if (start < from || end > to) { const half = Math.max((to - from) / 2, spans.duration[picked] * 0.6); show((start + end) / 2 - half, (start + end) / 2 + half); }
    describe(block.querySelector("[data-picked]"), picked);
    count();
    redraw();
  }

  // Shows the groups that a function of their name chooses, in this step and those opened later.
  function choose(which) {
    if (!groups.some((group, place) => which(group.name, place))) return;
    wanted = which;
    groups.forEach((group, place) => { group.shown = which(group.name, place); });
    listed();
    count();
    relayout();
  }

  // Another step, with the same groups where it has them.
  function turn(number) {
    if (number === current || !given.steps[number]) return;
    open(number);
    block.querySelector("[data-step]").value = String(number);
    listed();
    count();
    relayout();
  }

  // What is chosen stands in the page's address, to be sent on.
  function addressed() {
    const step = /^Step (\d+)$/.exec(given.steps[current].label), ranks = block.querySelector("[data-ranks]")?.value.replace(/\s+/g, "");
    const parts = [step && "step=" + step[1], ranks && chosen(ranks) && "rank=" + ranks].filter(Boolean);
    history.replaceState(null, "", "#" + block.closest("section").id + (parts.length ? "?" + parts.join("&") : ""));
  }

  // The place where a finding can be seen: its step, its ranks, the longest of its stretches.
  function point(number) {
    const places = given.findings.filter((place) => place[0] === number);
    const [, step, start, end, rank] = places.find((place) => place[1] === current) ?? places[0] ?? [];
    if (step === undefined) return;
    turn(step);
    const kept = wanted, own = "rank " + rank;
    choose((name, place) => kept(name, place) || name === own || name === "findings");
    const room = Math.max((end - start) * 1.5, last / 200);
    show(start - room, end + room);
    const lane = groups[0].lanes.find((each) => each.label === String(number));
    if (lane) for (let i = lane.first; i < lane.end; i++) if (Math.abs(spans.start[i] - start) < 0.01) picked = i;
    if (picked >= 0) describe(block.querySelector("[data-picked]"), picked);
  }

  // The rank of a group of lanes; NaN for findings and the critical path, which are of all ranks.
  const rankOf = (name) => Number(/^rank (\d+)$/.exec(name)?.[1] ?? NaN);

  // "0, 8-15" as a set; null for anything else.
  function chosen(text) {
    const ranks = new Set();
    for (const part of text.split(",")) {
      const range = /^\s*(\d{1,7})(?:\s*[-–]\s*(\d{1,7}))?\s*$/.exec(part);
      if (!range) return null;
      const high = Number(range[2] ?? range[1]);
      for (let rank = Number(range[1]); rank <= Math.min(high, Number(range[1]) + 100000); rank++) ranks.add(rank);
    }
    return ranks;
  }

  function save(blob, name) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  const fileName = (ending) => `timeline-${given.steps[current].label.toLowerCase().replaceAll(" ", "-")}.${ending}`;

  function picture() {
    const whole = document.createElement("canvas"), pen = whole.getContext("2d");
    whole.width = view.width;
    whole.height = view.height;
    pen.fillStyle = theme.sheet;
    pen.fillRect(0, 0, whole.width, whole.height);
    pen.drawImage(view, 0, 0);
    whole.toBlob((blob) => save(blob, fileName("png")));
  }

  function listing() {
    const rows = ["group,lane,name,kind,start_us,duration_us,pieces"];
    // Quoted; a first character that a spreadsheet would run is shielded.
    const cell = (text) => '"' + String(text).replace(/^[=+\-@\t\r]/, "'$&").replaceAll('"', '""') + '"';
    for (const group of shownGroups()) for (const lane of group.lanes) for (let i = firstAt(lane, from); i < lane.end && spans.start[i] <= to; i++) {
      if (hiddenKinds.has(spans.category[i]) || spans.start[i] + spans.duration[i] < from) continue;
      const words = [group.name, lane.label, names[spans.name[i]], spans.categories[spans.category[i]].name].map(cell);
      rows.push([...words, spans.start[i].toFixed(3), spans.duration[i].toFixed(3), spans.merged[i]].join(","));
    }
    save(new Blob([rows.join("\n") + "\n"], { type: "text/csv" }), fileName("csv"));
  }

  // A box for each group of lanes; of many groups only for those that are shown.
  function listed() {
    const boxes = block.querySelector("[data-groups]");
    for (const old of boxes.querySelectorAll("label, button")) old.remove();
    boxes.hidden = groups.length < 2;
    for (const group of groups.filter((each) => each.shown || groups.length <= 40).slice(0, 64)) {
      const label = document.createElement("label"), box = document.createElement("input"), text = document.createElement("span");
      box.type = "checkbox";
      box.checked = group.shown;
      box.addEventListener("change", () => {
        const kept = wanted;
        group.shown = box.checked;
        wanted = (name, place) => (name === group.name ? box.checked : kept(name, place));
        relayout();
      });
      text.textContent = group.name;
      label.append(box, text);
      boxes.append(label);
    }
    for (const [word, shown] of [["all", true], ["none", false]]) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = word;
      button.addEventListener("click", () => {
        wanted = () => shown;
        for (const group of groups) group.shown = shown;
        listed();
        relayout();
      });
      boxes.append(button);
    }
  }

  // ---- choosing what is shown -------------------------------------------------------------------------------------------
  function controls() {
    const legend = block.querySelector("[data-legend]");
    spans.categories.forEach((category, index) => {
      const button = document.createElement("button"), swatch = document.createElement("i"), label = document.createElement("span");
      button.type = "button";
      button.setAttribute("aria-pressed", "true");
      swatch.style.background = `var(--role-${category.role})`;
      tracekit.setText(label, category.name);
      button.append(swatch, label);
      button.addEventListener("click", () => {
        const off = !hiddenKinds.delete(index);
        if (off) hiddenKinds.add(index);
        button.setAttribute("aria-pressed", String(!off));
        mapImage = null;
        redraw();
      });
      legend.append(button);
    });
    const find = block.querySelector("[data-find]");
    find.addEventListener("input", () => {
      const wanted = find.value.trim().toLowerCase();
      found = wanted ? new Set(names.flatMap((name, index) => (name.toLowerCase().includes(wanted) ? [index] : []))) : null;
      picked = -1;
      count();
      redraw();
    });
    find.addEventListener("keydown", (event) => { if (event.key === "Enter") { event.preventDefault(); next(event.shiftKey ? -1 : 1); } });
    block.querySelector("[data-next]").addEventListener("click", () => next(1));
    block.querySelector("[data-previous]").addEventListener("click", () => next(-1));
    block.querySelector("[data-ranks]").addEventListener("change", (event) => {
      const wanted = chosen(event.target.value);
      event.target.setAttribute("aria-invalid", String(wanted === null));
      if (wanted) { choose((name) => wanted.has(rankOf(name))); addressed(); }
    });
    if (groups.length < 2) block.querySelector("[data-ranks]").closest("label").remove();
    const steps = block.querySelector("[data-step]");
    given.steps.forEach((step, index) => {
      const option = document.createElement("option");
      option.value = String(index);
      option.textContent = step.label;
      steps.append(option);
    });
    steps.value = String(current);
    steps.addEventListener("change", () => { turn(Number(steps.value)); addressed(); });
    if (given.steps.length < 2) steps.closest("label").remove();
    block.querySelector("[data-save]").addEventListener("click", picture);
    block.querySelector("[data-rows]").addEventListener("click", listing);
    const zooms = { in: keys.w, out: keys.s, fit: keys[0] };
    for (const button of block.querySelectorAll("[data-zoom]")) button.addEventListener("click", zooms[button.dataset.zoom]);
  }

  function start() {
    if (given) return;
    load();
    themed();
    controls();
    listed();
    layout();
    draw();
    new ResizeObserver(() => { if (stage.clientWidth !== width) relayout(); }).observe(stage);
    tracekit.onScheme(() => { themed(); mapImage = null; draw(); });
  }
  tracekit.whenSeen(stage, start);

  // A link to this chapter that is about one rank, or says in its address what is shown: a step, ranks, the place of a finding.
  function follow(kind, act) {
    document.addEventListener(kind, (event) => { if (block.closest("section").id === event.detail.id) { start(); act(event.detail); } });
  }
  follow("tracekit:rank", (detail) => choose((name) => name === "rank " + detail.rank));
  follow("tracekit:at", ({ at }) => {
    const step = given.steps.findIndex((each) => each.label === "Step " + at.get("step")), ranks = chosen(at.get("rank") ?? "");
    if (step >= 0) turn(step);
    if (ranks) {
      choose((name) => ranks.has(rankOf(name)));
      const input = block.querySelector("[data-ranks]");
      if (input) input.value = at.get("rank");
    }
    if (at.has("finding")) point(Number(at.get("finding")));
  });
}
