"""The report in a browser: headless Chromium where it is installed (Debian's package `chromium`)."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess

import pytest

from llm.compare.__main__ import main

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1200,900"]

# before anything else on the page: hear of everything that goes wrong
LISTEN = """<script>
const wrong = [];
addEventListener("error", (event) => wrong.push(String(event.message || event.target)), true);
document.addEventListener("securitypolicyviolation", (event) => wrong.push("blocked " + event.blockedURI));
for (const name of ["error", "warn"]) console[name] = (...words) => wrong.push(words.join(" "));
</script>"""

# at the end: use the page as a reader would, and note what it shows
ACT = """<pre id="result"></pre><script>
const seen = { plots: {} };
const names = (plot) => [...plot.figure.querySelectorAll("svg .series")].map((element) => element.dataset.name);
const byId = Object.fromEntries(plots.map((plot) => [plot.plot.id, plot]));
const loss = byId["curve-loss"], ratio = byId["ratio-val_loss"];
for (const plot of plots) {
  seen.plots[plot.plot.id] = names(plot);
  const texts = [...plot.svg.querySelectorAll("text")].map((element) => element.textContent);
  if (texts.length < 6 || texts.some((text) => /NaN|undefined|null/.test(text))) wrong.push("axes of " + plot.plot.id);
  if (/NaN|undefined|Infinity/.test(plot.svg.innerHTML)) wrong.push("coordinates of " + plot.plot.id);
}
const pointer = (plot, kind, share) => {
  const box = plot.svg.getBoundingClientRect();
  const at = { clientX: box.left + share * box.width, clientY: box.top + box.height / 2, bubbles: true };
  plot.svg.dispatchEvent(new PointerEvent(kind, at));
};
const key = (plot, name) => plot.svg.dispatchEvent(new KeyboardEvent("keydown", { key: name, bubbles: true }));
const button = (plot, name) => [...plot.figure.querySelectorAll(".legend button")].find((b) => b.dataset.name === name);
const path = (plot) => plot.svg.querySelector("polyline.series").getAttribute("points");
const label = (plot) => [...plot.svg.querySelectorAll("text")].map((t) => t.textContent);

pointer(loss, "pointermove", 0.6);
seen.hover = loss.tip.textContent;
const [tip, drawing] = [loss.tip, loss.svg].map((element) => element.getBoundingClientRect());
seen.inside = tip.top >= drawing.top && tip.left >= drawing.left && tip.right <= drawing.right && tip.height > 20;
key(loss, "Escape");
seen.escaped = loss.tip.textContent;
key(ratio, "ArrowRight");
seen.first = ratio.tip.textContent;
key(ratio, "ArrowRight"); key(ratio, "ArrowRight");
seen.third = ratio.tip.textContent;

button(loss, "gdn").click();
seen.hidden = [names(loss), names(ratio), button(ratio, "gdn").getAttribute("aria-pressed")];
button(loss, "gdn").click();
button(loss, "gla").dispatchEvent(new MouseEvent("dblclick", { bubbles: true }));
seen.alone = names(loss);
button(loss, "gla").dispatchEvent(new MouseEvent("dblclick", { bubbles: true }));
seen.all = names(loss);

const before = path(loss);
const smoothing = document.getElementById("smoothing");
smoothing.value = 0.9;
smoothing.dispatchEvent(new Event("input"));
seen.smoothed = path(loss) !== before;
smoothing.value = 0;
smoothing.dispatchEvent(new Event("input"));
seen.unsmoothed = path(loss) === before;
const axis = document.getElementById("axis");
seen.axes = [...axis.options].map((option) => option.value);
axis.value = "hours";
axis.dispatchEvent(new Event("change"));
seen.hours = label(loss).some((text) => text.startsWith("hours"));

const whole = [...loss.x.domain];
pointer(loss, "pointerdown", 0.5); pointer(loss, "pointermove", 0.8); pointer(loss, "pointerup", 0.8);
seen.zoomed = loss.x.domain[0] > whole[0] && loss.x.domain[1] < whole[1];
loss.svg.dispatchEvent(new MouseEvent("dblclick"));
seen.back = String(loss.x.domain) === String(whole);
key(loss, "+");
seen.keyed = loss.x.domain[1] - loss.x.domain[0] < whole[1] - whole[0];
key(loss, "0");

const paper = () => getComputedStyle(document.body).backgroundColor;
seen.theme = [paper()];
document.getElementById("theme").click();
seen.theme.push(paper());
const table = document.querySelector("#contenders table");
const speed = [...table.tHead.rows[0].cells].findIndex((cell) => cell.textContent === "tokens/s");
table.tHead.rows[0].cells[speed].querySelector("button").click();
seen.sorted = [...table.tBodies[0].rows].map((row) => row.cells[0].textContent);
seen.wide = document.documentElement.scrollWidth > innerWidth;
seen.wrong = wrong;
document.getElementById("result").textContent = JSON.stringify(seen);
</script>"""


@pytest.fixture
def seen(sweep, make_folder, tmp_path):
    """What a reader sees of the report of a sweep, one run of which is unfinished."""
    if BROWSER is None:
        pytest.skip("no Chromium")
    make_folder("gdn", seed=4, steps=100)
    assert main([str(sweep), "--out", str(tmp_path / "report")]) == 0
    page = (tmp_path / "report" / "index.html").read_text()
    assert page.count("<style>") == page.count("</body>") == 1
    page = page.replace("<style>", LISTEN + "<style>").replace("</body>", ACT + "</body>")
    path = tmp_path / "acted.html"
    path.write_text(page)
    command = [BROWSER, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", path.as_uri()]
    text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    return json.loads(html.unescape(re.search(r'<pre id="result">(.*?)</pre>', text, re.DOTALL)[1]) or "{}")


def test_a_reader_can_use_the_report(seen, request):
    labels = {"gdn", "hybrid_gdn_3to1", "hybrid_gdn_1to1", "gla", "softmax"}
    assert seen["wrong"] == []
    assert len(seen["plots"]) == 11
    for name, drawn in seen["plots"].items():
        expected = {"gdn", "gla", "softmax"} if name.startswith("ratio") else labels
        assert set(drawn) - {"gdn, seed 4, unfinished"} == expected, name
    assert "gdn, seed 4, unfinished" in seen["plots"]["curve-loss"]

    assert all(label in seen["hover"] for label in labels)
    assert " to " in seen["hover"]  # the band
    assert seen["inside"]
    assert seen["escaped"] == ""
    assert "seeds: " in seen["first"]
    assert "95%: " in seen["first"]
    assert seen["third"] not in ("", seen["first"])

    assert "gdn" not in seen["hidden"][0] + seen["hidden"][1]
    assert seen["hidden"][2] == "false"
    assert seen["alone"] == ["gla"]
    assert set(seen["all"]) >= labels
    assert seen["smoothed"]
    assert seen["unsmoothed"]
    assert seen["axes"] == ["tokens", "flops", "hours", "step"]
    assert seen["hours"]
    assert seen["zoomed"]
    assert seen["back"]
    assert seen["keyed"]
    assert len(set(seen["theme"])) == 2
    assert seen["sorted"] == ["softmax", "hybrid_gdn_1to1", "hybrid_gdn_3to1", "gdn", "gla"]
    assert not seen["wide"]
