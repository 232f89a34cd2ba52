// Training: the loss of every step, its running mean and the evaluations. Panels below show the
// learning rate, the gradient norm and tokens/s.

const LOSS_HEIGHT = 172, LOWER_HEIGHT = 56, PANEL_GAP = 34;

class TrainingCanvas {
  constructor(canvas, data) {
    Object.assign(this, { canvas, ...data });
    this.left = 62;
    this.right = 12;
    this.hovered = -1;
    const values = (column) => column.filter((value) => value !== null);
    this.lower = [
      { name: "learning rate", values: this.rates, colour: "rate", text: short },
      { name: "gradient norm", values: this.norms, colour: "norm", text: short },
      { name: "tokens/s", values: this.speeds, colour: "speed", text: whole },
    ].filter((panel) => values(panel.values).length);
    this.height = 28 + LOSS_HEIGHT + this.lower.length * (PANEL_GAP + LOWER_HEIGHT) + 28;
  }

  get width() { return this.canvas.clientWidth - this.left - this.right; }

  x(step) {
    const first = this.steps[0], last = this.steps[this.steps.length - 1];
    return this.left + (last > first ? (step - first) / (last - first) : 0.5) * this.width;
  }

  /** Returns the index of the step that is nearest to a point of the canvas. */
  stepAt(x) {
    let best = 0;
    this.steps.forEach((step, index) => {
      if (Math.abs(this.x(step) - x) < Math.abs(this.x(this.steps[best]) - x)) best = index;
    });
    return best;
  }

  draw() {
    const context = prepare(this.canvas, this.height);
    if (!this.steps.length) return;
    const points = [[this.steps, this.losses, this.drawLoss(context), "loss"]];
    let top = 28 + LOSS_HEIGHT + PANEL_GAP;
    for (const { name, values, colour, text } of this.lower) {
      const most = values.reduce((a, b) => Math.max(a, b), 0),
        y = this.panel(context, top, LOWER_HEIGHT, 0, 1.15 * most || 1, name, text);
      this.path(context, this.steps, values, y, themed(colour), 1.6);
      points.push([this.steps, values, y, colour]);
      top += LOWER_HEIGHT + PANEL_GAP;
    }
    if (this.steps.length < 60) {
      for (const [steps, values, y, colour] of points) {
        steps.forEach((step, index) =>
          this.dot(context, this.x(step), y, values[index], themed(colour)));
      }
    }
    const marks = ticks(this.steps[0], this.steps[this.steps.length - 1] || 1,
      Math.min(this.width / 90, this.steps.length)).values.filter(Number.isInteger);
    const name = "step", end = this.left + this.width;
    for (const step of marks) {
      const text = step.toLocaleString("en"), x = this.x(step);
      if (x < end - 60) write(context, text, x, this.height - 10,
        { size: 11.5, colour: MUTED, align: "center" });
    }
    write(context, name, end, this.height - 10, { size: 11.5, colour: MUTED, align: "right" });
    if (this.hovered >= 0) {
      const x = this.x(this.steps[this.hovered]);
      line(context, x, 28, x, this.height - 28, CURSOR);
      for (const [, values, y] of points) this.dot(context, x, y, values[this.hovered], INK);
    }
  }

  /** Draws the panel of the loss, and returns its function from value to y. */
  drawLoss(context) {
    const evaluated = this.evaluations.map(([, loss]) => loss);
    const all = [...this.losses, ...evaluated];
    const low = all.reduce((a, b) => Math.min(a, b)), high = all.reduce((a, b) => Math.max(a, b));
    const room = 0.06 * (high - low) || 0.5;
    const y = this.panel(context, 28, LOSS_HEIGHT, low - room, high + room, "loss", null);
    const smooth = this.window > 1;
    this.path(context, this.steps, this.losses, y, themed(smooth ? "pale-loss" : "loss"),
      smooth ? 1 : 1.8);
    if (smooth) this.path(context, ...this.means(), y, themed("loss"), 2);
    const steps = this.evaluations.map(([step]) => step), colour = themed("evaluation");
    this.path(context, steps, evaluated, y, colour, 1);
    this.evaluations.forEach(([step, value]) =>
      this.dot(context, this.x(step), y, value, colour, 4));
    return y;
  }

  /** Draws a heading, the axis on the left, and grid lines. Returns the function from a value to
      y. */
  panel(context, top, height, low, high, name, text) {
    const y = (value) => top + height - ((value - low) / (high - low)) * height;
    const { step, values } = ticks(low, high, height / (text ? 18 : 28)),
      digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    for (const value of values) {
      line(context, this.left, y(value), this.left + this.width, y(value), RULE);
      write(context, text ? text(value)
        : value.toLocaleString("en", { minimumFractionDigits: digits }), this.left - 10, y(value),
      { align: "right", size: 11.5, colour: MUTED });
    }
    write(context, name, this.left, top - 13, { weight: 650, size: 13 });
    return y;
  }

  /** Draws a line through all values. It has a gap where a value is missing. */
  path(context, steps, values, y, colour, width) {
    let pen = "moveTo";
    context.beginPath();
    steps.forEach((step, index) => {
      if (values[index] === null) {
        pen = "moveTo";
        return;
      }
      context[pen](this.x(step), y(values[index]));
      pen = "lineTo";
    });
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.lineJoin = "round";
    context.stroke();
  }

  /** Returns the middle step of each window, and the mean loss over each window. */
  means() {
    const steps = [], means = [], { window } = this;
    let total = 0;
    this.losses.forEach((loss, index) => {
      total += loss - (index >= window ? this.losses[index - window] : 0);
      if (index < window - 1) return;
      steps.push(this.steps[index - window + 1 + (window >> 1)]);
      means.push(total / window);
    });
    return [steps, means];
  }

  dot(context, x, y, value, colour, radius = 3) {
    if (value === null) return;
    context.beginPath();
    context.arc(x, y(value), radius, 0, 2 * Math.PI);
    context.fillStyle = colour;
    context.fill();
  }

  /** Returns the lines of the tip for the step with this index. */
  described(index) {
    const lines = [`<b>step ${this.steps[index].toLocaleString("en")}</b>`,
      `<span>loss ${this.losses[index].toFixed(4)}</span>`];
    for (const { name, values, text } of this.lower) {
      if (values[index] !== null) lines.push(`<span>${name} ${text(values[index])}</span>`);
    }
    const found = this.evaluations.find(([step]) => step === this.steps[index]);
    if (found) lines.push(`<span>evaluation ${found[1].toFixed(4)}</span>`);
    return lines.join("");
  }

  /** Returns the legend: the curves in the panel of the loss. */
  legend() {
    const smooth = this.window > 1;
    const curves = [[smooth ? "pale-loss" : "loss", "each step"]];
    if (smooth) curves.push(["loss", `mean of ${this.window} steps`]);
    if (this.evaluations.length) curves.push(["evaluation", "evaluation"]);
    return curves.map(([colour, name]) =>
      `<span><i style="background:var(--${colour})"></i>${name}</span>`).join("");
  }
}

/** Returns a number with three significant digits, such as 1e-5 or 1.43. */
function short(value) {
  if (!value) return "0";
  const text = value.toPrecision(3);
  const size = Math.abs(value) < 1e-3 ? Number(text).toExponential() : String(Number(text));
  return size.replace("e+", "e");
}

function whole(value) {
  return Math.round(value).toLocaleString("en");
}
