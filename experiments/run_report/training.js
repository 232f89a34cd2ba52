// Loss: the loss of every step as a thin line, its running mean if the run is long enough,
// evaluations as points, and tokens/s below.

class LossCanvas {
  constructor(canvas, data) {
    Object.assign(this, { canvas, ...data });
    this.left = 76;
    this.right = 52;
    this.height = 320;
    this.hovered = -1;
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
    const context = prepare(this.canvas, this.height),
      evaluated = this.evaluations.map(([, loss]) => loss);
    if (!this.steps.length) return;
    const all = [...this.losses, ...evaluated], low = all.reduce((a, b) => Math.min(a, b)),
      high = all.reduce((a, b) => Math.max(a, b));
    const room = 0.06 * (high - low) || 0.5,
      loss = this.panel(context, 28, 172, low - room, high + room, "loss");
    const window = Math.floor(this.steps.length / 25), smooth = window > 1;
    this.path(context, this.steps, this.losses, loss, smooth ? "#9cc4e6" : MARK, smooth ? 1 : 1.8);
    if (smooth) this.path(context, ...this.means(window), loss, MARK, 2);
    this.evaluations.forEach(
      ([step, value]) => this.dot(context, this.x(step), loss(value), "#a84f16"));
    const evaluatedSteps = this.evaluations.map(([step]) => step);
    if (evaluatedSteps.length) this.path(context, evaluatedSteps, evaluated, loss, "#a84f16", 1);
    const most = this.speeds.reduce((a, b) => Math.max(a, b)),
      speed = this.panel(context, 232, 60, 0, 1.15 * most || 1, "tokens/s");
    this.path(context, this.steps, this.speeds, speed, "#186a46", 1.6);
    if (this.steps.length < 60) this.steps.forEach((step, index) => {
      this.dot(context, this.x(step), loss(this.losses[index]), MARK);
      this.dot(context, this.x(step), speed(this.speeds[index]), "#186a46");
    });
    const marks = ticks(this.steps[0], this.steps[this.steps.length - 1] || 1,
      Math.min(this.width / 90, this.steps.length)).values.filter(Number.isInteger);
    for (const step of marks) {
      write(context, step.toLocaleString("en"), this.x(step), this.height - 12,
        { size: 11.5, colour: MUTED, align: "center" });
    }
    write(context, "step", this.left + this.width + this.right, this.height - 12,
      { size: 11.5, colour: MUTED, align: "right" });
    if (this.hovered >= 0) {
      const x = this.x(this.steps[this.hovered]);
      line(context, x, 28, x, 292, "rgba(31,41,51,0.35)");
      this.dot(context, x, loss(this.losses[this.hovered]), INK);
      this.dot(context, x, speed(this.speeds[this.hovered]), INK);
    }
  }

  /** Draws a heading, an axis at the left and its lines. Returns the function from value to y. */
  panel(context, top, height, low, high, name) {
    const y = (value) => top + height - ((value - low) / (high - low)) * height;
    const { step, values } = ticks(low, high, height / 28),
      digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    for (const value of values) {
      line(context, this.left, y(value), this.left + this.width, y(value), RULE);
      write(context, value.toLocaleString("en", { minimumFractionDigits: digits }), this.left - 10,
        y(value), { align: "right", size: 11.5, colour: MUTED });
    }
    write(context, name, this.left, top - 13, { weight: 650, size: 13 });
    return y;
  }

  path(context, steps, values, y, colour, width) {
    context.beginPath();
    steps.forEach(
      (step, index) => context[index ? "lineTo" : "moveTo"](this.x(step), y(values[index])));
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.lineJoin = "round";
    context.stroke();
  }

  /** Returns the middle step of each window, and the mean loss over each window. */
  means(window) {
    const steps = [], means = [];
    let total = 0;
    this.losses.forEach((loss, index) => {
      total += loss - (index >= window ? this.losses[index - window] : 0);
      if (index < window - 1) return;
      steps.push(this.steps[index - window + 1 + (window >> 1)]);
      means.push(total / window);
    });
    return [steps, means];
  }

  dot(context, x, y, colour) {
    context.beginPath();
    context.arc(x, y, 3, 0, 2 * Math.PI);
    context.fillStyle = colour;
    context.fill();
  }
}
