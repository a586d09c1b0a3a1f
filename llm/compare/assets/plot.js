// One plot of the report as SVG. `view` is what all plots share: {axis, smoothing, logX, fromStart, hidden: Set of names}.

const MARGIN = { left: 64, right: 16, top: 10, bottom: 44 };
const HEIGHT = 340;
const EARLY = 0.15; // share of a curve's x that does not decide the scale of y, unless fromStart

class Plot {
  constructor(parent, plot, view) {
    this.plot = plot;
    this.view = view;
    this.zoom = null;
    this.cursor = null; // index among cursor stops
    this.figure = document.createElement("figure");
    this.figure.id = plot.id;
    this.figure.innerHTML = "<h2></h2><div class='legend'></div><div class='canvas'>"
      + "<svg tabindex='0' role='img'></svg><div class='tip' aria-live='polite'></div></div><p class='note'></p>";
    this.figure.querySelector("h2").textContent = plot.title;
    this.figure.querySelector(".note").textContent = plot.note;
    this.svg = this.figure.querySelector("svg");
    this.tip = this.figure.querySelector(".tip");
    const names = plot.curves.concat(plot.marks).map((series) => series.name).join(", ");
    this.svg.setAttribute("aria-label", `${plot.title}. Series: ${names}. Arrow keys move the cursor.`);
    parent.append(this.figure);
    this.listen();
  }

  get axis() {
    const axes = Object.keys(this.plot.x_labels);
    return axes.includes(this.view.axis) ? this.view.axis : axes[0];
  }

  get log() {
    return this.plot.scale.startsWith("log") || (this.plot.smooth && this.view.logX);
  }

  // Contexts are written as the field does: 4k is 4096.
  readX(value) {
    if (this.plot.scale === "category") return this.plot.ticks[value];
    return this.plot.scale === "log2" && value >= 1024 ? `${readable(value / 1024)}k` : readable(value);
  }

  shown(series) {
    return series.filter((one) => !this.view.hidden.has(one.name));
  }

  draw() {
    this.width = Math.max(320, this.figure.clientWidth);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.svg.replaceChildren();
    this.curves = this.shown(this.plot.curves).map((curve) => ({
      curve,
      points: curvePoints(curve, this.axis, this.plot.smooth ? this.view.smoothing : 0)
        .filter((point) => !this.log || point.x > 0),
    })).filter((drawn) => drawn.points.length);
    this.marks = this.shown(this.plot.marks);
    this.scales();
    this.axes();
    const clip = svg("clipPath", { id: `clip-${this.plot.id}` }, this.svg);
    svg("rect", {
      x: MARGIN.left, y: MARGIN.top - 4, width: this.width - MARGIN.left - MARGIN.right,
      height: HEIGHT - MARGIN.top - MARGIN.bottom + 8,
    }, clip);
    this.inside = svg("g", { "clip-path": `url(#clip-${this.plot.id})` }, this.svg);
    this.curves.forEach((drawn) => this.drawCurve(drawn));
    if (this.plot.front.length > 1) this.drawFront();
    this.stops = [];
    this.marks.forEach((series, i) => this.drawMarks(series, i));
    this.stops.sort((a, b) => a.px - b.px);
    if (this.plot.id.startsWith("pareto")) this.nameMarks();
    this.overlay = svg("g", {}, this.svg);
    if (this.cursor !== null) this.point();
  }

  scales() {
    const marks = this.marks.flatMap((series) => series.marks);
    const all = this.curves.flatMap((drawn) => drawn.points).concat(marks);
    let x = extent(all.map((point) => point.x)) || [0, 1];
    if (this.plot.scale === "category") x = [-0.5, this.plot.ticks.length - 0.5];
    else if (this.marks.length) x = this.log ? [x[0] / 1.35, x[1] * 1.35] : padded(x, 0.08);
    else if (x[0] === x[1]) x = padded(x, 0.1);
    this.whole = x;
    if (this.zoom) x = this.zoom;
    this.x = new Scale(x, [MARGIN.left, this.width - MARGIN.right], this.log, this.plot.scale === "log2" ? 2 : 10);
    this.y = new Scale(this.yDomain(x, marks), [HEIGHT - MARGIN.bottom, MARGIN.top], false);
  }

  yDomain(x, marks) {
    const early = this.zoom || this.view.fromStart || !this.plot.smooth ? x[0] : this.whole[0] + EARLY * (this.whole[1] - this.whole[0]);
    const late = (points) => {
      const found = points.filter((point) => point.x >= early && point.x <= x[1]);
      return found.length ? found : points.slice(-1);
    };
    const ends = this.curves.flatMap(({ points }) => late(points).flatMap((point) => [point.low, point.high]));
    const within = marks.filter((mark) => mark.x >= x[0] && mark.x <= x[1]);
    for (const mark of within) ends.push(mark.y, ...mark.values, ...(mark.interval || []));
    return padded(extent(ends) || [0, 1], 0.06);
  }

  axes() {
    const bottom = HEIGHT - MARGIN.bottom, right = this.width - MARGIN.right;
    for (const tick of this.y.ticks(6)) {
      const py = this.y.at(tick);
      svg("line", { class: "grid", x1: MARGIN.left, x2: right, y1: py, y2: py }, this.svg);
      svg("text", { class: "tick", x: MARGIN.left - 8, y: py + 4, "text-anchor": "end" }, this.svg, readable(tick));
    }
    const category = this.plot.scale === "category";
    const ticks = category ? this.plot.ticks.map((_, i) => i) : this.x.ticks(Math.max(3, Math.floor(this.width / 90)));
    for (const tick of ticks.filter((t) => t >= this.x.domain[0] && t <= this.x.domain[1])) {
      const px = this.x.at(tick), text = this.readX(tick);
      svg("line", { class: "frame", x1: px, x2: px, y1: bottom, y2: bottom + 4 }, this.svg);
      svg("text", { class: "tick", x: px, y: bottom + 18, "text-anchor": "middle" }, this.svg, text);
    }
    svg("line", { class: "frame", x1: MARGIN.left, x2: right, y1: bottom, y2: bottom }, this.svg);
    const middle = (MARGIN.left + right) / 2;
    svg("text", { x: middle, y: HEIGHT - 6, "text-anchor": "middle" }, this.svg, this.plot.x_labels[this.axis]);
    const turned = `rotate(-90) translate(${-(MARGIN.top + bottom) / 2} 14)`;
    svg("text", { transform: turned, "text-anchor": "middle" }, this.svg, this.plot.y_label);
  }

  drawCurve({ curve, points }) {
    const path = (read) => points.map((point) => `${this.x.at(point.x).toFixed(1)},${this.y.at(read(point)).toFixed(1)}`);
    if (points[0].n > 1) {
      const band = path((p) => p.high).concat(path((p) => p.low).reverse());
      svg("polygon", { points: band.join(" "), fill: colour(curve.colour), opacity: 0.18, class: "band" }, this.inside);
    }
    svg("polyline", {
      points: path((p) => p.y).join(" "), fill: "none", stroke: colour(curve.colour), "stroke-width": 1.8,
      "stroke-linejoin": "round", "stroke-dasharray": dash(curve), class: "series", "data-name": curve.name,
    }, this.inside);
    if (this.plot.smooth && points.length > 1) return;
    for (const point of points) shape(this.inside, curve.colour, this.x.at(point.x), this.y.at(point.y), 3);
  }

  drawFront() {
    const points = this.plot.front.map(([x, y]) => `${this.x.at(x)},${this.y.at(y)}`).join(" ");
    svg("polyline", { class: "front", points }, this.inside);
  }

  drawMarks(series, index) {
    const beside = this.plot.id.startsWith("pareto") ? 0 : (index - (this.marks.length - 1) / 2) * 7;
    const place = (mark) => this.x.at(mark.x) + beside;
    const stroke = { stroke: colour(series.colour), "stroke-width": 1.6 };
    const group = svg("g", { class: "series", "data-name": series.name }, this.inside);
    if (series.joined) {
      const points = series.marks.map((mark) => `${place(mark)},${this.y.at(mark.y)}`).join(" ");
      svg("polyline", { ...stroke, points, fill: "none", opacity: 0.6, "stroke-dasharray": dash(series) }, group);
    }
    for (const mark of series.marks) {
      const px = place(mark), py = this.y.at(mark.y);
      if (mark.interval) {
        const [low, high] = mark.interval.map((end) => this.y.at(end));
        const bar = `M${px - 4} ${low}h8M${px} ${low}V${high}M${px - 4} ${high}h8`;
        svg("path", { ...stroke, "stroke-width": 1.3, d: bar, fill: "none" }, group);
      }
      for (const value of mark.values.length > 1 ? mark.values : []) {
        svg("circle", { cx: px, cy: this.y.at(value), r: 2, fill: colour(series.colour), opacity: 0.55 }, group);
      }
      shape(group, series.colour, px, py, 5);
      this.stops.push({ px, py, series, mark });
    }
  }

  // Names beside the marks, moved down until they lie on no other.
  nameMarks() {
    const taken = [];
    for (const { px, py, series } of this.stops) {
      const left = px > this.width * 0.7, width = series.name.length * 6.6;
      const start = left ? px - 9 - width : px + 9;
      let y = py + 4;
      while (taken.some((other) => Math.abs(other.y - y) < 13 && start < other.end && start + width > other.start)) y += 13;
      taken.push({ start, end: start + width, y });
      svg("text", { x: left ? px - 9 : px + 9, y, "text-anchor": left ? "end" : "start" }, this.inside, series.name);
    }
  }

  listen() {
    let from = null;
    const at = (event) => ((event.clientX - this.svg.getBoundingClientRect().left) * this.width) / this.svg.clientWidth;
    const down = (event) => ((event.clientY - this.svg.getBoundingClientRect().top) * HEIGHT) / this.svg.clientHeight;
    this.svg.addEventListener("pointermove", (event) => {
      this.aim(at(event), down(event));
      if (from !== null) this.brush(from, at(event));
    });
    this.svg.addEventListener("pointerdown", (event) => { from = this.plot.scale === "category" ? null : at(event); });
    window.addEventListener("pointerup", (event) => {
      if (from === null) return;
      const to = at(event);
      if (Math.abs(to - from) > 8) this.zoomTo(this.x.back(Math.min(from, to)), this.x.back(Math.max(from, to)));
      from = null;
    });
    this.svg.addEventListener("pointerleave", () => { if (from === null && document.activeElement !== this.svg) this.rest(); });
    this.svg.addEventListener("dblclick", () => this.zoomTo(null));
    this.svg.addEventListener("blur", () => this.rest());
    this.svg.addEventListener("keydown", (event) => this.key(event));
  }

  brush(from, to) {
    const [left, right] = [from, to].sort((a, b) => a - b);
    svg("rect", { class: "brush", x: left, y: MARGIN.top, width: right - left, height: HEIGHT - MARGIN.top - MARGIN.bottom }, this.overlay);
  }

  zoomTo(low, high) {
    this.zoom = low === null ? null : [Math.max(low, this.whole[0]), Math.min(high, this.whole[1])];
    if (this.zoom && this.zoom[0] >= this.zoom[1]) this.zoom = null;
    this.draw();
  }

  key(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 };
    if (event.key in steps) {
      const last = (this.marks.length ? this.stops.length : this.longest().length) - 1;
      this.cursor = Math.min(Math.max((this.cursor ?? (steps[event.key] > 0 ? -1 : last + 1)) + steps[event.key], 0), last);
      this.point();
    } else if ("+-=".includes(event.key) && this.plot.scale !== "category") {
      this.zoomBy(event.key === "-" ? 2 : 0.5);
    } else if (event.key === "0") {
      this.zoomTo(null);
    } else if (event.key === "Escape") {
      this.rest();
    } else {
      return;
    }
    event.preventDefault();
  }

  zoomBy(factor) {
    const [low, high] = this.x.range, half = ((high - low) * factor) / 2;
    const centre = this.aimed ?? (low + high) / 2;
    this.zoomTo(this.x.back(centre - half), this.x.back(centre + half));
  }

  longest() {
    return this.curves.reduce((best, { points }) => (points.length > best.length ? points : best), []);
  }

  aim(px, py) {
    if (this.marks.length) {
      const distance = (stop) => Math.hypot(stop.px - px, stop.py - py);
      this.cursor = this.stops.reduce((best, stop, i) => (distance(stop) < distance(this.stops[best]) ? i : best), 0);
    } else if (this.curves.length) {
      this.cursor = nearest(this.longest(), this.x.back(px));
    } else {
      return;
    }
    this.point();
  }

  // Show what lies at the cursor.
  point() {
    this.overlay.replaceChildren();
    const stop = this.marks.length ? this.stops[this.cursor] : this.longest()[this.cursor];
    if (!stop) return this.rest();
    if (this.marks.length) this.pointAtMark(stop);
    else this.pointAtCurves(stop.x);
  }

  pointAtMark({ px, py, series, mark }) {
    svg("circle", { cx: px, cy: py, r: 9, fill: "none", stroke: "var(--ink)" }, this.overlay);
    const x = this.readX(mark.x);
    const lines = [[null, mark.label], [series, `${readable(mark.y)} at ${x}`]];
    if (mark.interval) lines.push([null, `95%: ${mark.interval.map(readable).join(" to ")}`]);
    lines.push([null, mark.values.length > 1 ? `seeds: ${mark.values.map(readable).join(", ")}` : "one seed"]);
    this.say(px, lines);
  }

  pointAtCurves(x) {
    const px = this.x.at(x);
    svg("line", { class: "cursor", x1: px, x2: px, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }, this.overlay);
    const found = [];
    for (const { curve, points } of this.curves) {
      const point = points[nearest(points, x)];
      if (x < points[0].x || x > points[points.length - 1].x) continue;
      svg("circle", { cx: this.x.at(point.x), cy: this.y.at(point.y), r: 3, fill: colour(curve.colour) }, this.overlay);
      const range = point.n > 1 ? `  (${readable(point.low)} to ${readable(point.high)})` : "";
      found.push([curve, `${readable(point.y)}${range}  ${curve.name}`, point.y]);
    }
    found.sort((a, b) => b[2] - a[2]);
    this.say(px, [[null, `${this.readX(x)} ${this.plot.x_labels[this.axis].split(",")[0]}`], ...found]);
  }

  say(px, lines) {
    this.aimed = px;
    this.tip.replaceChildren(...lines.map(([series, text], i) => {
      const line = document.createElement(i ? "div" : "b");
      if (series !== null) line.append(swatch(series));
      line.append(text);
      return line;
    }));
    const share = this.svg.clientWidth / this.width, right = px > this.width / 2;
    this.tip.style.left = right ? "" : `${px * share + 14}px`;
    this.tip.style.right = right ? `${(this.width - px) * share + 14}px` : "";
  }

  rest() {
    this.cursor = null;
    this.aimed = null;
    this.tip.replaceChildren();
    if (this.overlay) this.overlay.replaceChildren();
  }
}
