"""The page of a report, in a real browser: bars are as wide as their numbers, nothing overflows, nothing is fetched.

Needs Chromium (Debian: `apt install chromium`); without one on PATH the tests that measure are skipped.
"""

import dataclasses
import json
import pathlib
import re
import shutil
import subprocess
from html import escape

import pytest

from parallax.analysis.compiled.program import Compiled, CompiledCollective, CompiledFlops
from parallax.analysis.planned.step_time import StepTime
from parallax.analysis.report import Report
from parallax.analysis.traced.collectives import Sent
from parallax.analysis.traced.flops import Flops

MIB = 2**20
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
WIDTHS = (1280, 400)

SENT = (
    Sent("permute", ("pp",), 2 * MIB, 8, "forward", "pipeline/tick", "parallax/pipeline/tick.py:1"),
    Sent("permute", ("pp",), 2 * MIB, 8, "backward", "pipeline/tick", "parallax/pipeline/tick.py:1"),
    Sent("all-gather", ("dp",), MIB, 16, "forward", "sharding/plan", "parallax/sharding/plan.py:2"),
    Sent("all-gather", ("dp",), MIB, 16, "recompute", "sharding/plan", "parallax/sharding/plan.py:2"),
    Sent("reduce-scatter", ("dp",), MIB, 32, "backward", "sharding/plan", "parallax/sharding/plan.py:3"),
    Sent("all-reduce", ("tp",), 4 * MIB, 16, "forward", "<i>&quot", "parallax/model/norm.py:4"),
)
MADE = [
    CompiledCollective("all-gather", ("dp",), MIB, 32.0, 32.0, True, 1000.0, "ag", "jit(step)/shard_map/x", 1, (), ()),
    CompiledCollective(
        "all-reduce", ("dp",), MIB, 1.0, 1.0, False, 0.0, "ar", "jit(step)/update/reduce_sum", 3, (), ()
    ),
]
MEMORY = {"parameters": 30 * MIB, "saved_activations": 60 * MIB, "optimizer": 10 * MIB}
COMPILED = Compiled(
    MADE, 1e6, CompiledFlops(70e9, 0), [], [], None, [], {}, 40 * MIB, 80 * MIB, 40 * MIB, 40 * MIB, 90 * MIB
)
REPORT = Report(
    name="a <b>name</b>",
    mesh={"pp": 2, "dp": 2, "tp": 1},
    schedule="gpipe",
    microbatches=4,
    rows=16,
    seq=256,
    sent=SENT,
    sent_on_average=SENT,
    flops=Flops(model=50e9, masked=10e9, padding=0, repeated=0, recomputed=20e9, waiting=20e9),
    memory=MEMORY,
    compiled=COMPILED,
    compiled_for="4 x chip",
    time=StepTime(0.06, {"dp": 0.03}, 0.01, 0.1, 0.05, 0.5),
)

# Each width in a frame of its own; a frame shares our origin, so that it can be measured from outside.
MEASURE = """
const round = number => Math.round(number * 1000) / 1000;
const found = [...document.querySelectorAll('iframe')].map(frame => {
  const page = frame.contentDocument, root = page.documentElement;
  const bars = id => [...page.querySelectorAll(`#${id} .bar`)].map(bar => [...bar.children].map(
    part => round(part.getBoundingClientRect().width / bar.getBoundingClientRect().width)));
  const seen = element => { const box = element.getBoundingClientRect(); return box.width > 0 && box.height > 0; };
  const rows = id => [...page.querySelectorAll(`#${id} tr`)].map(
    row => [...row.children].filter(seen).map(cell => cell.textContent));
  return {
    overflow: root.scrollWidth - root.clientWidth,
    clipped: [...page.querySelectorAll('td, dd')].filter(
      e => e.scrollWidth > e.clientWidth + 1).map(e => e.textContent),
    sent: bars('sent'), memory: bars('memory'), time: bars('time'), flops: bars('flops'),
    rows: {sent: rows('sent'), memory: rows('memory')},
    facts: [...page.querySelectorAll('dd')].map(e => e.textContent),
    paper: page.defaultView.getComputedStyle(page.body).backgroundColor,
    ink: page.defaultView.getComputedStyle(page.body).color,
    fetched: page.defaultView.performance.getEntriesByType('resource').map(entry => entry.name),
  };
});
document.title = 'measured';
document.body.innerHTML = '<pre id=found></pre>';
document.querySelector('pre').textContent = JSON.stringify(found);
"""


def in_browser(folder: pathlib.Path, page: str, *, dark: bool = False) -> list[dict]:
    """What a browser makes of the page at each of WIDTHS; fails on anything that it complains about."""
    frames = "".join(
        f'<iframe srcdoc="{escape(page)}" style="width:{width}px;height:3000px"></iframe>' for width in WIDTHS
    )
    html = f"<meta charset=utf-8><body>{frames}<script>window.onload = () => {{{MEASURE}}}</script></body>"
    (folder / "measure.html").write_text(html, encoding="utf-8")
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    flags = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        f"--user-data-dir={folder}/own",
    ]
    command = [BROWSER, *flags, scheme, "--window-size=1800,3200", "--dump-dom", f"file://{folder}/measure.html"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in ended.stderr, ended.stderr
    found = re.search(r'<pre id="found">(.*?)</pre>', ended.stdout, re.DOTALL)
    assert found, ended.stdout[-500:] + ended.stderr[-500:]
    return json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


needs_browser = pytest.mark.skipif(BROWSER is None, reason=f"no browser: none of {', '.join(BROWSERS)} is on PATH")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    return in_browser(tmp_path_factory.mktemp("browser"), REPORT.to_html())


def test_the_peak_of_a_compiler_for_tpus_stands_beside_what_it_reserves():
    rows = [("arguments", 40 * MIB, 40 * MIB), ("at the peak", 100 * MIB, 90 * MIB), ("together", 100 * MIB, 120 * MIB)]
    assert REPORT.beside_compiler() == rows
    untimed = dataclasses.replace(REPORT, compiled=COMPILED._replace(cycles=None))  # as for a CPU
    assert untimed.beside_compiler() == [rows[0], rows[2]]


@needs_browser
@pytest.mark.parametrize("which", range(len(WIDTHS)), ids=lambda which: f"{WIDTHS[which]} px")
def test_bars_are_as_wide_as_their_numbers(measured, which):
    found = measured[which]
    near = lambda rows: [pytest.approx(row, abs=0.005) for row in rows]  # noqa: E731
    assert found["sent"] == near([[0.25, 0.25], [0.25, 0.25], [0.5], [1.0]])  # of 64 MiB over tp
    assert found["memory"] == near([[0.25], [0.5], [1 / 12], [40 / 120], [90 / 120], [1.0]])
    assert found["time"] == near([[0.6], [0.1], [0.3]])
    assert found["flops"] == near([[0.5], [0.1], [0.2], [0.2]])


@needs_browser
@pytest.mark.parametrize("which", range(len(WIDTHS)), ids=lambda which: f"{WIDTHS[which]} px")
def test_numbers_are_seen_and_nothing_overflows(measured, which):
    found = measured[which]
    assert found["overflow"] <= 0 and found["clipped"] == [] and found["fetched"] == []
    assert found["facts"] == ["160.0 MiB", "40.0 KiB", "100.0 MiB", "50.0 %"]
    head, *rows = found["rows"]["sent"]
    totals = [row[head.index("total")] for row in rows if len(row) > 1]
    assert totals == ["32.0 MiB", "32.0 MiB", "32.0 MiB", "64.0 MiB", "160.0 MiB"]
    head, *rows = found["rows"]["memory"]
    assert len(rows) == len(MEMORY) + 3 and rows[-1][:4] == ["together", "100.0 MiB", "120.0 MiB", "-16.7 %"]


@needs_browser
def test_the_page_is_light_or_dark_as_the_screen(measured, tmp_path):
    light, dark = measured[0], in_browser(tmp_path, REPORT.to_html(), dark=True)[0]
    assert luminance(light["paper"]) > 0.9 > 0.2 > luminance(light["ink"])
    assert luminance(dark["ink"]) > 0.8 > 0.2 > luminance(dark["paper"])


def luminance(colour):
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / 765


def test_a_page_holds_all_and_asks_for_nothing():
    page = REPORT.to_html()
    assert not re.search(r"https?://|<script|@import|url\(", page)
    assert "a &lt;b&gt;name" in page and "&lt;i&gt;&amp;quot" in page and "<b>name" not in page
    assert all(text in page for text in ("(update)", "100.0 %", "32,000", "difference", "3 arrays that were merged"))
    traced = dataclasses.replace(REPORT, compiled=None, compiled_for="Nothing was compiled.").to_html()
    assert "Nothing was compiled." in traced and "difference" not in traced


def test_a_report_of_nothing_sent_is_a_page():
    alone = dataclasses.replace(REPORT, sent=(), compiled=None, mesh={"pp": 1, "dp": 1, "tp": 1})
    assert "0 B" in alone.to_html() and "0 B" in str(alone)
