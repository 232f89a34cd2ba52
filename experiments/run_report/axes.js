// Axes: colours of the page, formatted numbers, round ticks, and a canvas with the resolution of
// the screen.

// The colours of the pictures are those of the style sheet, which has one set for light and one for
// dark screens.
let INK, MUTED, RULE, PALE, MARK, GROUND, VEIL, CURSOR, AXIS_LINE, DARK;
const FONT = getComputedStyle(document.body).fontFamily;
const DARK_INK = "#1f2933";

/** Returns a colour of the style sheet, such as `ink`. */
function themed(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** Reads the current colours, light or dark. */
function readColours() {
  [INK, MUTED, RULE, PALE, MARK, GROUND, VEIL, CURSOR, AXIS_LINE] = ["ink", "muted", "rule", "pale",
    "mark", "ground", "veil", "cursor", "axis"].map(themed);
  DARK = lightness(GROUND) < 0.5;
}

/** Calls `redraw` with the new colours when the screen changes between light and dark, and when the
    page is printed. */
function onColourChange(redraw) {
  for (const query of ["(prefers-color-scheme: dark)", "print"]) {
    window.matchMedia(query).addEventListener("change", () => {
      readColours();
      redraw();
    });
  }
}

/** Returns the brightness of a colour such as #1f5f9e, from 0 to 1. */
function lightness(colour) {
  const [red, green, blue] = [1, 3, 5]
    .map((place) => parseInt(colour.slice(place, place + 2), 16) / 255);
  return 0.299 * red + 0.587 * green + 0.114 * blue;
}

/** Returns the ratio of the luminances of two colours, from 1 to 21, as WCAG defines it. */
function contrast(first, second) {
  const luminance = (colour) => [1, 3, 5]
    .map((place) => parseInt(colour.slice(place, place + 2), 16) / 255)
    .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
    .reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0);
  const [low, high] = [luminance(first), luminance(second)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}

/** Returns a colour with enough contrast: on a dark page, a dark colour becomes lighter. */
function visible(colour) {
  let found = colour;
  while (DARK && contrast(found, PALE) < 3) {
    found = "#" + [1, 3, 5].map((place) => {
      const part = parseInt(found.slice(place, place + 2), 16);
      return Math.round(part + 0.12 * (255 - part)).toString(16).padStart(2, "0");
    }).join("");
  }
  return found;
}

readColours();

/** Formats nanoseconds in the units of the tables: 4.342 s, 21.600 ms, 12.3 us. */
function time(ns) {
  const size = Math.abs(ns);
  if (size >= 1e9) return rounded(ns / 1e9, 3) + " s";
  if (size >= 1e6) return rounded(ns / 1e6, 3) + " ms";
  return rounded(ns / 1e3, 1) + " us";
}

/** Rounds as the tables do: a tie is rounded to the even digit. toFixed rounds it up. */
function rounded(value, digits) {
  const scaled = value * 10 ** digits, below = Math.floor(scaled);
  const halfway = scaled - below === 0.5 && Number.isInteger(value * 2 ** (digits + 1));
  return (halfway && below % 2 === 0 ? below / 10 ** digits : value).toFixed(digits);
}

function percent(share, digits = 1) {
  const shown = (100 * share).toFixed(digits);
  return (shown.startsWith("-") ? "" : "+") + shown + " %";
}

function bytes(size) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (size >= 1024 && unit < units.length - 1) { size /= 1024; unit += 1; }
  return (unit ? size.toFixed(2) : size.toFixed(0)) + " " + units[unit];
}

/** Returns about `count` round numbers from `from` to `to`, and the step between them. */
function ticks(from, to, count) {
  const rough = (to - from) / Math.max(count, 1), power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const found = [];
  for (let index = Math.ceil(from / step); index * step <= to * (1 + 1e-9); index += 1) {
    found.push(index * step + 0);  // turns -0 into 0, because a label would show the sign
  }
  return { step, values: found };
}

/** Returns time ticks with labels. All have one unit and as many digits as the step needs. */
function timeLabels(from, to, count) {
  const [scale, unit] = to - from >= 2e9 || to >= 2e10 ? [1e9, "s"]
    : to - from >= 2e6 ? [1e6, "ms"] : [1e3, "us"];
  const { step, values } = ticks(from / scale, to / scale, count);
  const digits = Math.max(0, Math.min(6, -Math.floor(Math.log10(step) + 1e-9)));
  const shown = { minimumFractionDigits: digits, maximumFractionDigits: digits };
  return values.map((value) => (
    { at: value * scale, text: `${value.toLocaleString("en", shown)} ${unit}` }));
}

/** Returns a cleared drawing context in CSS pixels, as wide as the canvas and `height` tall. */
function prepare(canvas, height) {
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
  const wide = Math.round(width * ratio), tall = Math.round(height * ratio);
  if (canvas.width !== wide || canvas.height !== tall) {
    canvas.width = wide;
    canvas.height = tall;
    canvas.style.height = height + "px";
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.textBaseline = "middle";
  return context;
}

function write(context, text, x, y,
  { size = 12, weight = 400, colour = INK, align = "left" } = {}) {
  context.font = `${weight} ${size}px ${FONT}`;
  context.fillStyle = colour;
  context.textAlign = align;
  context.fillText(text, x, y);
}

/** Writes a panel's name on the left and its result on the right. `pairs` of name and result are
    ordered from long to short. The first pair that fits is written. */
function head(context, pairs, left, right, y) {
  const wide = (text, font) => {
    context.font = `${font} ${FONT}`;
    return context.measureText(text).width;
  };
  const fits = ([name, text]) =>
    wide(name, "650 13px") + wide(text, "400 12.5px") + 12 <= right - left;
  const [name, text] = pairs.find(fits) || pairs[pairs.length - 1];
  write(context, name, left, y, { weight: 650, size: 13 });
  write(context, text, right, y, { align: "right", size: 12.5 });
}

function line(context, x0, y0, x1, y1, colour, width = 1, dash = []) {
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.setLineDash(dash);
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
  context.setLineDash([]);
}

/** Returns the last index whose value is at most `value`, or -1. `values` are sorted. */
function lastAtMost(values, value) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= value) low = middle + 1; else high = middle;
  }
  return low - 1;
}
