"""What happens to a value in a step is found by "go to definition", in few functions and without going to and fro."""

import jax
import jax.numpy as jnp
import optax
import pytest
import walks
from support.call_stacks import recorded
from support.traced_settings import ROWS, SEQ, settings_of
from support.value_flow import Flow

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
def traced():
    """A step of 1F1B with zero3 and remat="layer": its program, the places of labels and of a weight among the
    arguments, and the calls at which each value acts."""
    settings = settings_of("all-1f1b")
    step = px.step_of(settings, px.mesh_of(pp=2, dp=2, tp=2))
    batch = {name: jax.ShapeDtypeStruct((ROWS, SEQ), jnp.int32) for name in BATCH_ARRAYS}
    state = step_module.abstract_state(step.model, step.tx)
    ends = dict(labels=(loss, "cross_entropy"), weight=(dense, "parameter"), optax=(optax, "apply_updates"))
    ends |= dict(gradient=(collectives, "reduce_scatter"))
    with pytest.MonkeyPatch.context() as monkeypatch, recorded(monkeypatch, **ends) as stacks:
        program = jax.make_jaxpr(step.train_step)(state, batch)
    values = dict(labels=batch["labels"], weight=state.params["blocks"]["mlp"]["gate"]["kernel"])
    leaves = jax.tree.leaves((state, batch))
    places = {name: [leaf is value for leaf in leaves].index(True) for name, value in values.items()}
    return program, places, stacks


@pytest.mark.parametrize(
    ("name", "until"), [("labels", "model/loss.py cross_entropy"), ("weight", "model/dense.py Dense.product")]
)
def test_no_function_whose_operations_a_value_goes_through_is_left_out(traced, name, until):
    program, places, _ = traced
    stops = Flow(program, places[name]).until(until)
    arrived = [
        stop for stop in stops if stop.startswith(("model/dense.py", "sharding/einsum.py", "sharding/streams.py"))
    ]
    assert [stop for stop in stops if stop not in {*walks.PASSED[name], *walks.KNOWN, *walks.MARKS, *arrived}] == []
    assert len(stops) > 10


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
def test_no_function_that_is_called_on_the_way_is_left_out(traced, name, end, within, first):
    """Of the calls through the stop `within`, in the forward pass for a weight; from the stop `first` on."""
    passes = {"weight": "pipeline/layer_passes.py SaveLayerInput.forward"}.get(name, within)
    calls = [stack for stack in traced[2][end] if within in ("", *stack) and passes in ("", *stack)]
    assert calls
    for stack in calls:
        called = [stop for stop in stack[stack.index(first) :] if stop not in walks.MARKS]
        assert [stop for stop in called if stop not in walks.PASSED[name]] == []


def test_a_function_that_nothing_leads_to_is_lost():
    walk = ["pipeline/stage.py each_layer", "pipeline/stage.py one_place", "model/loss.py cross_entropy"]
    assert walks.lost(walk) == walk[-1:]
    assert walks.counts([walk[0], walk[2], walk[1]]) == (3, 2, 1)
