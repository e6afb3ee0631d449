"""What notebooks and users import: `import parallax as px`. Each name is there, documented, and prints to be read."""

import dataclasses
import subprocess
import sys
from html.parser import HTMLParser

import jax
import numpy as np
import pytest
from support.run_examples import tiny_config
from support.tiny_model import build, mesh_of

import parallax as px
from configs.base import get_config
from parallax.config.settings import PRINTED_WIDTH
from parallax.errors import CheckpointError, ConfigError, NotationError
from parallax.storage.run_files import read_metrics

VOID = {"br"}


class Tags(HTMLParser):
    """Elements that are open; a closing tag must be of the last."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], []

    def handle_starttag(self, tag, attributes):
        self.open += [tag] * (tag not in VOID)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def shown(thing) -> str:
    """The text of what a notebook shows, whose tags must match."""
    page = Tags()
    page.feed(thing._repr_html_())
    assert not page.open
    return "".join(page.text)


def settings(**changes) -> px.Settings:
    small = {"vocab": 64, "layers": 2, "d_model": 32, "d_ff": 64, "heads": 4, "d_head": 8, "d_latent": 16, "d_rope": 4}
    sections = {"model": small, "mesh": {"pp": 2, "dp": 2, "tp": 2}, "pipeline": {"microbatches": 2}}
    sections |= {"data": {"seq": 16, "global_batch": 8}}
    return px.read_settings(get_config(), **sections | changes)


@pytest.mark.parametrize("name", px.HOME)
def test_every_name_is_there_and_says_what_it_is(name):
    assert (getattr(px, name).__doc__ or "").strip() and name in dir(px)


def test_a_name_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(AttributeError, match="has no 'lod'; it has IGNORED, Layout, .*load"):
        _ = px.lod


# ---- simulated devices, as a notebook asks for them

LATE = """
import sys
import jax
import parallax as px
from parallax.errors import ConfigError
if sys.argv[1] == "late":
    jax.numpy.ones(3)
try:
    px.simulate_devices(3)
    px.simulate_devices(3)
    print(len(jax.devices()))
except ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("when", "said"),
    [
        ("before", "3\n"),
        ("late", "mesh.simulate=3 comes too late: JAX already runs with 1 cpu device(s); restart the kernel, or start"),
    ],
)
def test_devices_are_simulated_after_jax_is_imported_and_before_it_is_used(when, said):
    run = [sys.executable, "-c", LATE, when]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout.startswith(said)


def test_a_mesh_of_some_of_the_devices():
    assert dict(px.mesh_of(dp=2, tp=2).shape) == {"pp": 1, "dp": 2, "tp": 2}
    assert px.mesh_of(dp=-1).size == len(jax.devices())
    with pytest.raises(ConfigError, match=r"wants 16 devices, but there are 8"):
        px.mesh_of(pp=2, dp=8)


# ---- settings


def test_settings_are_read_from_a_config_with_changes():
    config = get_config()
    changed = px.read_settings(config, mesh={"tp": 4}, model={"layers": 8})
    assert (changed.mesh.tp, changed.model.layers, config.mesh.tp) == (4, 8, 1)
    assert px.read_settings(changed) == changed == px.read_settings(changed.to_dict())
    assert dataclasses.replace(changed.mesh, tp=2) == px.read_settings(changed, mesh={"tp": 2}).mesh


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modle": {"layers": 8}}, "unknown key modle; did you mean 'model'?"),
        ({"model": {"layer": 8}}, "unknown key model.layer; did you mean 'layers'?"),
        ({"model": 8}, "model=8 must be a section"),
        ({"model": {"layers": "8"}}, "model.layers='8' is a text in quotes, but it must be a whole number"),
    ],
)
def test_wrong_changes_are_named(changes, message):
    with pytest.raises(ConfigError) as error:
        px.read_settings(get_config(), **changes)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: px.model_of({"model": {}}),
            "a dict is given where settings are needed; make them with px.read_settings",
        ),
        (
            lambda: px.step_of({"model": {}}),
            "a dict is given where settings are needed; make them with px.read_settings",
        ),
        (lambda: px.model_of(get_config()), "a ConfigDict is given where settings are needed; make them with px.read_"),
        (
            lambda: px.plan({"model": {}}, "v5e:2x2"),
            "a dict is given where settings are needed; make them with px.read",
        ),
        (lambda: px.report(settings()), "a Settings is given where a step is needed; write px.step_of(settings)"),
        (lambda: px.report({"model": {}}), "a dict is given where a step is needed; write px.step_of(settings)"),
    ],
)
def test_what_is_no_settings_or_no_step_is_one_line(call, message):
    with pytest.raises(ConfigError) as error:
        call()
    assert message in str(error.value) and "\n" not in str(error.value)


# ---- what prints


def test_a_layout_shows_its_axes():
    layout = px.Layout.parse("batch/dp seq d_model +tp")
    assert shown(layout) == "batch/dp seq d_model +tp" and eval(repr(layout), {"Layout": px.Layout}) == layout


def test_settings_print_section_by_section_in_lines_that_fit_and_show_every_key():
    text, page = repr(settings()), shown(settings())
    lines = text.splitlines()
    assert [line.split()[0] for line in lines if line[0] != " "] == list(settings().to_dict())
    assert max(map(len, lines)) <= PRINTED_WIDTH and {line.index("=") > 14 for line in lines} == {True}
    assert all(f"{key}=" in text and f"{key}=" in page for keys in settings().to_dict().values() for key in keys)


def test_a_model_shows_each_parameter_with_its_layout_and_the_bytes_of_a_device():
    model = px.model_of(settings())
    text, page = repr(model), shown(model)
    for name, layout in px.named_leaves(model.layouts).items():
        assert any(line.split()[0] == name and str(layout) in line for line in text.splitlines()[2:])
        assert name in page and str(layout) in page
    params = jax.eval_shape(lambda: model.shapes)
    total = sum(leaf.size for leaf in jax.tree.leaves(params))
    pieces = zip(jax.tree.leaves(model.shapes), jax.tree.leaves(model.shardings))
    held = sum(4 * int(np.prod(cut.shard_shape(leaf.shape))) for leaf, cut in pieces)
    assert text.startswith(f"{total:,} parameters on pp=2 dp=2 tp=2, {held / 1024:.1f} KiB of them on a device")
    assert max(map(len, text.splitlines())) <= 112


def test_a_schedule_prints_as_its_grid_and_is_drawn():
    schedule = px.schedules.gpipe(2, 3)
    assert repr(schedule).splitlines()[2] == "rank 0 0F0 0F1 0F2   .   . 0B0 0B1 0B2"
    assert schedule._repr_svg_() == px.schedules.gantt(schedule, px.schedules.Costs())


def test_what_a_step_starts_from_is_what_its_seed_says():
    step = px.step_of(settings(train={"seed": 3}))
    assert repr(step).startswith("TrainStep of 22,976 parameters on pp=2 dp=2 tp=2, ")
    state, expected = step.init(), step.model.init(3)
    assert int(state.step) == 0
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected)))


# ---- what is sent


def test_what_is_the_same_on_ranks_has_its_gradient_summed_over_them():
    arrays = [np.ones((8, 4), np.float32), np.ones((4, 4), np.float32)]
    multiply = lambda x, w: x @ w  # noqa: E731
    found = px.sent_by(multiply, ["batch/dp d_model", "d_model d_ff"], arrays, mesh_of(2, 2, 2))
    assert [one[:5] for one in found] == [("all-reduce", ("dp",), 64, 1, "backward")]
    assert not px.sent_by(multiply, ["batch d_model", "d_model d_ff"], arrays, mesh_of(2, 2, 2))
    with pytest.raises(NotationError, match="unknown dim 'd_modle'"):
        px.sent_by(multiply, ["batch d_modle", "d_model d_ff"], arrays, mesh_of(2, 2, 2))


# ---- plans


def llama(**changes):
    model = {"d_model": 1024, "layers": 8, "heads": 8, "d_head": 128, "attention": "gqa", "vocab": 32000}
    return px.read_settings(get_config(), model=model, data={"seq": 1024, "global_batch": 64}, **changes)


def test_plans_print_and_stand_side_by_side():
    kept = px.plan(llama(), "v5e:4x4", name="kept")
    other = px.plan(llama(mesh={"tp": 4}), "v5e:4x4", name="tensor")
    large = px.plan(px.read_settings(llama(), data={"global_batch": 2**14}, pipeline={"remat": "none"}), "v5e:4x4")
    assert kept.fits and not large.fits and kept.secs < other.secs
    assert abs(sum(kept.parts.values()) - kept.secs) < 1e-9 and sum(kept.memory.values()) == kept.peak_bytes
    assert repr(kept).startswith("kept on v5e:4x4: 16 x TPU v5e\nmesh pp=1 dp=16 tp=1") and "fits: " in shown(kept)
    both = px.plan.compare([other, kept, large])
    assert [plan.name for plan in both.plans] == ["kept", "tensor"] and both.too_large == (large,)
    assert "does not fit" in repr(both).splitlines()[-1] and kept.layout in both.front
    assert both._repr_svg_().startswith("<svg")


def test_plans_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="no plans to compare"):
        px.plan.compare([])
    with pytest.raises(ConfigError, match="plans for v5e:4x4 and v5e:2x2 cannot be compared"):
        px.plan.compare([px.plan(llama(), "v5e:4x4"), px.plan(llama(), "v5e:2x2")])
    with pytest.raises(ConfigError, match="topology=v5e is not a topology"):
        px.plan(llama(), "v5e")


# ---- runs


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "first"
    return path, px.train(px.read_settings(tiny_config(corpus)), path)


@pytest.mark.slow
def test_a_run_is_opened_on_another_mesh(trained):
    path, outcome = trained
    assert (outcome.reason, outcome.step) == ("finished", 8)
    run = px.load(path, tp=2)
    assert run.step == 8 and dict(run.model.mesh.shape) == {"pp": 1, "dp": 1, "tp": 2}
    steps, losses = run.curve("train/loss")
    assert steps.tolist() == [*range(1, 9)]
    assert losses.tolist() == [row["train/loss"] for row in read_metrics(path / "metrics.jsonl")]
    assert run.curve("eval/loss")[0].tolist() == [4, 8]
    assert f"{path}, step 8 of 8" in repr(run) and f"{path}, step 8 of 8" in shown(run)
    earlier = px.load(path, step=4)
    assert earlier.step == 4 and not np.array_equal(*(jax.tree.leaves(r.params)[0] for r in (run, earlier)))


def test_a_run_writes_and_is_looked_into(trained):
    run = px.load(trained[0])
    text = run.generate("Document", tokens=5, temperature=0.0)
    assert text.startswith("Document") and len(text) > len("Document")
    batch = run.batch_of(text)
    inside = px.look_inside(run.model, run.params, batch)
    # Greedy: each token that it wrote is the likeliest one.
    ids = inside.logits[0, len("Document") - 1 :, : run.tokenizer.vocab].argmax(-1)
    assert ids.tolist() == batch["labels"][0, len("Document") - 1 :].tolist()
    assert run.batch(split="train")["tokens"].shape == (8, 32)


def test_what_a_run_has_not_is_named(trained, tmp_path):
    run = px.load(trained[0])
    with pytest.raises(ConfigError, match=r"has no number 'train/los'; did you mean 'train/loss'\?"):
        run.curve("train/los")
    with pytest.raises(ConfigError, match="unknown key sample.temprature; did you mean 'temperature'"):
        run.generate("a", temprature=1.0)
    with pytest.raises(ConfigError, match="is 1 token, which has no next one"):
        run.batch_of("a")
    with pytest.raises(CheckpointError, match="there is no checkpoint of step 3 in .*; steps there: 4, 8"):
        px.load(trained[0], step=3)
    with pytest.raises(CheckpointError, match="is missing; is .* the folder of a run"):
        px.load(tmp_path)


def test_a_model_of_tests_is_shown_whatever_its_mesh():
    assert "pp=8 dp=1 tp=1" in repr(build((8, 1, 1)))
