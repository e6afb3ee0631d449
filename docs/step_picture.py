"""Draws docs/step.svg, one step of the quickstart on its mesh: `python docs/step_picture.py`, or `make golden`.

When each pipeline rank works is its schedule's table; what a device holds and sends is the report of the traced step.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from docs.shapes import EMPTY, INK, PAPER, SOFT, box, line, page, text
from parallax.analysis.report import Report, report
from parallax.analysis.traced.trace import abstract_mesh
from parallax.cli.command import read_command
from parallax.config.settings import Settings
from parallax.display.units import in_bytes
from parallax.schedules import Costs, Schedule, by_name
from parallax.schedules.pricing import start_times, tick_ends
from parallax.step.resolve import resolve
from parallax.step.step import step_of

PICTURE = ROOT / "docs" / "step.svg"
CONFIG = ROOT / "configs" / "quickstart.py"

# The palette of Okabe and Ito, which colour-blind people can tell apart.
PASS = {"F": "#0072b2", "B": "#e69f00"}
AXIS = {"pp": "#cc79a7", "dp": "#009e73", "tp": "#d55e00"}
SENDS = {
    "pp": "activations to the next stage, gradients to the one before; shares of embedding and head",
    "dp": "weights gathered for each layer, gradients summed and scattered (FSDP)",
    "tp": "activations gathered before the matrices of a layer, partial sums scattered behind them",
}
HELD = {
    "saved_activations": ("saved activations", "#56b4e9"),
    "working_activations": ("those of the layer at work", "#a9d8f3"),
    "optimizer": ("optimizer", "#999999"),
    "parameters": ("parameters", "#555555"),
    "gradients": ("gradients", "#e69f00"),
    "pipeline_buffers": ("messages", AXIS["pp"]),
}
LINE = "#c9ced1"
WIDTH, HEIGHT, LEFT, RIGHT = 960, 658, 110, 20
ROW, GANTT_TOP = 32, 84
BOX_WIDTH, BOX_HEIGHT, BOXES_TOP = 200, 74, 262  # room for the text in DejaVu Sans, which is wider than Helvetica
GAP_X, GAP_Y = 40, 40
STAGE_LEFT = (20, 500)  # of the devices of each pipeline rank


def draw(settings: Settings, report: Report) -> str:
    """SVG of a step on a mesh of 2·2·2."""
    assert list(settings.mesh.sizes.values()) == [2, 2, 2], "the picture has room for eight devices"
    schedule = by_name(settings.pipeline.schedule, settings.mesh.pp, settings.pipeline.microbatches)
    parts = [*_heading(report), *_gantt(schedule), *_devices(settings), *_sent(report), *_held(report)]
    return page(WIDTH, HEIGHT, parts, font=12)


def _heading(report: Report) -> Iterator[str]:
    mesh = " ".join(f"{axis}={size}" for axis, size in report.mesh.items())
    title = f"One training step of configs/{report.name}.py on {report.devices} devices"
    yield text(20, 30, title, size=17, more="font-weight='bold'")
    tokens = f"{report.rows} rows of {report.seq} tokens in {report.microbatches} microbatches"
    yield text(20, 51, f"mesh {mesh}; {tokens}; schedule {report.schedule}", size=13, fill=SOFT)


def _gantt(schedule: Schedule) -> Iterator[str]:
    """The schedule's table: each cell a microbatch in a stage, with what is sent where a tick ends."""
    costs = Costs()
    time_of, starts = costs.of(schedule), start_times(schedule, costs, asynchronous=False)
    scale = (WIDTH - LEFT - RIGHT) / float(tick_ends(schedule, costs)[-1])
    for rank in range(schedule.ranks):
        y = GANTT_TOP + rank * (ROW + 14)
        yield text(LEFT - 12, y + 21, f"pp rank {rank}", anchor="end")
        yield box(LEFT, y, WIDTH - LEFT - RIGHT, ROW, EMPTY)
    for action, start in starts.items():
        rank = schedule.rank_of(action.stage)
        x, y = LEFT + float(start) * scale, GANTT_TOP + rank * (ROW + 14)
        width = float(time_of[action.kind]) * scale
        yield box(x, y, width, ROW, PASS[action.kind], f"stroke='{PAPER}'")
        ink = PAPER if action.kind == "F" else INK
        yield text(x + width / 2, y + 21, str(action), anchor="middle", fill=ink)
        step = 1 if action.kind == "F" else -1
        if 0 <= action.stage + step < schedule.stages:
            end, below = x + width, y + ROW if step > 0 else y
            yield line(end, below, end, below + step * 14, AXIS["pp"], 3)
    y = GANTT_TOP + schedule.ranks * (ROW + 14) + 12
    yield box(LEFT, y - 11, 12, 12, PASS["F"])
    yield text(LEFT + 18, y, "1F0: forward, microbatch 0 in stage 1")
    yield box(LEFT + 262, y - 11, 12, 12, PASS["B"])
    yield text(LEFT + 280, y, "1B0: its backward pass")
    yield line(LEFT + 446, y - 11, LEFT + 446, y + 1, AXIS["pp"], 3)
    yield text(LEFT + 456, y, "sent to the other rank where a tick ends; grey: nothing to do")


def _devices(settings: Settings) -> Iterator[str]:
    """A box for each device with its share of layers, rows and heads, and lines for the axes along which it sends."""
    yield text(20, BOXES_TOP - 20, "What each device does", size=14, more="font-weight='bold'")
    yield text(220, BOXES_TOP - 20, "a line joins devices that send to each other along this axis", fill=SOFT)
    for dp in range(2):
        top = BOXES_TOP + dp * (BOX_HEIGHT + GAP_Y)
        yield from _across(STAGE_LEFT[0] + 2 * BOX_WIDTH + GAP_X, STAGE_LEFT[1], top, "pp")
        for pp, left in enumerate(STAGE_LEFT):
            yield from _across(left + BOX_WIDTH, left + BOX_WIDTH + GAP_X, top, "tp")
            for tp in range(2):
                x = left + tp * (BOX_WIDTH + GAP_X)
                if dp == 0:
                    middle, bottom = x + BOX_WIDTH / 2, top + BOX_HEIGHT
                    yield line(middle, bottom, middle, bottom + GAP_Y, AXIS["dp"], 3)
                    yield text(middle + 7, bottom + GAP_Y / 2 + 4, "dp")
                yield from _box(settings, {"pp": pp, "dp": dp, "tp": tp}, x, top)


def _across(left: float, right: float, top: float, axis: str) -> Iterator[str]:
    yield line(left, top + BOX_HEIGHT / 2, right, top + BOX_HEIGHT / 2, AXIS[axis], 3)
    yield text((left + right) / 2, top + BOX_HEIGHT / 2 - 6, axis, anchor="middle")


def _box(settings: Settings, rank: dict[str, int], x: float, top: float) -> Iterator[str]:
    layers, heads, rows = settings.model.layers // 2, settings.model.heads // 2, settings.data.global_batch // 2
    lines = (
        f"layers {_span(rank['pp'], layers)}, a quarter stored",
        f"heads {_span(rank['tp'], heads)}, half of d_ff",
        f"rows {_span(rank['dp'], rows)} of the batch",
    )
    yield box(x, top, BOX_WIDTH, BOX_HEIGHT, "#f7f8f8", f"stroke='{LINE}' rx='5'")
    yield text(x + 10, top + 19, "  ".join(f"{axis} {at}" for axis, at in rank.items()), more="font-weight='bold'")
    for at, words in enumerate(lines):
        yield text(x + 10, top + 36 + 15 * at, words)


def _span(rank: int, count: int) -> str:
    return f"{rank * count} to {(rank + 1) * count - 1}"


def _sent(report: Report) -> Iterator[str]:
    """What a device sends in a step over each axis."""
    totals: dict[str, int] = defaultdict(int)
    for one in report.sent:
        if len(one.axes) == 1:
            totals[one.axes[0]] += one.total_bytes
    top = BOXES_TOP + 2 * BOX_HEIGHT + GAP_Y + 34
    yield text(20, top, "What it sends in a step, the update included", size=14, more="font-weight='bold'")
    for at, (axis, what) in enumerate(SENDS.items()):
        y = top + 22 + at * 19
        yield line(20, y - 4, 44, y - 4, AXIS[axis], 3)
        yield text(52, y, axis, more="font-weight='bold'")
        yield text(150, y, in_bytes(totals[axis]), anchor="end")
        yield text(166, y, what, fill=SOFT)


def _held(report: Report) -> Iterator[str]:
    """What a device holds when it holds most, as one bar."""
    top = BOXES_TOP + 2 * BOX_HEIGHT + GAP_Y + 128
    yield text(20, top, f"What it holds at most: {in_bytes(report.peak)}", size=14, more="font-weight='bold'")
    scale, x = (WIDTH - 40) / report.peak, 20.0
    for at, (name, (words, fill)) in enumerate(HELD.items()):
        width = report.memory[name] * scale
        yield box(x, top + 10, width, 16, fill)
        x += width
        label, y = 20 + at % 3 * 240, top + 44 + at // 3 * 18  # two lines of three
        yield box(label, y - 9, 10, 10, fill)
        yield text(label + 15, y, f"{words} {in_bytes(report.memory[name])}", size=11, fill=SOFT)
    yield box(x, top + 10, max(WIDTH - 20 - x, 0), 16, "#dfe2e3")


def picture(report: Report) -> str:
    """The picture of the quickstart's report."""
    return draw(settings(), report)


def settings() -> Settings:
    return read_command(["step_picture", f"--config={CONFIG}"], {})[0]


if __name__ == "__main__":
    mesh = abstract_mesh(settings().mesh.sizes, simulated=True)
    PICTURE.write_text(picture(report(step_of(resolve(settings()), mesh), name=CONFIG.stem)), encoding="utf-8")
    print(PICTURE.relative_to(ROOT))
