// Show: writes an answer into the page. An answer's text is always set as text, never as HTML.

const at = (id) => document.getElementById(id);

function make(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function swatch(colour) {
  const made = make("i");
  made.style.background = colour.startsWith("#") ? visible(colour) : colour;
  return made;
}

function segment(share, colour, title) {
  const made = Object.assign(swatch(colour), { title });
  made.style.width = `${100 * share}%`;
  return made;
}

function showAnswer(shown) {
  at("yes").textContent = shown.answer;
  at("yes").classList.toggle("no", shown.answer !== "YES");
  // A no-break space keeps a number and its unit on one line.
  at("sentence").textContent = shown.sentence.replace(/(\d) (?=([KMGT]iB|[kMBT])\b)/g, "$1\u00a0");
}

/** Shows whether the model fits, with only those numbers that are the same for every plan. */
function showOutlook({ shown }) {
  at("answer").classList.add("planning");
  at("answer").classList.remove("first", "stale");
  showAnswer(shown);
  at("figures").hidden = !shown.speed;
  at("figures").replaceChildren(figure("Speed", shown.speed ? `${shown.speed} tokens/s` : "",
    `for ${shown.step_tokens}; plans are being compared`, "speed"));
  at("memory-section").hidden = !shown.memory;
  at("memory").replaceChildren(...(shown.memory || []).map(placeOf));
  at("room").textContent = "";
  showTrying({ verdict: { feasible: shown.answer === "YES" } });
}

/** Shows the verdict about a plan while better ones are searched. */
function showFirst(found, tokens) {
  at("answer").classList.add("first");
  at("answer").classList.remove("planning", "stale");
  showVerdict(found, tokens);
  showTimeline(found.timeline);
  sayOfFirst("better ones are being searched");
}

/** Says what happens after the first plan, which is shown. */
function sayOfFirst(text) {
  at("speed").querySelector("small").textContent = `the first plan found; ${text}`;
}

function showVerdict({ verdict, shown }, tokens) {
  showAnswer(shown);
  showFigures(verdict, shown, tokens);
  at("memory-section").hidden = false;
  at("memory").replaceChildren(...shown.memory.map(placeOf));
  at("room").textContent = shown.room && `Room: ${shown.room}.`;
  at("step-section").hidden = !verdict.feasible;
  const colours = { compute: "var(--mark)", copies: "#2e9e6b", host_optimizer: "#8e5aa8",
    device_optimizer: "#e07b39", nothing_else: "var(--idle)" };
  const percents = (share) => `${Math.round(100 * share)}%`;
  at("shares").replaceChildren(...shown.waits.map(
    ({ name, kind, share }) => segment(share, colours[kind], `${name} ${percents(share)}`)));
  at("waits").replaceChildren(...shown.waits.map(({ name, kind, share }) =>
    make("li", {}, swatch(colours[kind]), name, make("b", { textContent: percents(share) }))));
  at("stays").hidden = !shown.stays;
  at("notes").replaceChildren(...shown.notes.map((textContent) => make("li", { textContent })));
  at("reasons").replaceChildren(...shown.reasons.flatMap(([label, text]) =>
    [make("dt", { textContent: label }), make("dd", { textContent: text })]));
}

function figure(name, value, remark, id) {
  return make("div", {}, make("dt", { textContent: name }),
    make("dd", { id }, value, make("small", { textContent: remark })));
}

function showFigures(verdict, shown, tokens) {
  const training = scaled(verdict.training, tokens);
  const took = training && duration(training.hours, training.hours_low, training.hours_high);
  const kwh = training && training.energy_kwh;
  const energy = kwh === null || kwh === undefined ? ""
    : `${kwh.toLocaleString("en", { maximumSignificantDigits: 3 })} kWh of GPU energy`;
  at("figures").hidden = !verdict.feasible;
  if (!verdict.feasible) return;
  at("figures").replaceChildren(
    figure("Speed", `${shown.speed} tokens/s`, [shown.spread, shown.source].filter(Boolean)
      .join("; "), "speed"),
    figure("Time", took ? took.text : "-", took ? [took.range, energy].filter(Boolean).join("; ")
      : "give the tokens to train on", "time"),
    figure("One step", shown.step, shown.step_tokens, "step"),
    figure("MFU", shown.mfu || "-", "of the GPU's peak by its datasheet", "mfu"));
}

function placeOf({ label, peak, limit, peak_bytes, limit_bytes, too_little, parts }) {
  const whole = Math.max(peak_bytes, limit_bytes), bar = make("div", { className: "bar" });
  bar.append(...parts.map(({ name, size, bytes, colour }) =>
    segment(bytes / whole, colour, `${name} ${size}`)));
  const line = make("div", { className: "line" }, make("b", { textContent: label }),
    make("span", { textContent: `${peak} of ${limit}` }));
  if (too_little) {
    line.append(make("span", { className: "over", textContent: `${too_little} too little` }));
    const mark = make("u", { title: `limit ${limit}` });
    mark.style.left = `calc(${(100 * limit_bytes) / whole}% - 2px)`;
    bar.append(mark);
  }
  const legend = make("ul", { className: "legend" }, ...parts.map(({ name, size, colour }) =>
    make("li", {}, swatch(colour), name, make("b", { textContent: size }))));
  return make("div", { className: "place" }, line, bar, legend);
}

/** Returns an advice in words: its options, or `name` if it has no options or unknown ones. */
function inWords(name, options) {
  const words = {
    "host-memory": (value) => `${value.replace(/(?=GiB|MiB)/, " ")} of host memory`,
    seq: (value) => `a context of ${Number(value).toLocaleString("en")} tokens`,
    batch: (value) => `${value} ${value === "1" ? "sequence" : "sequences"} a micro-batch`,
    accumulation: (value) => `${value} micro-batches a step`,
    state: (value) => `the state format ${value}`,
    clipping: (value) => (value === "none" ? "no clipping" : `clipping by ${value}`),
    hardware: (value) => `the machine ${titleOf(value)}`,
  };
  const known = Object.entries(options).map(([key, value]) => words[key] && words[key](value));
  return known.length && known.every(Boolean) ? known.join(", ") : name;
}

/** Shows that the planner is trying changes. */
function showTrying({ verdict }) {
  at("trying").hidden = at("advice-section").hidden = false;
  at("advice-title").textContent = verdict.feasible ? "What would be faster" : "What would help";
  at("advice").replaceChildren();
}

/** Shows the changes that would help. If all options of a change are ones that `can` accepts, it
    has a button that calls `apply` with them. */
function showAdvice({ verdict, shown }, can, apply) {
  at("trying").hidden = true;
  at("advice-title").textContent = verdict.feasible ? "What would be faster"
    : shown.advice.some((_, place) => verdict.advice[place].fits) ? "What would do"
      : "What would help";
  at("advice-section").hidden = !shown.advice.length;
  at("advice").replaceChildren(...shown.advice.map(({ name, gain, speed, note, options }) => {
    const said = inWords(name, options);
    const row = make("li", {}, make("b", { textContent: said }),
      make("span", { className: "gain", textContent: gain }), make("span", { textContent: speed }),
      make("span", { className: "said", textContent: note }));
    if (Object.keys(options).length && Object.entries(options).every(can)) {
      row.append(make("button", { type: "button", textContent: "Try",
        ariaLabel: `Try ${said}`, onclick: () => apply(options) }));
    }
    return row;
  }));
}

// ---- the simulated step ----

let view = null, timeline = null;

function showTimeline(data) {
  for (const id of ["timeline", "tools", "kinds", "readout"]) at(id).hidden = !data;
  at("readout").textContent = "";
  timeline = view = null;
  if (!data) return;
  const ns = (times) => times.map((time) => time * 1000);
  const [start, end] = [ns(data.start), ns(data.end)];
  view = new View(end.reduce((most, value) => Math.max(most, value), 1));
  timeline = new TimelineCanvas(at("timeline"), { lanes: data.lanes, kinds: data.kinds,
    ops: { id: data.id, kind: data.kind, lane: data.lane, after: data.id.map(() => []),
      predicted: [start, end] } }, view);
  at("kinds").replaceChildren(...data.kinds.map(({ name, colour }) =>
    make("li", {}, swatch(colour), name)));
  view.redraw();
}

function readOp(op) {
  const [panel] = timeline.panels, { id, kind } = timeline.ops;
  return `${id[op]}: ${timeline.kinds[kind[op]].name}, ` +
    `${time(panel.end[op] - panel.start[op])} from ${time(panel.start[op])}`;
}

{
  const canvas = at("timeline");
  let drag = null;
  canvas.addEventListener("pointermove", (event) => {
    if (!timeline) return;
    if (drag) {
      const moved = ((drag.x - event.offsetX) / timeline.width) * (view.to - view.from);
      view.set(drag.from + moved, drag.from + moved + (view.to - view.from));
      return;
    }
    const op = timeline.opAt(event.offsetX, event.offsetY);
    at("readout").textContent = op < 0 ? "" : readOp(op);
  });
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button || !view) return;
    canvas.setPointerCapture(event.pointerId);
    drag = { x: event.offsetX, from: view.from };
  });
  canvas.addEventListener("pointerup", () => { drag = null; });
  canvas.addEventListener("pointercancel", () => { drag = null; });
  canvas.addEventListener("wheel", (event) => {
    if (!view || !(event.ctrlKey || event.metaKey)) return;  // the page scrolls
    view.zoom(Math.exp(Math.max(-120, Math.min(event.deltaY, 120)) / 300),
      timeline.at(event.offsetX));
    event.preventDefault();
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const act = { "+": () => view.zoom(0.5), "-": () => view.zoom(2),
      0: () => view.set(0, view.end), ArrowLeft: () => view.pan((view.from - view.to) / 4),
      ArrowRight: () => view.pan((view.to - view.from) / 4) }[event.key];
    if (act && view) { act(); event.preventDefault(); }
  });
  at("in").addEventListener("click", () => view && view.zoom(0.5, undefined, true));
  at("out").addEventListener("click", () => view && view.zoom(2, undefined, true));
  at("all").addEventListener("click", () => view && view.glide(0, view.end));
  addEventListener("resize", () => view && view.redraw());
  onColourChange(() => {
    if (!view) return;
    timeline.recolour();
    view.redraw();
  });
}

// ---- the comparison ----

/** Writes one row for each machine. A row without an answer shows "...". */
function showComparison(rows, policies) {
  const table = at("comparison");
  table.hidden = !rows.length || !policies.length;
  const cell = (row, policy, best) => {
    const found = row.answer && row.answer.rows.find((each) => each.policy === policy);
    if (!found) return make("td", { className: "lacks", textContent: row.answer ? "-" : "..." });
    if (!found.feasible) {
      return make("td", { className: "lacks", textContent: `lacks ${found.lacks}` });
    }
    return make("td", { className: found === best ? "best" : "", textContent: found.speed,
      title: `${found.step} a step, ${found.batch} sequences a micro-batch` });
  };
  const head = make("tr", {}, make("th", { scope: "col", textContent: "" }),
    ...policies.map((name) => make("th", { scope: "col", textContent: name.replace(/_/g, " ") })));
  const body = rows.map((row) => {
    const title = make("th", { scope: "row", textContent: row.title });
    if (row.error) {
      const wide = { colSpan: policies.length, className: "lacks", textContent: row.error };
      return make("tr", {}, title, make("td", wide));
    }
    const [best] = row.answer ? row.answer.rows.filter(
      ({ feasible, policy }) => feasible && policies.includes(policy)) : [];
    return make("tr", {}, title, ...policies.map((policy) => cell(row, policy, best)));
  });
  table.replaceChildren(make("thead", {}, head), make("tbody", {}, ...body));
}
