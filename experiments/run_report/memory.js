// Memory: bytes in use during the step by class of data, with one panel for the device and one for
// the host. The outline is the prediction.

const PANEL = 150;

class MemoryCanvas {
  constructor(canvas, data, view, left, right) {
    Object.assign(this, { canvas, view, left, right, colours: data.classes });
    this.places = Object.entries(data.places).map(([name, place]) => {
      const totals = ["predicted", "measured"]
        .map((each) => place[each].times.map((_, index) => sum(place[each], index)));
      const [predicted, measured] = totals
        .map((each) => each.reduce((most, value) => Math.max(most, value), 0));
      const most = Math.max(predicted, measured), near = place.limit <= 2.2 * most;
      return { name, ...place, total: totals[0], held: totals[1], peak: measured, most, near,
        top: 1.1 * (near ? Math.max(most, place.limit) : most) };
    });
    this.height = this.places.length * (PANEL + 34) + 20;
    view.drawers.push(() => this.draw());
  }

  x(ns) {
    return this.left + ((ns - this.view.from) / (this.view.to - this.view.from)) * this.width;
  }

  draw() {
    this.width = this.canvas.clientWidth - this.left - this.right;
    const context = prepare(this.canvas, this.height);
    this.places.forEach(
      (place, index) => this.drawPlace(context, place, 34 + index * (PANEL + 34)));
    for (const { at, text } of timeLabels(this.view.from, this.view.to, this.width / 110)) {
      const x = this.x(at);
      write(context, text, x, this.height - 8,
        { size: 11.5, colour: MUTED, align: x > this.left + this.width - 20 ? "right" : "center" });
    }
  }

  drawPlace(context, place, top) {
    const { left, width } = this, bottom = top + PANEL,
      y = (size) => bottom - (size / place.top) * PANEL;
    const texts = [`most held ${bytes(place.peak)}, limit ${bytes(place.limit)}`,
      `${bytes(place.peak)} of ${bytes(place.limit)}`, bytes(place.peak)];
    head(context, texts.map((text) => [place.name, text]), left, left + width, top - 13);
    const unit = [2 ** 40, 2 ** 30, 2 ** 20, 2 ** 10].find((size) => place.most >= 2 * size) || 1;
    for (const value of ticks(0, place.top / unit, 4).values) {
      line(context, left, y(value * unit), left + width, y(value * unit), RULE);
      write(context, value ? bytes(value * unit).replace(/\.?0+ /, " ") : "0", left - 10,
        y(value * unit), { align: "right", size: 11.5, colour: MUTED });
    }
    context.save();
    context.beginPath();
    context.rect(left, top, width, PANEL + 1);
    context.clip();
    const classes = Object.entries(place.measured.classes);
    for (const { from, to, index } of this.runs(place.measured.times, place.held)) {
      let base = bottom;
      for (const [name, values] of classes) {
        const tall = (values[index] / place.top) * PANEL;
        context.fillStyle = visible(this.colours[name]);
        context.fillRect(from, base - tall, to - from, tall);
        base -= tall;
      }
    }
    this.outline(context, place.predicted.times, place.total, y);
    context.restore();
    if (place.near) {
      line(context, left, y(place.limit), left + width, y(place.limit), INK, 1.5);
      write(context, "limit", left + width + 6, y(place.limit), { size: 11.5, colour: MUTED });
    }
    if (this.view.cursor !== null) {
      const x = Math.round(this.x(this.view.cursor)) + 0.5;
      if (x >= left && x <= left + width) line(context, x, top, x, bottom, CURSOR);
    }
  }

  /** Returns runs of pixels with the same amount: `from`, `to`, and the amount's `index` in
      `times`. If several amounts fall into one pixel, the largest is shown, so no peak is lost. */
  runs(times, totals) {
    const found = [], { view, width, left } = this;
    let index = Math.max(lastAtMost(times, view.from), 0);
    for (let column = 0; column < width; column += 1) {
      const until = view.from + ((column + 1) / width) * (view.to - view.from);
      let most = index;
      while (index + 1 < times.length && times[index + 1] <= until) {
        index += 1;
        if (totals[index] > totals[most]) most = index;
      }
      const last = found[found.length - 1];
      if (last && last.index === most) last.to = left + column + 1;
      else found.push({ from: left + column, to: left + column + 1, index: most });
    }
    return found;
  }

  outline(context, times, totals, y) {
    context.beginPath();
    for (const { from, to, index } of this.runs(times, totals)) {
      context.lineTo(from, y(totals[index]));
      context.lineTo(to, y(totals[index]));
    }
    context.strokeStyle = INK;
    context.lineWidth = 1.2;
    context.stroke();
  }

  /** Returns the time, the place and the bytes of each class under a point of the canvas, or null
      outside the panels. */
  heldAt(x, y) {
    const index = Math.floor((y - 34 + 17) / (PANEL + 34)), place = this.places[index];
    if (!place || x < this.left || x > this.left + this.width) return null;
    const at = this.view.from + ((x - this.left) / this.width) * (this.view.to - this.view.from),
      step = Math.max(lastAtMost(place.measured.times, at), 0);
    return { at, place: place.name, total: sum(place.measured, step),
      held: Object.entries(place.measured.classes).map(([name, values]) => [name, values[step]]) };
  }
}

function sum(held, index) {
  return Object.values(held.classes).reduce((total, values) => total + values[index], 0);
}
