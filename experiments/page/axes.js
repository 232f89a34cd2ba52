// Axes: numbers as people read them, round ticks, and a canvas as sharp as the screen.

const INK = "#1f2933", MUTED = "#5f6b77", RULE = "#dde2e7", PALE = "#f3f5f7", MARK = "#1f5f9e";
const FONT = getComputedStyle(document.body).fontFamily;

/** Nanoseconds: 4.342 s, 21.600 ms, 12.3 us; the units of the tables. */
function time(ns) {
  const size = Math.abs(ns);
  if (size >= 1e9) return rounded(ns / 1e9, 3) + " s";
  if (size >= 1e6) return rounded(ns / 1e6, 3) + " ms";
  return rounded(ns / 1e3, 1) + " us";
}

/** As the tables round: what lies halfway goes to the even digit, where toFixed goes up. */
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

/** Round numbers from `from` to `to`, about `count` of them. */
function ticks(from, to, count) {
  const rough = (to - from) / Math.max(count, 1), power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const found = [];
  for (let index = Math.ceil(from / step); index * step <= to * (1 + 1e-9); index += 1) found.push(index * step);
  return { step, values: found };
}

/** The label of a time tick: one unit for all, as many digits as the step needs. */
function timeLabels(from, to, count) {
  const [scale, unit] = to - from >= 2e9 || to >= 2e10 ? [1e9, "s"] : to - from >= 2e6 ? [1e6, "ms"] : [1e3, "us"];
  const { step, values } = ticks(from / scale, to / scale, count);
  const digits = Math.max(0, Math.min(6, -Math.floor(Math.log10(step) + 1e-9)));
  return values.map((value) => ({ at: value * scale, text: `${value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits })} ${unit}` }));
}

/** A cleared drawing context in CSS pixels, as wide as the page gives and `height` tall. */
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

function write(context, text, x, y, { size = 12, weight = 400, colour = INK, align = "left" } = {}) {
  context.font = `${weight} ${size}px ${FONT}`;
  context.fillStyle = colour;
  context.textAlign = align;
  context.fillText(text, x, y);
}

/** A panel's name at its left and what came out at its right: the first of the pairs, which get shorter, that has room. */
function head(context, pairs, left, right, y) {
  const wide = (text, font) => { context.font = `${font} ${FONT}`; return context.measureText(text).width; };
  const fits = ([name, text]) => wide(name, "650 13px") + wide(text, "400 12.5px") + 12 <= right - left;
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

/** The last index whose value is at most `value`; -1 where there is none. `values` ascend. */
function lastAtMost(values, value) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= value) low = middle + 1; else high = middle;
  }
  return low - 1;
}
