// Page: makes the pictures react to clicks, keys and the pointer.

const element = (id) => document.getElementById(id);
const data = JSON.parse(element("data").textContent);
const ends = [...data.ops.predicted[1], ...data.ops.measured[1]];
const view = new View(ends.reduce((most, end) => Math.max(most, end), 1));
const timeline = new TimelineCanvas(element("timeline"), data, view);
const overview = new Overview(element("overview"), view, timeline);
const memory = new MemoryCanvas(element("memory"), data.memory, view, timeline.left,
  timeline.right);
const training = new TrainingCanvas(element("training"), data.training);
const [predicted, measured] = timeline.panels;
const numberOf = new Map(data.ops.id.map((id, index) => [id, index]));

function escaped(text) {
  return text.replace(/[&<>"]/g,
    (letter) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[letter]);
}

// ---- the selected op ----

function duration(op, panel) { return panel.end[op] - panel.start[op]; }

function error(op) {
  const found = duration(op, measured);
  return found ? percent(duration(op, predicted) / found - 1) : "-";
}

const HINT = "Click an op to see its numbers and the op that it waited for.";

function select(op) {
  timeline.selected = op;
  element("readout").innerHTML = op < 0 ? `<span class=empty>${HINT}</span>` : described(op);
  view.redraw();
}

/** Returns a row of the readout: a name, a value and a remark. `id` is the id of the value's
    element. */
function readoutRow(name, value, remark, id) {
  const bold = `<b${id ? ` id=${id}` : ""}>${value}</b>`;
  return `<div><span>${name}</span>${bold}<span>${remark}</span></div>`;
}

function described(op) {
  const kind = data.kinds[data.ops.kind[op]].name, waited = timeline.waitsFor(op, measured),
    late = measured.start[op] - predicted.start[op];
  const other = data.ops.id[waited];
  const waits = waited < 0 ? "nothing" : `<button class=op data-op="${other}">${other}</button>`;
  const idle = waited < 0 ? measured.start[op] : measured.start[op] - measured.end[waited];
  const what = `${escaped(kind)} on ${data.lanes[data.ops.lane[op]]}`;
  const timing = (panel) => readoutRow(panel.name, time(duration(op, panel)),
    `from ${time(panel.start[op])}`, `${panel.name}-duration`);
  return [
    `<div><b>${data.ops.id[op]}</b><span>${what}</span>`,
    `<span>${escaped(data.ops.size[op])}</span></div>`,
    timing(measured),
    timing(predicted),
    readoutRow("error", error(op),
      `started ${time(Math.abs(late))} ${late < 0 ? "earlier" : "later"}`),
    readoutRow("waited for", waits, `started ${time(Math.max(idle, 0))} after that`),
  ].join("");
}

/** Selects an op and zooms to it and its neighbours. */
function reveal(op) {
  const from = Math.min(predicted.start[op], measured.start[op]),
    to = Math.max(predicted.end[op], measured.end[op]);
  const margin = Math.max(4 * Math.max(duration(op, predicted), duration(op, measured)),
    view.least);
  select(op);
  view.glide(from - margin, to + margin);
  const { top, bottom } = element("timeline").getBoundingClientRect();
  if (bottom < 80 || top > innerHeight - 80) {
    element("overview").scrollIntoView({ block: "start" });
  }
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button.op");
  if (button && numberOf.has(button.dataset.op)) reveal(numberOf.get(button.dataset.op));
});

// ---- tips under the pointer ----

function showTip(event, html) {
  const tip = element("tip");
  tip.hidden = !html;
  if (!html) return;
  tip.innerHTML = html;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
  const below = event.clientY + 18;
  tip.style.top = `${below + height > innerHeight ? event.clientY - height - 12 : below}px`;
}

function opTip(op) {
  return `<b>${data.ops.id[op]}</b> ${escaped(data.kinds[data.ops.kind[op]].name)}` +
    `<span>measured ${time(duration(op, measured))}</span>` +
    `<span>predicted ${time(duration(op, predicted))}, ${error(op)}</span>`;
}

function follow(canvas, picture, tip) {
  canvas.addEventListener("pointermove", (event) => {
    const x = event.offsetX, inside = x >= timeline.left && x <= timeline.left + timeline.width;
    view.cursor = inside ? timeline.at(x) : null;
    showTip(event, drag ? "" : tip(event));
    view.redraw();
  });
  canvas.addEventListener("pointerleave", (event) => {
    view.cursor = null;
    showTip(event, "");
    view.redraw();
  });
}

let drag = null;
follow(timeline.canvas, timeline, (event) => {
  const op = timeline.opAt(event.offsetX, event.offsetY);
  timeline.canvas.style.cursor = op < 0 ? "" : "pointer";
  return op < 0 ? "" : opTip(op);
});
follow(memory.canvas, memory, (event) => {
  const found = memory.heldAt(event.offsetX, event.offsetY);
  if (!found) return found;
  const classes = found.held.map(([name, size]) => `<span>${name} ${bytes(size)}</span>`).join("");
  return `<b>${found.place} ${bytes(found.total)}</b> at ${time(found.at)}${classes}`;
});
training.canvas.addEventListener("pointermove", (event) => {
  training.hovered = training.steps.length ? training.stepAt(event.offsetX) : -1;
  showTip(event, training.hovered < 0 ? "" : training.described(training.hovered));
  training.draw();
});
training.canvas.addEventListener("pointerleave", (event) => {
  training.hovered = -1;
  showTip(event, "");
  training.draw();
});

// ---- zooming and moving ----

timeline.canvas.addEventListener("pointerdown", (event) => {
  if (event.button) return;
  timeline.canvas.setPointerCapture(event.pointerId);
  drag = { x: event.offsetX, from: view.from, moved: false };
});
timeline.canvas.addEventListener("pointermove", (event) => {
  if (!drag) return;
  drag.moved = drag.moved || Math.abs(event.offsetX - drag.x) > 3;
  if (!drag.moved) return;
  timeline.canvas.classList.add("dragging");
  const ns = ((drag.x - event.offsetX) / timeline.width) * (view.to - view.from);
  view.set(drag.from + ns, drag.from + ns + (view.to - view.from));
});
timeline.canvas.addEventListener("pointerup", (event) => {
  if (drag && !drag.moved) select(timeline.opAt(event.offsetX, event.offsetY));
  drag = null;
  timeline.canvas.classList.remove("dragging");
});
timeline.canvas.addEventListener("dblclick",
  (event) => view.zoom(0.3, timeline.at(event.offsetX), true));
for (const canvas of [timeline.canvas, memory.canvas]) {
  canvas.addEventListener("wheel", (event) => {
    const factor = Math.exp(Math.max(-120, Math.min(event.deltaY, 120)) / 300);
    const moved = (event.deltaX / timeline.width) * (view.to - view.from);
    if (event.ctrlKey || event.metaKey) view.zoom(factor, timeline.at(event.offsetX));
    else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) view.pan(moved);
    else return;  // the page scrolls
    event.preventDefault();
  }, { passive: false });
}

const showAll = () => view.glide(0, view.end);
const KEYS = {
  "+": () => view.zoom(0.6, undefined, true),
  "=": () => view.zoom(0.6, undefined, true),
  "-": () => view.zoom(1 / 0.6, undefined, true),
  0: showAll,
  ArrowLeft: () => view.pan(-0.15 * (view.to - view.from)),
  ArrowRight: () => view.pan(0.15 * (view.to - view.from)),
  Escape: () => select(-1),
};
timeline.canvas.addEventListener("keydown", (event) => {
  if (!KEYS[event.key] || event.ctrlKey || event.metaKey) return;
  KEYS[event.key]();
  event.preventDefault();
});
element("in").addEventListener("click", () => view.zoom(0.5, undefined, true));
element("out").addEventListener("click", () => view.zoom(2, undefined, true));
element("all").addEventListener("click", showAll);
element("find").addEventListener("input", (event) => event.target.classList.remove("wrong"));
element("find").addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  const wanted = event.target.value.trim().toLowerCase(), ids = data.ops.id;
  const matches = [
    (id) => id === wanted, (id) => id.startsWith(`${wanted}.`), (id) => id.startsWith(wanted),
  ];
  const found = matches.map((fits) => ids.findIndex((id) => fits(id.toLowerCase())))
    .find((place) => place >= 0);
  if (wanted && found !== undefined) reveal(found); else event.target.classList.add("wrong");
});

// ---- legends ----

data.kinds.forEach((kind, index) => {
  const button = document.createElement("button");
  button.innerHTML = `<i data-colour="${kind.colour}"></i>${escaped(kind.name)}`;
  button.title = "Show only this kind";
  button.setAttribute("aria-pressed", "false");
  button.addEventListener("click", () => {
    timeline.chosenKind = timeline.chosenKind === index ? -1 : index;
    for (const other of element("kinds").children) {
      const pressed = other === button && timeline.chosenKind >= 0;
      other.setAttribute("aria-pressed", String(pressed));
    }
    view.redraw();
  });
  element("kinds").append(button);
});
const held = new Set(
  Object.values(data.memory.places).flatMap((place) => Object.keys(place.measured.classes)));
element("classes").innerHTML = Object.entries(data.memory.classes)
  .filter(([name]) => held.has(name))
  .map(([name, colour]) => `<span><i data-colour="${colour}"></i>${name}</span>`).join("")
    + "<span><i class=line></i>predicted</span>";

element("curves").innerHTML = training.legend();

/** Colours the legends for a light or a dark page. */
function colourLegends() {
  for (const swatch of document.querySelectorAll(".legend i[data-colour]")) {
    swatch.style.background = visible(swatch.dataset.colour);
  }
}

// A printer needs the pictures at once, so they are drawn now and not in the next frame.
onColourChange(() => {
  colourLegends();
  timeline.recolour();
  for (const draw of view.drawers) draw();
  training.draw();
});

colourLegends();
select(-1);
new ResizeObserver(() => { view.redraw(); training.draw(); }).observe(document.body);
training.draw();
