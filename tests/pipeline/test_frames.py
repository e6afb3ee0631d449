"""Few calls of the package lie between a train step and a layer, in few files."""

import inspect
import pathlib
import traceback

import optax
import pytest
from tiny import SCHEDULES, build, make_batch

import parallax
from parallax.model.transformer import Block
from parallax.training.step import TrainStep

PACKAGE = pathlib.Path(parallax.__file__).parent
FRAMES, FILES = 10, 4
# What traces a layer; of one that keeps named activations, passes run parts of what was traced for its plan.
TRACED = {
    "none": {"plan", "forward"},
    "elementwise": {"plan"},
    "layer": {"plan", "forward", "backward"},
    "stage": {"plan", "forward", "backward"},
}
MIXTURE = dict(experts=8, experts_per_token=2, d_expert=16)
CASES = {
    f"{schedule} {case}": dict(schedule=schedule, remat="layer", layers=8) | SCHEDULES[schedule] | changes
    for schedule in SCHEDULES
    for case, changes in {
        "none": dict(remat="none"),
        "elementwise": dict(remat="elementwise"),
        "layer": {},
        "stage": dict(remat="stage"),
        "uneven": dict(layers=7),
        "prefetch": dict(prefetch=1),
        "uneven prefetch": dict(layers=7, prefetch=1),
        "mixtures": MIXTURE | dict(layers_of="moe*8"),
        "mixtures in turn": MIXTURE | dict(layers_of="(dense moe)*4"),
        "mixtures at the end": MIXTURE | dict(layers=7, layers_of="dense*5 moe*2"),
        "mixtures prefetch": MIXTURE | dict(layers_of="dense*2 moe*6", prefetch=1),
        "mixtures in turn prefetch": MIXTURE | dict(layers_of="(dense moe*2)*3 dense*3", layers=12, prefetch=1),
    }.items()
}


def stacks_to_a_layer(monkeypatch, **changes):
    """Of each trace of a layer in a step, the frames of the package from `train_step` to `Block.__call__`."""
    found, plain = [], Block.__call__

    def recorded(self, *args, **kwargs):
        frames = [frame for frame in traceback.extract_stack()[:-1] if PACKAGE in pathlib.Path(frame.filename).parents]
        names = [frame.name for frame in frames]
        if "train_step" in names:
            code = inspect.unwrap(plain).__code__
            block = traceback.FrameSummary(code.co_filename, code.co_firstlineno, code.co_name)
            found.append([*frames[names.index("train_step") :], block])
        return plain(self, *args, **kwargs)

    model = build((2, 1, 1), **changes)
    step = TrainStep(model, optax.sgd(0.1), seed=0)
    monkeypatch.setattr(Block, "__call__", recorded)
    step.lower(*make_batch()["tokens"].shape)
    return found


@pytest.mark.fast(1)
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_from_train_step_to_block_are_few_frames_in_few_files(monkeypatch, changes):
    stacks = stacks_to_a_layer(monkeypatch, **changes)
    assert {frame.name for stack in stacks for frame in stack} & {"plan", "forward", "backward"} == TRACED[
        changes["remat"]
    ]
    for stack in stacks:
        assert [stack[0].name, stack[-1].name] == ["train_step", "__call__"]
        told = "\n".join(f"{pathlib.Path(f.filename).relative_to(PACKAGE)}: {f.name}" for f in stack)
        assert len(stack) <= FRAMES and len({frame.filename for frame in stack}) <= FILES, told
