"""With JAX_ENABLE_X64=1 a run, its evaluation and its text have the bits that they have without."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import traced_settings
from support.run_examples import losses, tiny_config
from support.traced_equations import inside

from parallax.cli import evaluate, generate
from parallax.model.batch import BATCH_ARRAYS
from parallax.sharding.mesh import make_mesh
from parallax.sharding.rounding import random_bits
from parallax.step.step import abstract_state, model_of, optimizer_of
from parallax.training.run import train


def test_a_run_has_the_same_losses_and_what_it_saved_the_same_text_and_evaluation(corpus, whole_run, tmp_path, capsys):
    with jax.enable_x64(True):
        train(tiny_config(corpus), tmp_path)
    assert losses(tmp_path) == losses(whole_run)
    found, _ = [], capsys.readouterr()
    for x64, folder in ((True, tmp_path), (False, whole_run)):
        with jax.enable_x64(x64):
            assert generate.main(["--workdir", str(folder), "--prompt", "It is", "--tokens", "8"]) == 0
            assert evaluate.main(["evaluate", f"--workdir={folder}"]) == 0
        found.append(capsys.readouterr().out)
    assert found[0] == found[1] and "nats a token" in found[0]


@pytest.mark.fast(2)
@pytest.mark.parametrize("name", ["alone-muon", "all-1f1b-step", "all-zb-v-ahead", "cp-ring", "ep-dense-stages"])
def test_a_step_computes_nothing_in_float64_but_constants(name):
    """Traced outside of a step, as a user's own loop may: weak scalars take the dtype of what they meet."""
    settings = traced_settings.settings_of(name)
    sizes = settings.mesh.sizes.values()
    with jax.enable_x64(True):
        mesh = make_mesh(settings.mesh, jax.devices()[: np.prod([*sizes])])
        model = model_of(settings, mesh)
        tx = optimizer_of(model)
        ids = jax.ShapeDtypeStruct((traced_settings.ROWS, traced_settings.SEQ), jnp.int32)
        batch = dict.fromkeys(BATCH_ARRAYS, ids)
        traced = jax.make_jaxpr(model.loss_and_grad)(abstract_state(model, tx).params, batch, jnp.zeros(2, jnp.int32))
    wide = [each for each in inside(traced) for out in each.outvars if out.aval.dtype == np.float64]
    assert [each for each in wide if not each.outvars[0].aval.weak_type] == []
    assert {out.dtype for out in traced.out_avals} == {np.dtype("float32")}


def test_random_bits_are_those_of_32():
    noise = jnp.array([1, 2], jnp.int32)
    with jax.enable_x64(True):
        wide = random_bits(noise, "mu", "table", (3, 4))
    np.testing.assert_array_equal(wide, random_bits(noise, "mu", "table", (3, 4)))
    assert wide.dtype == np.uint32
