// Page: asks `source` for the answer to the fields, and shows it.

const KNOBS = ["host-memory", "seq", "batch", "accumulation"];
const CHOICES = ["hardware", "policy", "clipping", "state", "optimizer"];
const TYPING = 350, TURNING = 120;
const PATIENCE = 500;  // after so many ms without a verdict, the page shows what is known so far
const cache = new Map();
let library, state, stops, answer = null, turn = 0, comparing = 0, waiting = 0;
let controller = new AbortController();

/** Returns an answer of the source, or the kept one if the same was asked before. */
async function ask(part, question, now) {
  const key = part + JSON.stringify(question);
  if (!cache.has(key)) {
    const found = await source.ask(part, question, now, controller.signal);
    if (cache.size > 300) cache.delete(cache.keys().next().value);
    cache.set(key, found);
  }
  return cache.get(key);
}

/** Applies changes to the state. Asks if no other change follows within `delay` ms. */
function change(changes, delay = 0) {
  Object.assign(state, changes);
  history.replaceState(null, "", `?${queryOf(state)}`);
  fill();
  at("answer").setAttribute("aria-busy", "true");
  at("answer").classList.add("stale");  // what is shown answers another question
  for (const id of ["copy-command", "download"]) at(id).disabled = true;  // until they are right
  turn += 1;  // an answer that arrives before `refresh` is one to another question, too
  clearTimeout(waiting);
  waiting = setTimeout(refresh, delay);
}

async function refresh() {
  controller.abort();
  controller = new AbortController();
  turn += 1;
  const now = turn, question = questionOf(state);
  const failed = (error) => {
    if (now !== turn || error.name === "AbortError") return;
    at("error").textContent = error.message;
    at("error").hidden = false;
    at("advice-section").hidden = true;
    if (at("answer").classList.contains("first")) sayOfFirst("the search for better ones failed");
    if (at("answer").classList.contains("stale")) {  // otherwise, what is shown stays
      at("answer").hidden = at("keep").hidden = true;
      at("answer").classList.remove("planning", "first", "stale");
      answer = null;
    }
    at("answer").setAttribute("aria-busy", "false");
  };
  try {
    expect(question, now);
    const first = await ask("verdict", question, now);
    if (now !== turn) return;
    show(first);
    const full = await ask("advice", question, now);
    if (now !== turn) return;
    answer = { ...first, ...full };
    showVerdict(answer, parseCount(state.tokens));
    showAdvice(answer, canTry, (options) => change({ ...options,
      ...(options.model ? { config: "" } : {}) }));
    at("download").disabled = false;
    document.body.dataset.ready = String(now);
    await compare(now);
  } catch (error) {
    failed(error);
  }
}

/** Shows the verdict about a first plan, which is probably not the best, if the verdict takes longer
    than `PATIENCE`. Without such a plan, shows what is known without one. */
async function expect(question, now) {
  const waits = new Promise((resolve) => setTimeout(resolve, PATIENCE));
  let hasPlan = false;
  const expectPart = async (part, put) => {
    const [found] = await Promise.all([ask(part, question, now), waits]);
    const planning = now === turn && at("answer").getAttribute("aria-busy") === "true";
    if (!planning || !found || hasPlan) return;
    hasPlan = part === "first";
    at("error").hidden = true;
    at("answer").hidden = false;
    at("keep").hidden = true;
    answer = null;
    put(found, parseCount(state.tokens));
  };
  // If one fails, the verdict fails in the same way.
  await Promise.allSettled([expectPart("first", showFirst), expectPart("outlook", showOutlook)]);
}

function show(first) {
  answer = first;
  at("answer").classList.remove("planning", "first", "stale");
  // A link has names of the library. Of a config, it has only the keys that are read.
  if (first.config && state.config) state.config = JSON.stringify(first.config);
  if (state.hardware) state.hardware = first.machine.name;
  history.replaceState(null, "", `?${queryOf(state)}`);
  at("error").hidden = true;
  at("answer").hidden = at("keep").hidden = false;
  at("answer").setAttribute("aria-busy", "false");
  showCommand();
  showTrying(first);
  showVerdict(first, parseCount(state.tokens));
  showTimeline(first.timeline);
  fill();
}

/** Returns whether the page has a field for an option of an advice. */
function canTry([key, value]) {
  return !library.grid && [...ASKED, "tokens"].includes(key) && key !== "config" && value !== "";
}

/** Shows the command, or a mistake in the tokens, which the command would lack. */
function showCommand() {
  const mistake = mistakeOf(state.tokens);
  at("tokens-error").textContent = mistake;
  at("tokens-error").hidden = !mistake;
  at("tokens").setAttribute("aria-invalid", String(Boolean(mistake)));
  at("copy-command").disabled = Boolean(mistake)
    || at("answer").getAttribute("aria-busy") === "true";
  const tokens = parseCount(state.tokens) ? ` --tokens ${state.tokens.replace(/\s/g, "")}` : "";
  const words = answer ? (answer.command + tokens).split(/ (?=--)/) : [];
  at("command").replaceChildren(...words.flatMap((textContent, place) =>
    [...(place ? [" "] : []), make("span", { textContent })]));
}

// ---- the comparison ----

const list = (text) => text.split(",").filter(Boolean);

/** Fills the table. Stops if another question was asked, or another table was started. */
async function compare(now) {
  const mine = comparing += 1;
  const names = list(state.machines), policies = list(state.policies);
  const rows = names.map((name) => ({ name, title: titleOf(name), answer: null, error: "" }));
  showComparison(rows, policies);
  if (!policies.length) return;
  for (const row of rows) {
    const question = { ...questionOf(state), hardware: row.name, policy: "" };
    try {
      row.answer = await ask("policies", question, now);
    } catch (error) {
      if (error.name === "AbortError") return;
      row.error = error.message;
    }
    if (now !== turn || mine !== comparing) return;
    showComparison(rows, policies);
  }
  at("comparison").dataset.ready = `${now}`;
}

function titleOf(name) {
  const found = library.machines.find((machine) => machine.name === name);
  return found ? found.title : name;
}

function chips(id, key, entries) {
  at(id).replaceChildren(...entries.map(([name, title]) => {
    const box = make("input", { type: "checkbox", value: name, name: key,
      checked: list(state[key]).includes(name) });
    box.addEventListener("change", () => {
      const chosen = [...at(id).querySelectorAll(":checked")].map((each) => each.value);
      state[key] = chosen.join(",");
      history.replaceState(null, "", `?${queryOf(state)}`);
      compare(turn);
    });
    return make("label", {}, box, title);
  }));
}

// ---- the fields ----

/** Returns the host memory of the machine, or 0 if the machine is not known (yet). */
function hostBytes() {
  const named = library.machines.find(({ name }) => name === state.hardware);
  const found = state.hardware ? named || (answer && answer.machine) : library.this_machine;
  return found ? found.host_bytes : 0;
}

/** Writes the state into the fields, except a text field that has the focus. */
function fill() {
  const put = (id, value) => {
    if (document.activeElement !== at(id)) at(id).value = value;
  };
  const host = hostBytes();
  put("model", state.model);
  put("config", state.config);
  put("tokens", state.tokens);
  for (const id of CHOICES) at(id).value = state[id];
  const [usual] = library.states;
  at("state-what").textContent = (library.states.find(({ name }) => name === state.state)
    || usual).what;
  for (const id of KNOBS) {
    put(id, state[id].replace(/\s*GiB$/i, ""));
    const own = id === "host-memory" && host ? `${host / 2 ** 30}GiB` : "";
    const slider = at(`${id}-slider`), place = nearestStop(stops[id], state[id] || own);
    slider.value = place;
    slider.setAttribute("aria-valuetext", stops[id][place] || at(id).placeholder);
  }
  at("host-memory").placeholder = host && !state["host-memory"]
    ? Math.round(host / 2 ** 30).toLocaleString("en") : "";
  const work = answer && answer.verdict.workload;
  at("batch").placeholder = work && answer.verdict.batch_chosen ? `auto: ${work.batch}` : "auto";
  const batch = Number(state.batch || (work ? work.batch : 0));
  const tokens = batch * Number(state.seq) * Number(state.accumulation || 1);
  at("step-tokens").textContent = tokens ? `${tokens.toLocaleString("en")} tokens a step` : "";
}

function choices(select, entries) {
  select.replaceChildren(...entries.map(([value, textContent]) =>
    make("option", { value, textContent })));
}

const gib = (size) => `${Math.round(size / 2 ** 30).toLocaleString("en")} GiB`;

function setUp() {
  at("models").replaceChildren(
    ...library.models.map(({ name }) => make("option", { value: name })));
  const mine = library.this_machine;
  choices(at("hardware"), [
    ...(mine ? [["", `${mine.title}, ${gib(mine.device_bytes)}`]] : []),
    ...library.machines.map(({ name, title, device_bytes }) =>
      [name, `${title}, ${gib(device_bytes)}`]),
  ]);
  const { own, others } = library.policies;
  const spaced = (name) => [name, name.replace(/_/g, " ")];
  choices(at("policy"), [["", "fastest"], ...own.map(spaced)]);
  const group = make("optgroup", { label: "Other systems" });
  choices(group, others.map(spaced));
  at("policy").append(group);
  choices(at("state"), library.states.map(({ name }, place) => [place ? name : "", name]));
  choices(at("optimizer"), [["", "adamw"], ...library.optimizers
    .filter((name) => name !== "adamw").map((name) => [name, name])]);
  chips("compared-machines", "machines",
    library.machines.map(({ name, title }) => [name, title]));
  chips("compared-policies", "policies", [...own, ...others].map(spaced));
  for (const id of KNOBS) {
    const slider = at(`${id}-slider`);
    Object.assign(slider, { min: 0, max: stops[id].length - 1, step: 1 });
    slider.addEventListener("input",
      () => change({ [id]: stops[id][Number(slider.value)] }, TURNING));
    at(id).addEventListener("input", () => {
      const text = at(id).value.trim().replace(/,/g, "");
      const value = id === "host-memory" && /^\d+(\.\d+)?$/.test(text) ? `${text}GiB` : text;
      change({ [id]: value }, TYPING);
    });
    at(id).addEventListener("blur", fill);
  }
  for (const id of CHOICES) {
    at(id).addEventListener("change", () => change({ [id]: at(id).value }));
  }
  at("tokens").addEventListener("input", () => {
    Object.assign(state, { tokens: ungrouped(at("tokens").value) });
    history.replaceState(null, "", `?${queryOf(state)}`);
    if (answer) showVerdict(answer, parseCount(state.tokens));
    showCommand();
  });
  const nameModel = (delay) => {
    const text = at("model").value.trim();
    if (text.startsWith("{")) {  // a config, pasted into the wrong field
      at("paste").open = true;
      at("model").value = "";
      change({ config: text, model: "" });
    } else if (text ? text !== state.model || state.config : state.model) {
      change({ model: text, config: text ? "" : state.config }, delay);
    }
  };
  at("model").addEventListener("input", () => {
    const text = at("model").value.trim();
    const known = library.models.some(({ name }) => name === text);
    if (known || text.startsWith("{")) nameModel(TYPING);
  });
  at("model").addEventListener("change", () => nameModel(0));
  at("config").addEventListener("input", () => {
    const config = at("config").value.trim();
    if (config || state.config) change({ config, model: "" }, TYPING);
  });
  at("ask").addEventListener("submit", (event) => event.preventDefault());
  at("copy-command").addEventListener("click", () => copy(at("command").textContent));
  at("copy-link").addEventListener("click", () => copy(location.href));
  at("download").addEventListener("click", download);
  if (library.grid) {
    for (const id of ["host-memory-knob", "accumulation-knob", "more", "paste"]) {
      at(id).hidden = true;
    }
    for (const id of ["seq", "batch"]) at(id).readOnly = true;
    at("stored").hidden = false;
  }
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    at("said").textContent = "Copied.";
  } catch {
    at("said").textContent = `Copy it here: ${text}`;
  }
}

/** Saves the verdict in the form that `megatrain check --json` prints. */
function download() {
  if (!answer) return;
  const training = scaled(answer.verdict.training, parseCount(state.tokens));
  const text = JSON.stringify({ ...answer.verdict, training }, null, 2);
  const href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  make("a", { href, download: "verdict.json" }).click();
  setTimeout(() => URL.revokeObjectURL(href), 1000);
}

async function begin() {
  library = await source.library();
  const { grid, models, machines, policies } = library;
  stops = grid ? { ...STOPS, batch: grid.batch.map(String), seq: grid.seq.map(String) } : STOPS;
  const has = (entries, name) => entries.some((each) => each.name === name);
  const first = (entries, name) => (has(entries, name) ? name : entries[0].name);
  state = readState(location.search, {
    model: first(models, "qwen2.5-7b"),
    hardware: library.this_machine ? "" : first(machines, "rtx4090"),
    seq: stops.seq.includes("1024") ? "1024" : stops.seq[0],
    batch: grid ? stops.batch[0] : "",
    tokens: "100M",
    policies: policies.own.join(","),
  });
  for (const [key, usual] of Object.entries(USUAL)) {
    if (state[key] === usual) state[key] = "";
  }
  at("paste").open = Boolean(state.config);
  setUp();
  change({});
}

begin();
