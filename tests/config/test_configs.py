"""Every config that the repository ships is right, at its real size, on the mesh that it names."""

import importlib
import math
import pathlib
import re
import subprocess
import sys

import jax
import pytest

from parallax.analysis.planned.layouts import model_on_topology
from parallax.analysis.planned.plan import JAX_TAKES
from parallax.analysis.planned.topology import read_topology
from parallax.analysis.traced.flops import flops_per_token, parameters_by_component
from parallax.analysis.traced.memory import memory, predicted_memory
from parallax.analysis.traced.trace import abstract_mesh
from parallax.cli.command import read_command
from parallax.config.settings import read_settings
from parallax.display.units import in_bytes
from parallax.errors import ConfigError
from parallax.sharding.mesh import resolve_sizes
from parallax.step.optimizer import make_optimizer
from parallax.step.resolve import resolve
from parallax.step.step import abstract_state, model_of

ROOT = pathlib.Path(__file__).parents[2]
NAMES = sorted(path.stem for path in (ROOT / "configs").glob("*.py"))
# name: (devices, billions of parameters)
AT_SCALE = {
    "llama_1b_16": (16, 1.2),
    "llama_1b_128k": (16, 1.2),
    "llama2_7b_64": (64, 6.74),
    "olmo3_7b_64k": (16, 7.3),
    "deepseek_v2_lite_mla": (16, 2.6),
    "deepseek_v2_lite_16": (16, 15.7),
    "mixtral_8x7b_128": (128, 46.7),
    "gemma3_12b": (16, 11.77),
    "llama3_70b": (256, 70.6),
    "llama3_405b": (512, 405.8),
    "deepseek_v3": (512, 671.0),
    "qwen3_235b": (256, 235.1),
    "gpt_oss_20b": (8, 20.9),
}


def get_config(name):
    return importlib.import_module(f"configs.{name}").get_config()


def build(name):
    """The model of a config on a mesh of the size that it asks for, and its settings."""
    settings = read_settings(get_config(name))
    settings = read_settings(settings, model={"vocab": settings.model.vocab or 1024})
    written = [size for size in settings.mesh.sizes.values() if size > 0]
    sizes = resolve_sizes(settings.mesh, settings.mesh.simulate or math.prod(written))
    model = model_of(settings, abstract_mesh(sizes))
    model.check_batch(settings.data.global_batch, settings.data.seq)
    return settings, model


@pytest.mark.fast(2)
@pytest.mark.parametrize("name", NAMES)
def test_every_config_builds_with_its_optimizer_and_a_plan(name):
    settings, model = build(name)
    tx = make_optimizer(settings.optimizer, settings.train.steps, model.plan.rows)
    data = settings.data
    plan = memory(model, abstract_state(model, tx).opt_state, global_batch=data.global_batch, seq=data.seq)
    assert plan.peak > plan.parameters + plan.optimizer > 0 and plan.working_activations > 0
    assert flops_per_token(settings.model, model.plan.declared, seq=data.seq) > 0


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", AT_SCALE)
def test_configs_at_scale_have_the_size_of_the_published_model_and_fit_their_chips(name):
    devices, billions = AT_SCALE[name]
    settings, model = build(name)
    assert math.prod(model.axis_sizes.values()) == devices
    assert sum(parameters_by_component(model.plan.declared).values()) / 1e9 == pytest.approx(billions, rel=0.02)
    tx = make_optimizer(settings.optimizer, settings.train.steps, model.plan.rows)
    data = settings.data
    plan = memory(model, abstract_state(model, tx).opt_state, global_batch=data.global_batch, seq=data.seq)
    chip = 16e9 if name.startswith("llama_1b") else 80 * 2**30 if name.startswith("gpt_oss") else 95e9
    assert sum(plan) < chip


# What each is sized for, and its billions of parameters.
GPUS = {
    "gpu_24gb": (["RTX4090:1", "RTX3090:1", "L4:1", "A10:1"], 0.34),
    "gpu_24gb_x8": (["RTX4090:8"], 1.2),
    "gpu_24gb_lora": (["RTX4090:1", "RTX3090:1", "L4:1", "A10:1"], 6.74),
    "gpu_80gb": (["H100:1"], 1.2),
    "gpu_80gb_x8": (["H100:8", "A100:8", "H100:2x8", "H100:4x8"], 6.74),
    "gpu_80gb_16x8": (["H100:16x8"], 70.6),
    "text_to_chat_x8": (["H100:8"], 0.57),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GPUS)
def test_configs_for_gpus_fit_in_what_jax_takes_of_them_with_room_to_spare(name):
    topologies, billions = GPUS[name]
    header = importlib.import_module(f"configs.{name}").__doc__
    for at, written in enumerate(topologies):
        topology = read_topology(written)
        settings = resolve(read_settings(get_config(name)), topology.as_devices)
        assert (settings.model.kernel, settings.model.dtype) == ("cudnn", "bfloat16")
        model = model_on_topology(settings, topology)
        assert sum(parameters_by_component(model.plan.declared).values()) / 1e9 == pytest.approx(billions, rel=0.02)
        peak = predicted_memory(model, settings).peak
        assert peak < 0.9 * JAX_TAKES * topology.chip.usable_bytes
        # The header has what the plan says of the first.
        if at == 0:
            assert f"{in_bytes(peak)} of {topology.chip.usable_bytes >> 30}" in header and written in header
    assert "not yet run" in header


@pytest.mark.parametrize("name", NAMES)
def test_headers_say_what_a_reader_needs(name):
    header = importlib.import_module(f"configs.{name}").__doc__
    wanted = ("For:", "Numbers:", "Command:", "Hardware:", "Time:", "Loss:")
    assert name == "base" or not [word for word in wanted if word not in header]


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_on_the_standard_library_says_of_which_python(name):
    config = importlib.import_module(f"configs.{name}")
    _, _, loss = config.__doc__.partition("Loss:")
    read = config.get_config().data.source == "stdlib" and loss and "not yet run" not in loss
    assert not read or re.search(r"Python\s3\.\d", " ".join(loss.split()))


def test_a_config_of_the_users_own_may_lie_anywhere(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from configs.tiny_gqa import get_config as get_base\n"
        "def get_config():\n"
        "    config = get_base()\n"
        "    config.mesh.tp = 0\n"
        "    return config\n"
    )
    command = [sys.executable, ROOT / "train.py", f"--config={path}"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    # Found and read, from another folder: the error is the one that we put into it.
    assert ended.stderr.startswith("ConfigError: mesh.tp=0 is not a number of devices")
    assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1 and not ended.stdout


@pytest.mark.parametrize("depth", [4, 20, 26])
def test_one_dial_sizes_a_recipe(depth):
    arguments = ["train.py", f"--config={ROOT / 'configs' / 'text_to_chat_x8.py'}", f"--config.model.depth={depth}"]
    settings, _ = read_command(arguments, {})
    model, data, steps = settings.model, settings.data, settings.train.steps
    assert (model.layers, model.d_model, model.heads) == (depth, 64 * depth, depth // 2)
    assert 0 <= model.d_ff - 8 * model.d_model / 3 < 128 and model.d_ff % 128 == 0
    parameters = depth * (4 * model.d_model**2 + 3 * model.d_model * model.d_ff)
    tokens = data.seq * data.global_batch
    assert steps * tokens == pytest.approx(20 * parameters, rel=0.01)
    operations = 6 * parameters * 20 * parameters
    assert settings.optimizer.learning_rate == pytest.approx(0.3118 * operations**-0.125)
    assert 0 < tokens - 0.2920 * operations**0.3271 <= data.seq * data.global_batch / settings.pipeline.microbatches


@pytest.mark.parametrize(
    ("config", "depth", "said"),
    [
        ("text_to_chat_x8", 0, r"--config=text_to_chat_x8: .* cannot be computed with those written: "),
        ("quickstart", 8, r"model\.depth=8 is not model\.layers=4: nothing follows from it here"),
    ],
)
def test_a_dial_that_nothing_follows_is_refused(config, depth, said):
    with pytest.raises(ConfigError, match=said):
        read_command(["train.py", f"--config={config}", f"--config.model.depth={depth}"], {})


def test_the_benchmark_is_the_agreed_work():
    settings, model = build("bench_small")
    m, data = settings.model, settings.data
    assert (m.d_model, m.layers, m.heads, m.d_head, m.d_ff, m.vocab) == (256, 8, 8, 32, 704, 8192)
    assert (data.seq, data.global_batch, m.dtype) == (256, 32, "float32")
    kernels = 8 * (4 * 256 * 256 + 3 * 256 * 704) + 8192 * 256
    assert flops_per_token(m, model.plan.declared, seq=256) == 6 * kernels + 6 * 8 * 256 * 8 * 32
    assert jax.tree.leaves(model.shapes)[0].dtype == "float32"
