"""The picture of a compiled step's timeline shows all of its time, and where it waits."""

import re
from pathlib import Path
from xml.etree import ElementTree

import jax
import pytest
from support.hlo_examples import CHAIN, PASS, with_cycles

from parallax.analysis.compiled.program import BranchEvent, Compute, Kernel, LoopEvent, Share, read_hlo_text
from parallax.analysis.planned.step_time import Clock
from parallax.config.sections import MeshConfig
from parallax.hardware.chips import chip
from parallax.sharding.mesh import make_mesh

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
HALF = {"F": Share(average=0.5, lockstep=0.5)}


@pytest.fixture(scope="module")
def timelines():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        import timeline_picture

        yield timeline_picture


@pytest.fixture(scope="module")
def clock():
    mesh = make_mesh(MeshConfig(pp=2, dp=4, simulate=0), jax.devices()[:8])
    slow = chip("v5e")._replace(ici_bandwidth=4e7)  # a gather takes 4.8 us, 2 of them beside compute
    return Clock(mesh, slow, "bfloat16", lockstep=True, kernel_efficiency=1.0)


def drawn(timelines, clock, text, shares=None):
    read = read_hlo_text(with_cycles(text), clock.mesh, shares)
    return read, timelines.drawn(clock, read.timeline, "a step", "as configured")


@pytest.mark.parametrize("text", [CHAIN, PASS], ids=["a loop", "a branch"])
def test_bars_are_the_step_s_whole_time_once(timelines, clock, text):
    read, step = drawn(timelines, clock, text, HALF)
    bars = sorted((bar for bar in step.step.bars if not bar.lane.startswith("sends")), key=lambda bar: bar.start)
    assert all(before.end == pytest.approx(bar.start) for before, bar in zip(bars, bars[1:], strict=False))
    assert bars[0].start == 0 and bars[-1].end == pytest.approx(step.step.secs)
    spent = clock.run(read.timeline)
    waits = sum(secs for purpose, secs in spent.items() if purpose not in ("compute", "attention"))
    assert sum(bar.end - bar.start for bar in bars if bar.lane == "waits") == pytest.approx(waits) and waits > 0


def test_a_branch_is_as_long_as_on_the_slowest_rank_and_an_average_rank_waits_in_it(timelines, clock):
    read, step = drawn(timelines, clock, PASS, {"F": Share(average=0.25, lockstep=0.5)})
    average = Clock(clock.mesh, clock.chip, "bfloat16", lockstep=False, kernel_efficiency=1.0)
    spent = {lockstep: sum(each.run(read.timeline).values()) for lockstep, each in ((True, clock), (False, average))}
    assert step.step.secs == pytest.approx(spent[True])
    idle = timelines.spent_secs(step.step)[timelines.IDLE]
    assert idle == pytest.approx(spent[True] - spent[False]) and idle > 0
    alone = timelines.drawn(average, read.timeline, "a step", "as configured").step
    assert alone.secs == pytest.approx(spent[False]) and timelines.IDLE not in timelines.spent_secs(alone)


def test_what_a_step_s_time_went_into_is_all_of_it(timelines, clock):
    _, step = drawn(timelines, clock, PASS, {"F": Share(average=0.25, lockstep=0.5)})
    bars = timelines.together(step.step)
    assert bars[0].start == 0 and bars[-1].end == pytest.approx(step.step.secs)
    assert all(before.end == pytest.approx(bar.start) for before, bar in zip(bars, bars[1:], strict=False))


def test_a_message_s_bar_is_as_long_as_it_is_on_its_links(timelines, clock):
    read, step = drawn(timelines, clock, CHAIN)
    (gather,) = read.collectives
    sends = [bar for bar in step.step.bars if bar.lane == "sends over dp"]
    assert len(sends) == gather.count == 6
    assert all(bar.end - bar.start == pytest.approx(clock.collective_secs(gather)) for bar in sends)


def test_a_wait_says_what_for(timelines, clock):
    _, step = drawn(timelines, clock, CHAIN)
    assert {bar.label for bar in step.step.bars if bar.lane == "waits"} == {"all-gather mlp/up"}


def test_a_loop_with_attention_is_enlarged_with_its_branches_whole(timelines, clock):
    body = [Compute(1e6, 0, "mlp", True), Kernel("splash", "jit(step)/while/body/F/attention", 8, 8, 10**9)]
    loop = LoopEvent(6, [BranchEvent((0.5, 0.5), (0.5, 0.5), [[], body])])
    (turn,) = (step := timelines.drawn(clock, [LoopEvent(2, [loop])], "a step", "as configured")).turns
    assert turn.words == "forward, one of 12 turns"
    assert turn.secs == pytest.approx(sum(clock.run(body).values())) == pytest.approx(2 * step.step.secs / 12)


def test_the_picture_has_its_command_and_is_the_same_each_time(timelines, clock):
    steps = [drawn(timelines, clock, text, HALF)[1] for text in (CHAIN, PASS)]
    first, second = (timelines.picture("Two steps", "python benchmarks/timeline.py", steps) for _ in range(2))
    assert first == second and "python benchmarks/timeline.py" in first
    root = ElementTree.fromstring(first)
    boxes = [float(width) for path in root.iter() for width in re.findall(r"h([\d.]+)v", path.get("d") or "")]
    assert len(boxes) > 20 and max(boxes) < timelines.WIDTH
    red = [path for path in root.iter() if path.get("fill") == timelines.WAIT and path.get("d")]
    assert len(red) == 1 + 2 * len(steps)  # of the legend, too, and all waits together
    svg = "{http://www.w3.org/2000/svg}"
    assert root.find(f"{svg}title").text == "Two steps" and "waits" in root.find(f"{svg}desc").text


def test_messages_that_fill_no_pixel_of_a_step_have_no_lane(timelines, clock):
    _, step = drawn(timelines, clock, CHAIN)
    end = step.step.secs
    for start, lane in ((0.99999 * end, "sends over pp+dp"), (0.9 * end, "sends over tp")):
        step.step.bars.append(timelines.Bar(lane, timelines.OTHER_AXES, start, end))
    svg = timelines.picture("A step", "python benchmarks/timeline.py", [step])
    assert "over dp" in svg and "over tp" in svg and "over pp+dp" not in svg


def test_marks_of_an_axis_are_round(timelines):
    assert [timelines.tick_secs(secs) for secs in (0.865, 0.0058, 0.0166)] == pytest.approx([0.1, 0.001, 0.002])
