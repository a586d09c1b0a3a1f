// Scales, marks and the points of curves: what plot.js draws with.

const COLOURS = 7;

function svg(name, attributes, parent, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) element.setAttribute(key, attributes[key]);
  if (text !== undefined) element.textContent = text;
  if (parent) parent.append(element);
  return element;
}

function colour(index) {
  return `var(--c${index % COLOURS})`;
}

function dash(series) {
  if (series.broken) return "1 4";
  return ["", "7 3", "2 3", "8 3 2 3"][Math.floor(series.colour / COLOURS) % 4];
}

function readable(value) {
  const size = Math.abs(value);
  if (size >= 1e15 || (size > 0 && size < 1e-3)) return value.toExponential(2).replace("e+", "e");
  for (const [unit, one] of [["T", 1e12], ["B", 1e9], ["M", 1e6], ["k", 1e4]]) {
    if (size >= one) return Number((value / (unit === "k" ? 1e3 : one)).toPrecision(4)) + unit;
  }
  return String(Number(value.toPrecision(5)));
}

class Scale {
  constructor(domain, range, log, base = 10) {
    this.log = log && domain[0] > 0;
    this.base = base;
    this.domain = domain;
    this.range = range;
  }
  warp(value) {
    return this.log ? Math.log(value) : value;
  }
  at(value) {
    const [low, high] = this.domain.map((end) => this.warp(end));
    return this.range[0] + ((this.warp(value) - low) / (high - low || 1)) * (this.range[1] - this.range[0]);
  }
  back(pixel) {
    const [low, high] = this.domain.map((end) => this.warp(end));
    const value = low + ((pixel - this.range[0]) / (this.range[1] - this.range[0])) * (high - low);
    return this.log ? Math.exp(value) : value;
  }
  ticks(count) {
    const [low, high] = this.domain;
    if (this.log && this.base === 2 && high / low >= 4) return powersOfTwo(low, high, count);
    if (this.log && high / low > 8) return logTicks(low, high, count);
    const raw = (high - low) / count;
    const ten = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((f) => f * ten).find((s) => s >= raw) || ten;
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
    return found;
  }
}

function powersOfTwo(low, high, count) {
  const first = Math.ceil(Math.log2(low) - 1e-9), last = Math.floor(Math.log2(high) + 1e-9);
  const stride = Math.ceil((last - first + 1) / count), found = [];
  for (let power = first; power <= last; power += stride) found.push(2 ** power);
  return found;
}

function logTicks(low, high, count) {
  const decades = Math.log10(high / low);
  const steps = decades > count ? [1] : decades > count / 2 ? [1, 3] : [1, 2, 5];
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const step of steps) {
      const tick = step * 10 ** power;
      if (tick >= low * 0.999 && tick <= high * 1.001) found.push(tick);
    }
  }
  return found;
}

// Exponential moving average that starts unbiased: values divided by the weight they have had so far.
function smoothed(values, weight) {
  let sum = 0, total = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

// The points of a curve: x, and over the seeds the mean, the lowest and the highest.
function curvePoints(curve, axis, weight) {
  const rows = weight ? curve.ys.map((row) => smoothed(row, weight)) : curve.ys;
  const points = [];
  (curve.xs[axis] || []).forEach((x, i) => {
    const values = rows.map((row) => row[i]);
    if (x === null || values.includes(null)) return;
    const mean = values.reduce((a, b) => a + b) / values.length;
    points.push({ x, y: mean, low: Math.min(...values), high: Math.max(...values), n: values.length });
  });
  return points;
}

function nearest(points, x) {
  let best = 0;
  points.forEach((point, i) => {
    if (Math.abs(point.x - x) < Math.abs(points[best].x - x)) best = i;
  });
  return best;
}

function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low > high ? null : [low, high];
}

// How a series looks, for legends and tooltips: its colour, dashes and, where it has marks, their shape.
function swatch(series) {
  const element = svg("svg", { class: "swatch", viewBox: "0 0 26 12", "aria-hidden": "true" });
  const line = { x1: 0, x2: 26, y1: 6, y2: 6, stroke: colour(series.colour), "stroke-width": 2.5 };
  if (!series.marks || series.joined) svg("line", { ...line, "stroke-dasharray": dash(series) }, element);
  if (series.marks) shape(element, series.colour, 13, 6, 4.5);
  return element;
}

function shape(parent, index, px, py, r) {
  const paths = [
    `M${px - r} ${py}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0z`,
    `M${px - r} ${py - r}h${2 * r}v${2 * r}h${-2 * r}z`,
    `M${px} ${py - 1.3 * r}l${1.3 * r} ${1.3 * r}l${-1.3 * r} ${1.3 * r}l${-1.3 * r} ${-1.3 * r}z`,
    `M${px} ${py - 1.2 * r}l${1.2 * r} ${2.2 * r}h${-2.4 * r}z`,
    `M${px} ${py + 1.2 * r}l${1.2 * r} ${-2.2 * r}h${-2.4 * r}z`,
  ];
  svg("path", { d: paths[index % paths.length], fill: colour(index), stroke: "var(--paper)" }, parent);
}

function padded([low, high], share) {
  const room = (high - low) * share || Math.abs(high) * share || 1;
  return [low - room, high + room];
}
