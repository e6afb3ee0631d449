"""Code that a config names: what is understood, what is refused, and that a received folder imports nothing."""

import dataclasses
import functools
import json
import pathlib
import re
import sys
import textwrap
from importlib.metadata import version

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import user_parts
from support.tiny_model import build, mesh_of, settings_of

from configs.base import get_config
from parallax import user_code
from parallax.cli.command import read_line
from parallax.config.sections import ModelConfig
from parallax.config.settings import CODE, code_of, load_settings, read_settings, with_code
from parallax.errors import ConfigError
from parallax.model.loss import chunked_loss, cross_entropy
from parallax.schedules import by_name
from parallax.sharding.layout import Layout
from parallax.sharding.parameter import parameter
from parallax.step.optimizer import make_optimizer
from parallax.step.step import model_of
from parallax.user_code import UserCode, codes_by_name, imported_code, saved_code

MLP = "support.user_parts:SquaredMLP"


def named_without_address(value):
    """A name of a case that is the same in every process."""
    return re.sub(r" at 0x\w+", "", str(value))


def changed(key, value):
    section, _, name = key.partition(".")
    return read_settings(get_config(), **{section: {name: value}})


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        (f"{MLP}(power=3.0)", f"{MLP}(power=3.0)"),
        (f" {MLP}( power = 3.0 ) ", f"{MLP}(power=3.0)"),
        (f"{MLP}()", MLP),
        (user_parts.SquaredMLP, MLP),
        (functools.partial(user_parts.SquaredMLP, power=3.0), f"{MLP}(power=3.0)"),
        (functools.partial(functools.partial(user_parts.SquaredMLP, power=1.0), power=3.0), f"{MLP}(power=3.0)"),
    ],
    ids=named_without_address,
)
def test_a_text_and_an_object_are_the_same_code(written, canonical):
    settings = changed("model.mlp", written)
    assert settings.model.mlp == canonical and settings.model.mlp.target is user_parts.SquaredMLP
    again = read_settings(json.loads(json.dumps(settings.to_dict())))
    assert again == settings and hash(again.model) == hash(settings.model)
    assert [*code_of(settings)] == ["model.mlp"] and len(settings.model.mlp.source) == 64
    assert read_settings(settings, mesh={"dp": 2}).model.mlp.target is user_parts.SquaredMLP


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model.mlp", "nowhere:X", "there is no module 'nowhere' where Python looks, nor in "),
        ("model.mlp", "support.user_parts:SquareMLP", "has no 'SquareMLP'; did you mean 'SquaredMLP'"),
        ("model.mlp", f"{MLP}(powr=3.0)", f"{MLP} has no setting 'powr'; did you mean 'power'"),
        ("model.mlp", f"{MLP}(power='a')", "has power='a', a str; it must be a float"),
        ("model.mlp", f"{MLP}(power=True)", "has power=True, a bool; it must be a float"),
        ("model.mlp", f"{MLP}(power=[1])", "has power=[1], a list; use a number, a text, True or False"),
        ("model.mlp", f"{MLP}(dtype='bfloat16')", "dtype is not a setting of SquaredMLP, since Parallax gives it"),
        ("model.mlp", f"{MLP}(3.0)", "settings have names; settings are NAME=VALUE"),
        ("model.mlp", f"{MLP}(power=__import__('os'))", "cannot be read as"),
        ("model.mlp", f"{MLP}.power", "is a float, not a function or a class"),
        ("model.mlp", "gatd", "did you mean 'gated'? Known: gated, plain, or \"module:name\""),
        ("model.mlp", 7, "is a whole number, but it must be a text"),
        ("model.mlp", {"wide": user_parts.SquaredMLP}, "must be"),
        ("model.mlp", functools.partial(user_parts.SquaredMLP, 1), "give settings by name"),
        ("model.norm", "support.user_parts:eager", "eager has no parameter 'layout'; Parallax calls it with layout, "),
        ("model.kinds", "support.user_parts:ParallelBlock", 'must be "NAME=module:name"'),
        ("model.kinds", "side=support.user_parts:ParallelBlock", "no such layer; its kinds are dense"),
        ("loss.name", "math:sqrt", "sqrt has no parameter 'logits_CV'"),
        ("pipeline.schedule", "support.user_parts:numbers", "numbers has no parameter 'ranks'"),
        ("data.source", "support.user_parts:eager", "has no ranks, which eager needs; write"),
        ("optimizer.name", "math:ldexp", ", or call it what Parallax gives: learning_rate, weight_decay, mask, rows."),
        ("optimizer.name", "optax:lion(learning_rate=1.0)", "learning_rate is not a setting of lion"),
        ("model.kinds", "side = blocks:Side", 'must be "NAME=module:name"'),
        ("model.kinds", f"a={MLP} a={MLP}", "each name once"),
        ("model.kinds", {"a b": user_parts.ParallelBlock}, "model.kinds: 'a b' is not a name"),
        ("optimizer.name", str.upper, "is not a function or a class"),
        ("optimizer.name", type("no name", (), {}), "has a name that no config can hold, 'test_user_code:no name'"),
        ("optimizer.name", "support.user_parts:signs(b1=1e999)", "has b1=inf, which no config holds"),
        ("loss.name", lambda *given: given, "has no parameter 'logits_CV'"),
        ("optimizer.name", "optax:scale_by_lion(b3=1)", "has no setting 'b3'; known: b1, b2"),
    ],
    ids=named_without_address,
)
def test_code_that_cannot_be_called_is_one_line_that_says_why(key, value, message):
    with pytest.raises(ConfigError) as error:
        changed(key, value)
    text = str(error.value)
    assert key in text and message in text and "\n" not in text


def module(folder: pathlib.Path, name: str, text: str) -> pathlib.Path:
    file = folder / f"{name}.py"
    file.write_text(textwrap.dedent(text))
    return file


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, in which modules are found; they are forgotten afterwards."""
    before, path = {*sys.modules}, [*sys.path]
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in {*sys.modules} - before:
        del sys.modules[name]
    sys.path[:] = path


def test_an_annotation_may_be_anything(folder):
    module(folder, "annotated", "def make(ranks, microbatches, b1: [0, 1] = 0.9): ...\n")
    assert changed("pipeline.schedule", "annotated:make(b1=0.8)").pipeline.schedule.settings == {"b1": 0.8}


def test_a_module_that_fails_is_named_with_file_and_line(folder):
    module(folder, "failing", "import os\n\n1 / 0\n")
    with pytest.raises(ConfigError, match=r"importing failing failed with ZeroDivisionError: .*failing.py, line 3\)"):
        changed("model.mlp", "failing:X")
    module(folder, "needing", "import not_there_at_all\n")
    with pytest.raises(ConfigError, match="importing needing failed with ModuleNotFoundError: .*'not_there_at_all'"):
        changed("model.mlp", "needing:X")


def test_a_script_that_ends_itself_and_a_long_error_are_one_line(folder):
    module(folder, "ending", "raise SystemExit('bye')\n")
    with pytest.raises(ConfigError, match=r"importing ending failed with SystemExit: bye \(.*ending.py, line 1\)"):
        changed("model.mlp", "ending:X")
    module(folder, "talking", "raise ValueError('a' * 10_000)\n")
    with pytest.raises(ConfigError, match="ValueError: aaa") as error:
        changed("model.mlp", "talking:X")
    assert len(str(error.value)) < 700


def test_a_partial_and_an_object_that_is_called_may_be_named(folder):
    module(
        folder,
        "made_parts",
        """
        import functools, optax
        cool = functools.partial(optax.scale_by_lion, b1=0.5)
        class Warm:
            def __call__(self, b1: float = 0.9):
                return optax.scale_by_lion(b1)
        warm = Warm()
        """,
    )
    for name in ("cool", "warm", "warm(b1=0.5)"):
        assert changed("optimizer.name", f"made_parts:{name}").optimizer.name == f"made_parts:{name}"


def scale(factor: float = 1.0):
    return optax.scale(factor)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optimizer.name", lambda: optax.scale(1.0)),
        ("optimizer.name", functools.partial(scale, factor=np.float64(2.0))),
        ("optimizer.name", type("Übung", (), {})),
        ("model.kinds", {"dense": functools.partial(user_parts.SquaredMLP, part="a) ('b")}),
    ],
)
def test_what_a_run_saves_of_an_object_is_read_as_code_again(key, value):
    """So a run of it is loaded with the object as `code`."""
    code = imported_code(key, value)
    again = saved_code(key, json.loads(json.dumps(code)))
    assert isinstance(again, UserCode) and again == str(code) and again.target is None
    assert {*codes_by_name(again)} == ({"dense"} if key == "model.kinds" else set())
    if isinstance(value, functools.partial):
        assert again == f"{__name__}:scale(factor=2.0)"


@pytest.mark.parametrize(
    "statement",
    [
        "from inner_part import POWER",
        "import below.inner_part",
        "from below import inner_part",
        "def late():\n    from below.inner_part import POWER",
    ],
)
def test_the_source_covers_numbers_and_folders_that_a_module_imports(folder, statement):
    (folder / "below").mkdir()
    for place in (folder, folder / "below"):
        module(place, "inner_part", "POWER = 2\n")
    module(folder, "outer_part", f"{statement}\ndef step(file=None):\n    yield 'a'\n")
    first = changed("data.source", "outer_part:step").data.source.source
    assert changed("data.source", "outer_part:step").data.source.source == first
    module(folder / "below" if "below" in statement else folder, "inner_part", "POWER = 3\n")
    assert changed("data.source", "outer_part:step").data.source.source != first


def test_the_source_covers_a_package(folder):
    package = folder / "own_package"
    package.mkdir()
    module(package, "__init__", "")
    module(package, "inner_part", "POWER = 2\n")
    module(package, "outer_part", "from .inner_part import POWER\ndef step(file=None):\n    yield 'a'\n")
    first = changed("data.source", "own_package.outer_part:step").data.source.source
    module(package, "inner_part", "POWER = 3\n")
    assert changed("data.source", "own_package.outer_part:step").data.source.source != first


def test_the_source_covers_what_a_module_imports_from_its_folder(folder):
    module(folder, "inner_part", "POWER = 2\n")
    module(folder, "outer_part", "import inner_part\n\ndef step(file=None):\n    yield str(inner_part.POWER)\n")
    first = changed("data.source", "outer_part:step").data.source.source
    assert changed("data.source", "outer_part:step").data.source.source == first
    module(folder, "inner_part", "POWER = 3\n")
    assert changed("data.source", "outer_part:step").data.source.source != first
    assert changed("optimizer.name", "optax:scale_by_lion").optimizer.name.source == f"optax {optax.__version__}"
    assert changed("data.source", "absl.logging:get_verbosity").data.source.source == f"absl-py {version('absl-py')}"


def test_the_source_is_not_that_of_parallax_beside_it(folder, monkeypatch):
    """A checkout has the package and somebody's module in one folder; its version is compared by itself."""
    monkeypatch.setattr(user_code, "PACKAGE", folder / "the_package")
    (folder / "the_package").mkdir()
    module(folder / "the_package", "__init__", "VALUE = 1\n")
    module(folder, "beside_it", "import the_package\n\ndef step(file=None):\n    yield 'a'\n")
    first = changed("data.source", "beside_it:step").data.source.source
    module(folder / "the_package", "__init__", "VALUE = 2\n")
    assert changed("data.source", "beside_it:step").data.source.source == first


def test_a_received_config_imports_nothing(folder):
    """Reading it, and whatever a command does with it, does not run the code that it names."""
    module(folder, "planted", "open('ran', 'w').close()\n")
    planted = {key: "a=planted:x" if key == "model.kinds" else "planted:x" for key in CODE if key != "data.mixture"}
    saved = read_settings(get_config()).to_dict()
    for key, value in planted.items():
        section, _, name = key.partition(".")
        saved[section][name] = value
    saved["model"]["layers_of"], saved["data"]["path"] = "a*4", "corpus.txt"
    run = folder / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps(saved))
    settings = load_settings(run)
    assert {key: str(code) for key, code in code_of(settings).items()} == planted
    with pytest.raises(ConfigError, match=r"name code, and the saved config of a run imports none"):
        model_of(read_settings(settings, model={"vocab": 64}), mesh_of(2, 1, 1))
    line = read_line(["train.py", f"--config={run / 'config.json'}"], {})
    read_settings(line.config)
    dataclasses.replace(settings.model, layers=4)
    assert not (folder / "ran").exists() and "planted" not in sys.modules


@pytest.mark.parametrize("written", [{"a": "planted:x"}, {"a": {"b": "planted:x"}}, ["planted:x"], 3])
@pytest.mark.parametrize("key", CODE)
def test_a_received_config_with_an_object_in_place_of_a_text_imports_nothing(folder, key, written):
    module(folder, "planted", "def x():\n    pass\n")
    saved = read_settings(get_config(), train={"tensorboard": True}).to_dict()
    section, _, name = key.partition(".")
    saved[section][name] = written
    (folder / "config.json").write_text(json.dumps(saved))
    for read in (load_settings, lambda run: read_line(["train.py", f"--config={run / 'config.json'}"], {})):
        with pytest.raises(ConfigError, match=f"{key}=.* must be a text in quotes"):
            read(folder)
    assert "planted" not in sys.modules


def test_a_command_line_says_which_code_of_a_run_is_imported(folder):
    saved = changed("model.mlp", MLP).to_dict()
    (folder / "config.json").write_text(json.dumps(saved))
    line = read_line(["x", f"--config={folder / 'config.json'}"], {})
    with pytest.raises(ConfigError, match=f"write --config.model.mlp={MLP} on the command line"):
        model_of(read_settings(line.config, model={"vocab": 64}), mesh_of(1, 1, 1))
    line = read_line(["x", f"--config={folder / 'config.json'}", f"--config.model.mlp={MLP}"], {})
    assert read_settings(line.config).model.mlp.target is user_parts.SquaredMLP


def test_a_class_that_a_notebook_defines_anew_is_used():
    """No shape of the older class is left in a cache, also where only what the class uses is new."""
    rank = [2]

    def class_of_a_cell():
        class Wide(user_parts.SquaredMLP):
            @nn.compact
            def __call__(self, x):
                sizes = {**self.sizes, "rank": rank[0]}
                parameter(self, "extra", "rank", sizes, nn.initializers.zeros, role="bias")
                return super().__call__(x)

        return Wide

    small, mesh = settings_of(layers=2, attention="gqa"), mesh_of(1, 1, 1)
    earlier, later = (with_code(small, {"model.mlp": class_of_a_cell()}) for _ in range(2))
    assert earlier.model.mlp == str(later.model.mlp) and earlier.model != later.model
    assert model_of(earlier, mesh).shapes["blocks"]["mlp"]["extra"].shape == (2, 2)
    rank[0] = 3
    for settings in (earlier, later):
        assert model_of(settings, mesh).shapes["blocks"]["mlp"]["extra"].shape == (2, 3)


def test_an_mlp_in_a_model_without_dense_layers_is_refused():
    with pytest.raises(ConfigError, match="model.mlp=.* does nothing with model.layers_of='moe.4', which has"):
        read_settings(get_config(), model={"mlp": user_parts.SquaredMLP, "layers_of": "moe*4"})


def test_only_keys_that_may_be_code_take_some():
    with pytest.raises(ConfigError, match=r"code=\{'model.layers': ...\} is not a key that may be code; "):
        with_code(settings_of(), {"model.layers": int})
    with pytest.raises(ConfigError, match="must be a text in quotes"):
        read_settings(get_config(), model={"layers_of": len})


# ---- optimizers


def optimizer(name, **changes):
    settings = changed("optimizer.name", name)
    config = dataclasses.replace(settings.optimizer, warmup_steps=0, **changes)
    return make_optimizer(config, 4, build((1, 1, 1)).plan.rows)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("optax:scale_by_lion", {"b1": 0.5}, "optimizer.b1=0.5 does nothing with optimizer.name='optax:scale_by_lion'"),
        ("optax:sgd", {}, "optimizer.weight_decay=0.1 does nothing with optimizer.name='optax:sgd'"),
        ("support.user_parts:numbers", {}, "not an optax.GradientTransformation"),
    ],
)
def test_settings_that_an_optimizer_does_not_read_are_refused(name, changes, message):
    with pytest.raises(ConfigError, match=message):
        optimizer(name, **changes)


def test_code_is_called_by_name_whatever_the_order_of_its_parameters():
    def turned(cut, compute):
        return user_parts.wide_gathered(compute, cut)

    def late(labels_C, logits_CV, entries, z_coefficient, table):
        return cross_entropy(logits_CV, labels_C, table, z_coefficient, entries)

    small, mesh = settings_of(layers=2, attention="gqa"), mesh_of(1, 2, 1)
    plans = [
        model_of(with_code(small, {"data_parallel.policy": policy}), mesh).plan
        for policy in (turned, user_parts.wide_gathered)
    ]
    assert layouts_in(plans[0]) == layouts_in(plans[1])
    table, logits, labels = Layout.parse("vocab d_model"), jnp.eye(4), jnp.arange(4)
    config = dataclasses.replace(small.loss, name=imported_code("loss.name", late))
    sums = [chunked_loss(each, table, logits, logits, labels) for each in (config, small.loss)]
    np.testing.assert_array_equal(*sums)


def layouts_in(plan):
    return [(row.at_rest, row.resident, row.compute, row.summed) for row in jax.tree.leaves(plan.rows)]


@pytest.mark.parametrize("returned", [lambda losses: losses[0], lambda losses: losses.T, lambda losses: None])
def test_a_loss_of_another_shape_is_refused(returned):
    def loss(logits_CV, labels_C, table, z_coefficient, entries):
        return returned(cross_entropy(logits_CV, labels_C, table, z_coefficient, entries))

    config = dataclasses.replace(settings_of().loss, name=imported_code("loss.name", loss))
    table, logits, labels = Layout.parse("vocab d_model"), jnp.eye(4), jnp.arange(4)
    with pytest.raises(ConfigError, match=r"returns .* for 4 tokens; return \[2, 4\], as cross_entropy"):
        chunked_loss(config, table, logits, logits, labels)


@pytest.mark.parametrize("returned", [None, lambda compute, cut: (cut, cut, compute), lambda compute, cut: "zero1"])
def test_a_policy_that_returns_other_than_four_layouts_is_refused(returned):
    policy = returned or (lambda compute, cut: None)
    settings = with_code(settings_of(layers=2), {"data_parallel.policy": policy})
    with pytest.raises(ConfigError, match="data_parallel.policy=.* returns .*; return four layouts"):
        model_of(settings, mesh_of(1, 1, 1))


def test_a_schedule_of_another_size_is_refused():
    code = imported_code("pipeline.schedule", lambda ranks, microbatches: user_parts.eager(ranks, 2 * microbatches))
    with pytest.raises(
        ConfigError, match="returns a schedule of 2 ranks and 8 microbatches; it was called with ranks=2"
    ):
        by_name(code, 2, 4)
    with pytest.raises(ConfigError, match="pipeline.virtual=2 does nothing with"):
        by_name(imported_code("pipeline.schedule", user_parts.eager), 2, 4, 2)
    assert by_name(imported_code("pipeline.schedule", user_parts.eager), 2, 4).name == "eager"


def test_a_saved_text_is_no_code_until_somebody_imports_it():
    code = saved_code("model.mlp", MLP)
    assert code == MLP and code.target is None and isinstance(code, UserCode)
    assert ModelConfig(mlp=code).has_user_code
    assert imported_code("model.mlp", str(code)).target is user_parts.SquaredMLP
