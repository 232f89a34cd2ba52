// Timeline: the predicted step above the measured one, on one axis, with one row for each lane. A
// panel below shows how much later than predicted each op of compute started. Without a
// measurement, only the prediction is drawn.

const ROW = 24, HEAD = 30, AXIS = 24, DRIFT = 54;

class TimelineCanvas {
  constructor(canvas, data, view) {
    Object.assign(this, { canvas, view, ops: data.ops, lanes: data.lanes, kinds: data.kinds });
    this.recolour();
    this.left = 76;
    this.right = 52;
    this.selected = -1;
    this.chosenKind = -1;
    let top = AXIS;
    const names = ["predicted", "measured"].filter((name) => data.ops[name]);
    this.panels = names.map((name) => {
      const [start, end] = data.ops[name];
      const rows = data.lanes.map((_, lane) => data.ops.id.map((_, op) => op)
        .filter((op) => data.ops.lane[op] === lane).sort((a, b) => start[a] - start[b]));
      const starts = rows.map((row) => row.map((op) => start[op]));
      const busy = rows.map((row) => row.reduce((sum, op) => sum + end[op] - start[op], 0));
      const panel = { name, start, end, rows, starts, busy, top: top + HEAD,
        step: end.reduce((most, value) => Math.max(most, value), 0) };
      top += HEAD + ROW * data.lanes.length + 8;
      return panel;
    });
    this.driftTop = top + HEAD - 8;
    const [predicted, measured] = this.panels;
    this.height = measured ? this.driftTop + DRIFT + 4 : top;
    this.drift = measured && measured.rows[0]
      .map((op) => ({ at: measured.start[op], late: measured.start[op] - predicted.start[op] }));
    this.measure();
    view.drawers.push(() => this.draw());
  }

  /** Sets the colours of the kinds for a light or a dark page. */
  recolour() {
    this.colours = this.kinds.map((kind) => visible(kind.colour));
    this.inks = this.colours.map((colour) => (lightness(colour) < 0.58 ? "#fff" : DARK_INK));
  }

  /** Reads the width once per drawing. Reading it for each op would take longer than drawing. */
  measure() { this.width = this.canvas.clientWidth - this.left - this.right; }

  x(ns) {
    return this.left + ((ns - this.view.from) / (this.view.to - this.view.from)) * this.width;
  }

  at(x) {
    return this.view.from + ((x - this.left) / this.width) * (this.view.to - this.view.from);
  }

  /** Returns the rectangle of op number `op` in a panel, in pixels of the canvas. */
  rectangle(op, panel) {
    const left = this.x(panel.start[op]), right = this.x(panel.end[op]);
    return { left, right: Math.max(right, left + 1), top: panel.top + this.ops.lane[op] * ROW + 2,
      bottom: panel.top + this.ops.lane[op] * ROW + ROW - 2 };
  }

  /** Returns the op within two pixels of a point of the canvas, or -1. */
  opAt(x, y) {
    const panel = this.panels.find(
      (each) => y >= each.top && y < each.top + ROW * this.lanes.length);
    if (!panel || x < this.left - 2 || x > this.left + this.width + 2) return -1;
    const lane = Math.floor((y - panel.top) / ROW), row = panel.rows[lane],
      place = lastAtMost(panel.starts[lane], this.at(x + 2));
    let best = -1, nearest = 2.001;
    for (let index = place; index >= Math.max(place - 3, 0); index -= 1) {
      const { left, right } = this.rectangle(row[index], panel),
        far = x < left ? left - x : x > right ? x - right : 0;
      if (far < nearest) [best, nearest] = [row[index], far];
    }
    return best;
  }

  /** Returns the last op to end among the ops that `op` waits for, on any lane, or -1 if it waits
      for none. */
  waitsFor(op, panel) {
    const lane = panel.rows[this.ops.lane[op]], before = lane[lane.indexOf(op) - 1];
    const candidates = before === undefined ? this.ops.after[op] : [before, ...this.ops.after[op]];
    return candidates.reduce(
      (last, other) => (last < 0 || panel.end[other] > panel.end[last] ? other : last), -1);
  }

  draw() {
    this.measure();
    const context = prepare(this.canvas, this.height), { left, width } = this, right = left + width;
    for (const { at, text } of timeLabels(this.view.from, this.view.to, width / 110)) {
      const x = Math.round(this.x(at)) + 0.5;
      line(context, x, AXIS - 5, x, this.height - 4, RULE);
      write(context, text, x, 9,
        { size: 11.5, colour: MUTED, align: x > right - 20 ? "right" : "center" });
    }
    for (const panel of this.panels) this.drawPanel(context, panel);
    if (this.drift) this.drawDrift(context);
    if (this.view.cursor !== null) {
      const x = Math.round(this.x(this.view.cursor)) + 0.5;
      const shown = x >= left && x <= right;
      if (shown) line(context, x, AXIS, x, this.height - 4, CURSOR);
    }
  }

  drawPanel(context, panel) {
    const { left, width } = this, [, measured] = this.panels,
      bottom = panel.top + ROW * this.lanes.length;
    const error = panel === measured || !measured ? [""] : [" against measured", ""]
      .map((words) => `   ${percent(panel.step / measured.step - 1)}${words}`);
    const texts = [...error.map((words) => `step ${time(panel.step)}${words}`), time(panel.step)];
    head(context, texts.map((text) => [panel.name, text]), left, left + width, panel.top - 12);
    write(context, "busy", left + width + this.right, panel.top - 12,
      { align: "right", colour: MUTED, size: 11.5 });
    this.lanes.forEach((lane, row) => {
      const y = panel.top + row * ROW;
      context.fillStyle = PALE;
      context.fillRect(left, y + 2, width, ROW - 4);
      write(context, lane, left - 10, y + ROW / 2, { align: "right", size: 12.5 });
      write(context, `${Math.round((100 * panel.busy[row]) / panel.step)} %`,
        left + width + this.right, y + ROW / 2, { align: "right", colour: MUTED, size: 11.5 });
    });
    context.save();
    context.beginPath();
    context.rect(left, panel.top - 2, width, bottom - panel.top + 4);
    context.clip();
    this.lanes.forEach((_, row) => this.drawRow(context, panel, row));
    line(context, this.x(panel.step), panel.top, this.x(panel.step), bottom, INK, 1.2);
    if (measured && panel !== measured) {
      const end = this.x(measured.step);
      line(context, end, panel.top, end, bottom, INK, 1.2, [2, 2]);
    }
    if (this.selected >= 0) this.drawSelected(context, panel);
    context.restore();
  }

  drawRow(context, panel, row) {
    const ops = panel.rows[row], y = panel.top + row * ROW + 2, thin = new Map();
    for (let index = Math.max(lastAtMost(panel.starts[row], this.view.from) - 1, 0);
      index < ops.length && panel.starts[row][index] <= this.view.to; index += 1) {
      const op = ops[index], kind = this.ops.kind[op],
        from = Math.max(this.x(panel.start[op]), this.left - 9),
        to = Math.min(this.x(panel.end[op]), this.left + this.width + 9);
      if (to < this.left) continue;
      if (to - from < 1) {
        const column = Math.floor(from), before = thin.get(column);
        thin.set(column, { kind, share: (before ? before.share : 0) + to - from });
        continue;
      }
      context.globalAlpha = this.shade(kind);
      context.fillStyle = this.colours[kind];
      context.fillRect(from, y, to - from - (to - from >= 5 ? 1 : 0), ROW - 4);
      if (to - from < 24) continue;
      const id = this.ops.id[op], text = [id, id.replace(/\.c\d+$/, ""), id.split(".")[0]]
        .find((each) => each.length * 7 + 6 <= to - from);
      if (text) write(context, text, (from + to) / 2, y + ROW / 2 - 1.5,
        { size: 11.5, colour: this.inks[kind], align: "center" });
    }
    this.drawThin(context, thin, y);
    context.globalAlpha = 1;
  }

  shade(kind) { return this.chosenKind < 0 || this.chosenKind === kind ? 1 : 0.15; }

  /** Draws ops that are narrower than a pixel, summed for each column of pixels. The busier the
      lane was, the darker is the column. It is never too pale to be seen. */
  drawThin(context, thin, y) {
    let run = null;
    const flush = () => {
      if (!run) return;
      context.globalAlpha = run.alpha;
      context.fillStyle = this.colours[run.kind];
      context.fillRect(run.from, y, run.to - run.from, ROW - 4);
    };
    for (const [column, { kind, share }] of thin) {
      const alpha = this.shade(kind) * Math.max(Math.min(Math.round(8 * share) / 8, 1), 0.3);
      if (run && run.to === column && run.kind === kind && run.alpha === alpha) run.to += 1;
      else {
        flush();
        run = { kind, alpha, from: column, to: column + 1 };
      }
    }
    flush();
  }

  /** Draws a frame around the op, and a line from the op that it waited for. */
  drawSelected(context, panel) {
    const box = this.rectangle(this.selected, panel), other = this.waitsFor(this.selected, panel);
    if (other >= 0 && this.ops.lane[other] !== this.ops.lane[this.selected]) {
      const from = this.rectangle(other, panel), down = from.top < box.top;
      line(context, from.right, down ? from.bottom : from.top, box.left,
        down ? box.top : box.bottom, INK, 1.5);
    }
    context.strokeStyle = GROUND;
    context.lineWidth = 5;
    context.strokeRect(box.left, box.top, box.right - box.left, box.bottom - box.top);
    context.strokeStyle = INK;
    context.lineWidth = 2;
    context.strokeRect(box.left, box.top, box.right - box.left, box.bottom - box.top);
  }

  drawDrift(context) {
    const { left, width } = this, middle = this.driftTop + DRIFT / 2, half = DRIFT / 2 - 3;
    const most = this.drift.reduce((found, { at, late }) =>
      (at < this.view.from || at > this.view.to ? found : Math.max(found, Math.abs(late))), 1);
    const pairs = ["starts of compute ops, measured minus predicted", "starts of compute ops",
      "starts"].map((name) => [name, `up to ${time(most)}`]);
    head(context, [...pairs, ["starts", ""]], left, left + width, this.driftTop - 12);
    context.fillStyle = PALE;
    context.fillRect(left, this.driftTop, width, DRIFT);
    line(context, left, middle, left + width, middle, AXIS_LINE);
    write(context, "later", left - 10, this.driftTop + 9,
      { align: "right", size: 11.5, colour: MUTED });
    write(context, "earlier", left - 10, this.driftTop + DRIFT - 9,
      { align: "right", size: 11.5, colour: MUTED });
    context.save();
    context.beginPath();
    context.rect(left, this.driftTop, width, DRIFT);
    context.clip();
    context.beginPath();
    this.drift.forEach(({ at, late }, index) =>
      context[index ? "lineTo" : "moveTo"](this.x(at), middle - (late / most) * half));
    context.strokeStyle = MARK;
    context.lineWidth = 1.6;
    context.stroke();
    context.restore();
  }
}
