"""Few calls of the package lie between a train step and a layer, in few files."""

import inspect
import pathlib
import traceback

import optax
import pytest
from tiny import build, make_batch

import parallax
from parallax.model.transformer import Block
from parallax.training.step import TrainStep

PACKAGE = pathlib.Path(parallax.__file__).parent
# Where a place may be without a layer, or a layer is gathered ahead, there is a turn around the turn of the loop over
# layers; what "elementwise" saves is found by a trace of its own, in another file.
CASES = {
    **{
        f"{schedule} {remat}": (dict(schedule=schedule, remat=remat), 10, 4)
        for schedule in ("gpipe", "one_f_one_b")
        for remat in ("none", "layer")
    },
    "interleaved": (dict(schedule="interleaved", virtual=2, layers=4, remat="layer"), 10, 4),
    "zero_bubble": (dict(schedule="zero_bubble", layers=4, remat="layer"), 10, 4),
    "zero_bubble_v": (dict(schedule="zero_bubble_v", layers=4, remat="none"), 10, 4),
    "stage": (dict(schedule="one_f_one_b", layers=4, remat="stage"), 10, 4),
    "elementwise": (dict(schedule="one_f_one_b", layers=4, remat="elementwise"), 10, 5),
    "uneven": (dict(schedule="one_f_one_b", layers=3, remat="layer"), 11, 4),
    "prefetch": (dict(schedule="one_f_one_b", layers=4, remat="layer", prefetch=1), 11, 4),
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


@pytest.mark.parametrize(("changes", "frames", "files"), CASES.values(), ids=CASES)
def test_from_train_step_to_block_are_few_frames_in_few_files(monkeypatch, changes, frames, files):
    stacks = stacks_to_a_layer(monkeypatch, **changes)
    passes = {frame.name for stack in stacks for frame in stack} & {"forward", "backward"}
    assert passes == ({"forward", "backward"} if changes["remat"] in ("layer", "stage") else {"forward"})
    for stack in stacks:
        assert [stack[0].name, stack[-1].name] == ["train_step", "__call__"]
        told = "\n".join(f"{pathlib.Path(f.filename).relative_to(PACKAGE)}: {f.name}" for f in stack)
        assert len(stack) <= frames and len({frame.filename for frame in stack}) <= files, told
