"""What happens to a value in a step is found by "go to definition", in few functions and without going to and fro."""

import jax
import jax.numpy as jnp
import optax
import pytest
import walks
from support.call_stacks import recorded
from support.traced_settings import ROWS, SEQ, settings_of

import parallax as px
from parallax.model import dense, loss
from parallax.model.batch import BATCH_ARRAYS
from parallax.sharding import collectives
from parallax.step import step as step_module

# The most functions of the shortest chain of each way.
STOPS = {"labels": 10, "weight": 17, "gradient": 10, "mesh.tp": 16}
# The functions that each value passes, and returns to a file that was left.
PASSED = {"labels": (15, 2), "weight": (19, 2), "gradient": (15, 2), "mesh.tp": (17, 0)}


@pytest.mark.parametrize("name", STOPS)
def test_each_function_of_a_way_is_found_from_one_before_it(name):
    walk = walks.WALKS[name]
    stops, _, returns = walks.counts(walk)
    assert walks.lost(walk, walks.KNOWN) == []
    assert stops <= STOPS[name] and returns <= 2


@pytest.mark.parametrize("name", PASSED)
def test_a_value_passes_so_many_functions(name):
    stops, _, returns = walks.counts(walks.PASSED[name])
    assert walks.lost(walks.PASSED[name], walks.KNOWN) == []
    assert (stops, returns) == PASSED[name]


@pytest.fixture(scope="module")
def stacks():
    """The calls at which each value acts, while a step of 1F1B with zero3 and remat="layer" is traced."""
    settings = settings_of("all-1f1b")
    step = px.step_of(settings, px.mesh_of(pp=2, dp=2, tp=2))
    batch = dict.fromkeys(BATCH_ARRAYS, jax.ShapeDtypeStruct((ROWS, SEQ), jnp.int32))
    ends = dict(labels=(loss, "cross_entropy"), weight=(dense, "parameter"), optax=(optax, "apply_updates"))
    ends |= dict(gradient=(collectives, "reduce_scatter"))
    with pytest.MonkeyPatch.context() as monkeypatch, recorded(monkeypatch, **ends) as found:
        jax.eval_shape(step.train_step, step_module.abstract_state(step.model, step.tx), batch)
    return found


@pytest.mark.parametrize(
    ("name", "end", "within", "first"),
    [
        ("labels", "labels", "", "step/step.py TrainStep.train_step"),
        (
            "weight",
            "weight",
            "model/mlp.py GatedMLP.__call__",
            "pipeline/sharded_model.py ShardedModel.loss_grads_and_statistics",
        ),
        ("gradient", "gradient", "sharding/plan.py ShardingPlan.add_up", "pipeline/stage.py one_layer"),
        ("gradient", "optax", "", "step/step.py TrainStep.train_step"),
    ],
)
def test_no_function_that_is_called_on_the_way_is_left_out(stacks, name, end, within, first):
    """Of the calls through the stop `within`, in the forward pass for a weight; from the stop `first` on."""
    passes = {"weight": "pipeline/layer_passes.py SaveLayerInput.forward"}.get(name, within)
    calls = [stack for stack in stacks[end] if within in ("", *stack) and passes in ("", *stack)]
    assert calls
    for stack in calls:
        called = [stop for stop in stack[stack.index(first) :] if stop not in walks.MARKS]
        assert [stop for stop in called if stop not in walks.PASSED[name]] == []


def test_a_function_that_nothing_leads_to_is_lost():
    walk = ["pipeline/stage.py each_layer", "pipeline/stage.py one_place", "model/loss.py cross_entropy"]
    assert walks.lost(walk) == walk[-1:]
    assert walks.counts([walk[0], walk[2], walk[1]]) == (3, 2, 1)
