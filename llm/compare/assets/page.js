// The controls of the page, its legends and its tables; plot.js draws.

const report = JSON.parse(document.getElementById("data").textContent);
const view = { axis: "", smoothing: 0, logX: false, fromStart: false, hidden: new Set() };
const plots = report.plots.map((plot) => new Plot(document.getElementById("plots"), plot, view));

function drawAll() {
  for (const plot of plots) {
    plot.draw();
    for (const button of plot.figure.querySelectorAll(".legend button")) {
      button.setAttribute("aria-pressed", String(!view.hidden.has(button.dataset.name)));
    }
  }
}

function legend(plot) {
  const parent = plot.figure.querySelector(".legend");
  const series = plot.plot.curves.concat(plot.plot.marks);
  for (const one of series) {
    const name = one.name, button = document.createElement("button");
    button.type = "button";
    button.dataset.name = name;
    button.append(swatch(one), name);
    button.addEventListener("click", () => {
      if (!view.hidden.delete(name)) view.hidden.add(name);
      drawAll();
    });
    button.addEventListener("dblclick", () => {
      const others = series.map((other) => other.name).filter((other) => other !== name);
      const alone = others.every((other) => view.hidden.has(other));
      for (const other of others) view.hidden[alone ? "delete" : "add"](other);
      view.hidden.delete(name);
      drawAll();
    });
    parent.append(button);
  }
}

function controls() {
  const axis = document.getElementById("axis");
  const axes = Object.assign({}, ...report.plots.filter((plot) => plot.smooth).map((plot) => plot.x_labels));
  for (const name in axes) axis.append(new Option(axes[name].split(",")[0], name));
  view.axis = axis.value;
  axis.addEventListener("change", () => { view.axis = axis.value; for (const plot of plots) plot.zoom = null; drawAll(); });
  const smoothing = document.getElementById("smoothing");
  smoothing.addEventListener("input", () => {
    view.smoothing = Number(smoothing.value);
    smoothing.parentElement.querySelector("output").textContent = view.smoothing.toFixed(2);
    drawAll();
  });
  for (const [id, key] of [["log-x", "logX"], ["from-start", "fromStart"]]) {
    const box = document.getElementById(id);
    box.addEventListener("change", () => { view[key] = box.checked; drawAll(); });
  }
  document.getElementById("controls").addEventListener("submit", (event) => event.preventDefault());
}

function theme() {
  const button = document.getElementById("theme");
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const set = (name) => {
    document.documentElement.dataset.theme = name;
    button.textContent = name === "dark" ? "light" : "dark";
  };
  set(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => set(dark.matches ? "dark" : "light"));
  button.addEventListener("click", () => set(button.textContent));
}

function sortable(table) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...table.tBodies[0].rows];
      rows.sort((a, b) => (down ? -1 : 1) * compareCells(a.cells[column].textContent, b.cells[column].textContent));
      table.tBodies[0].append(...rows);
    });
  });
}

function compareCells(a, b) {
  const [x, y] = [a, b].map((text) => parseFloat(text.replaceAll(",", "")));
  return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b) : x - y;
}

plots.forEach(legend);
controls();
theme();
document.querySelectorAll("table").forEach(sortable);
drawAll();
new ResizeObserver(() => drawAll()).observe(document.getElementById("plots"));
