// View: the visible part of the step, which all pictures with a time axis share.

class View {
  /** `end` is the end of the longer timeline, in ns. */
  constructor(end) {
    this.end = end * 1.01;
    this.from = 0;
    this.to = this.end;
    this.cursor = null;
    this.drawers = [];
    this.least = 2000;
    this.pending = false;
    this.moving = 0;
  }

  /** Draws everything once before the next frame. */
  redraw() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      for (const draw of this.drawers) draw();
    });
  }

  set(from, to) {
    const length = Math.min(Math.max(to - from, this.least), this.end);
    const middle = (from + to) / 2;
    this.from = Math.min(Math.max(middle - length / 2, 0), this.end - length);
    this.to = this.from + length;
    this.redraw();
  }

  /** Moves to a range within 0.2 s, or at once if the user prefers reduced motion. */
  glide(from, to) {
    cancelAnimationFrame(this.moving);
    if (window.matchMedia("(prefers-reduced-motion: reduce)").matches) return this.set(from, to);
    const start = performance.now(), [from0, to0] = [this.from, this.to];
    const step = (now) => {
      const part = Math.min((now - start) / 200, 1), eased = part * (2 - part);
      this.set(from0 + (from - from0) * eased, to0 + (to - to0) * eased);
      if (part < 1) this.moving = requestAnimationFrame(step);
    };
    this.moving = requestAnimationFrame(step);
  }

  /** A `factor` below 1 zooms in. The time `at` keeps its position. */
  zoom(factor, at = (this.from + this.to) / 2, smooth = false) {
    const length = Math.min(Math.max((this.to - this.from) * factor, this.least), this.end);
    const from = at - ((at - this.from) / (this.to - this.from)) * length;
    if (smooth) this.glide(from, from + length); else this.set(from, from + length);
  }

  pan(ns) {
    this.set(this.from + ns, this.to + ns);
  }
}

/** A strip with the compute ops of the whole step, and a frame around the visible part. The frame
    can be dragged. */
class Overview {
  constructor(canvas, view, timeline) {
    Object.assign(this, { canvas, view, timeline });
    const width = () => canvas.clientWidth - timeline.left - timeline.right;
    const time = (event) => ((event.offsetX - timeline.left) / width()) * view.end;
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      this.from = time(event);
      this.grip = this.from >= view.from && this.from <= view.to
        && view.to - view.from < 0.999 * view.end ? this.from - view.from : null;
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!canvas.hasPointerCapture(event.pointerId)) return;
      const now = time(event), length = view.to - view.from;
      if (this.grip !== null) view.set(now - this.grip, now - this.grip + length);
      else if (Math.abs(now - this.from) > view.end / 200) {
        view.set(Math.min(now, this.from), Math.max(now, this.from));
      }
    });
    view.drawers.push(() => this.draw());
  }

  draw() {
    const { view, timeline } = this, height = 34, context = prepare(this.canvas, height);
    const width = this.canvas.clientWidth - timeline.left - timeline.right,
      x = (ns) => timeline.left + (ns / view.end) * width;
    timeline.panels.forEach((panel, index) => {
      const y = 4 + index * 14;
      context.fillStyle = PALE;
      context.fillRect(timeline.left, y, width, 11);
      for (const op of panel.rows[0]) {
        context.fillStyle = timeline.colours[timeline.ops.kind[op]];
        const from = x(panel.start[op]);
        context.fillRect(from, y, Math.max(x(panel.end[op]) - from, 0.4), 11);
      }
    });
    write(context, timeline.lanes[0], 0, 17, { size: 11.5, colour: MUTED });
    const [from, to] = [x(view.from), x(view.to)];
    context.fillStyle = VEIL;
    context.fillRect(timeline.left, 0, from - timeline.left, height);
    context.fillRect(to, 0, timeline.left + width - to, height);
    context.strokeStyle = INK;
    context.lineWidth = 1;
    context.strokeRect(Math.round(from) + 0.5, 0.5, Math.max(Math.round(to - from) - 1, 2),
      height - 1);
  }
}
