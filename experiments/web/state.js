// State: the values of the fields, as in the page's address. They are written as on the command
// line.

const ASKED = ["model", "config", "hardware", "host-memory", "batch", "seq", "accumulation",
  "policy", "clipping", "state", "optimizer"];
const KEPT = [...ASKED, "tokens", "machines", "policies"];
/** The command's defaults, which the page leaves out. */
const USUAL = { policy: "best", clipping: "global", state: "exact", optimizer: "adamw" };
const GIB = [16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192];
/** The values of each slider. The empty value lets the planner choose the micro-batch. */
const STOPS = {
  "host-memory": GIB.map((size) => `${size}GiB`),
  seq: ["256", "512", "1024", "2048", "4096", "8192", "16384", "32768", "65536", "131072"],
  batch: ["", "1", "2", "4", "8", "16", "32", "64", "128"],
  accumulation: ["1", "2", "4", "8", "16", "32", "64"],
};

function emptyState() { return Object.fromEntries(KEPT.map((key) => [key, ""])); }

/** Returns the state in the query of an address, with `defaults` for the keys it leaves out. */
function readState(query, defaults) {
  const found = Object.fromEntries([...new URLSearchParams(query)]
    .filter(([key]) => KEPT.includes(key)));
  const model = found.config && !found.model ? { model: "" } : {};
  if (found.tokens) found.tokens = ungrouped(found.tokens);
  return { ...emptyState(), ...defaults, ...model, ...found };
}

function queryOf(state) {
  return new URLSearchParams(KEPT.filter((key) => state[key]).map((key) => [key, state[key]]));
}

function questionOf(state) {
  return Object.fromEntries(ASKED.map((key) => [key, state[key]]));
}

/** Returns the number that a text such as 1.5M means, or null. The command accepts the same, and
    rounds in the same way (`parse_count` in simulator/base/units.py). */
function parseCount(text) {
  const match = /^\s*(\d+(?:\.\d+)?)\s*([kmgbt]?)\s*$/i.exec(text);
  const units = { "": 1, k: 1e3, m: 1e6, g: 1e9, b: 1e9, t: 1e12 };
  const product = match ? Number(match[1]) * units[match[2].toLowerCase()] : 0;
  const nearest = Math.round(product);
  const count = nearest - product === 0.5 && nearest % 2 ? nearest - 1 : nearest;
  return 0 < count && count < 2 ** 60 ? count : null;
}

/** Returns a number without the blanks around it and the commas between its groups of three digits.
 */
function ungrouped(text) {
  const number = text.trim();
  return /^\d{1,3}(,\d{3})+(?![\d,])/.test(number) ? number.replace(/,/g, "") : number;
}

/** Returns what is wrong with a number of tokens, or an empty text. */
function mistakeOf(tokens) {
  return !tokens || parseCount(tokens) ? "" : `tokens: found '${tokens}'; allowed: a positive ` +
    "number with k, M, B or T; fix: write it like 1B";
}

/** Returns the index of the stop whose ratio to a value is nearest to 1. */
function nearestStop(stops, value) {
  if (stops.includes(value)) return stops.indexOf(value);
  const far = (stop) => Math.abs(Math.log(parseFloat(stop) / parseFloat(value)));
  return stops.reduce((best, stop, place) =>
    (stop && (!stops[best] || far(stop) < far(stops[best])) ? place : best), 0);
}

/** Returns a verdict's time and energy, scaled to a training on `tokens`. */
function scaled(training, tokens) {
  if (!training || !tokens) return null;
  const share = tokens / training.tokens;
  const times = (value) => (value === null ? null : value * share);
  return { ...training, tokens, hours: times(training.hours), hours_low: times(training.hours_low),
    hours_high: times(training.hours_high), days: times(training.days),
    energy_kwh: times(training.energy_kwh) };
}

/** Returns a time in hours, and its range, in minutes, hours or days. `megatrain check` writes them
    in the same way. */
function duration(time, low, high) {
  const [unit, factor, digits] = time > 48 ? ["days", 1 / 24, 1]
    : time >= 1 ? ["hours", 1, 1] : ["minutes", 60, 0];
  const text = (value) => (value * factor).toLocaleString("en",
    { minimumFractionDigits: digits, maximumFractionDigits: digits });
  const range = low === null || text(low) === text(high) ? "" : `${text(low)} to ${text(high)}`;
  return { text: `${text(time)} ${unit}`, range };
}
