"""What plans, sweeps and reports say of expert ranks, of a dense model as of one with experts."""

import re

import jax
import pytest
from support import tiny_model
from support.plan_changes import changes_of
from support.step_collectives import step_collectives
from test_plan import PAIR
from test_plan import tiny as tiny_settings

from parallax.analysis.planned.layouts import Choice, build_if_legal, choices, flags_of
from parallax.analysis.planned.plan import plan, plan_heading, sweep_table
from parallax.analysis.planned.step_time import predict
from parallax.analysis.planned.sweep import LeastWork, PricedLayout, draw
from parallax.analysis.planned.topology import read_topology
from parallax.analysis.report import report
from parallax.analysis.traced.collectives import bytes_by
from parallax.analysis.traced.memory import memory
from parallax.config.sections import MeshConfig
from parallax.errors import ConfigError
from parallax.sharding.mesh import resolve_sizes
from parallax.step.optimizer import make_optimizer
from parallax.step.step import TrainStep, abstract_state

ROWS, SEQ = 32, 64
FOUR, EIGHT = map(read_topology, ("v5e:2x2", "v5e:2x4"))


def build(mesh, **changes):
    return tiny_model.build(mesh, microbatches=4, **changes)


def adamw(model):
    return make_optimizer(tiny_model.optimizer_config(), 1000, model.plan.rows)


def wide(**changes):
    """Settings with expert ranks on four devices."""
    few = dict(data_global_batch=8, mesh_dp=2, mesh_ep=2, pipeline_microbatches=1, model_layers=4)
    return tiny_settings(**few | changes)


MIXTURE = dict(model_layers_of="moe*4", model_experts=6, model_experts_per_token=2)


def test_weights_travel_over_all_data_axes_together():
    cut, whole = (step_collectives(build(mesh), ROWS, SEQ) for mesh in ((1, 2, 1, 1, 2, 2), (1, 8, 1)))
    of_weights = lambda sent, axes: bytes_by(  # noqa: E731
        [one for one in sent if one.axes == axes and "norm" not in one.module and one.kind != "all-reduce"],
        "kind", "direction", "module",
    )  # fmt: skip
    found = of_weights(cut, ("dp", "cp", "ep"))
    assert found and found == of_weights(whole, ("dp",))


@pytest.mark.slow
def test_planned_bytes_are_those_of_as_many_data_ranks():
    model, as_data = build((1, 2, 1, 1, 1, 4)), build((1, 8, 1))
    planned = lambda model: memory(  # noqa: E731
        model, abstract_state(model, adamw(model)).opt_state, global_batch=ROWS, seq=SEQ
    )
    assert planned(model) == planned(as_data)


@pytest.mark.slow
def test_a_plan_of_a_dense_model_is_that_of_as_many_data_ranks():
    """Both axes together fill the same links, and send the same."""
    found, as_data = predict(wide(), FOUR), predict(wide(mesh_dp=4, mesh_ep=1), FOUR)
    assert found.secs == pytest.approx(as_data.secs, rel=1e-12) and found.peak_bytes == as_data.peak_bytes
    assert "dp ep" in found.exposed_secs


# ---- layouts


def test_ep_is_tried_for_models_with_experts_alone_in_sizes_that_divide_them():
    tried = lambda settings, where: {choice.ep for choice in choices(settings, where)}  # noqa: E731
    assert tried(wide(), FOUR) == {1}
    assert tried(wide(**MIXTURE), FOUR) == tried(wide(**MIXTURE, mesh_ep=1), EIGHT) == {1, 2}
    assert tried(wide(**MIXTURE | dict(model_experts=8)), FOUR) == {1, 2, 4}
    of_mixture = [*choices(wide(**MIXTURE, mesh_replica=2), EIGHT)]
    assert {c.pp * c.dp * c.cp * c.ep * c.tp for c in of_mixture} == {4}
    assert all(8 % (2 * c.dp * c.ep * c.microbatches) == 0 for c in of_mixture)


def test_a_layout_with_expert_ranks_is_applied_and_asked_for_by_flags():
    settings = wide()
    own = Choice.of(settings)
    other = own._replace(ep=4, dp=1)
    assert own.ep == 2 and own.mesh == "1·2·1 ep=2" and Choice.of(other.applied(settings)) == other
    assert flags_of(own.keys_to(other)) == ["--config.mesh.dp=1", "--config.mesh.ep=4"]
    assert build_if_legal(other.applied(settings), FOUR) is not None
    flags = {flags for flags, _ in changes_of(settings, FOUR)}
    assert {"--config.mesh.dp=1 --config.mesh.ep=4", "--config.mesh.dp=4 --config.mesh.ep=1"} <= flags
    of_mixture = {flags for flags, _ in changes_of(wide(**MIXTURE, mesh_dp=4, mesh_ep=1), FOUR)}
    assert "--config.mesh.dp=2 --config.mesh.ep=2" in of_mixture
    assert not any(".ep=" in flag for flag, _ in changes_of(tiny_settings(), PAIR))


@pytest.mark.slow
def test_bounds_are_never_above_what_is_found():
    settings = wide()
    least, own = LeastWork(settings, FOUR, build_if_legal(settings, FOUR)), Choice.of(settings)
    for choice in (own._replace(policy="zero1"), own._replace(dp=1, cp=2, remat="none")):
        assert least.bound(choice) <= predict(choice.applied(settings), FOUR).secs * (1 + 1e-9), choice
    assert least.bound(own) == pytest.approx(least.bound(own._replace(dp=4, ep=1)))


@pytest.mark.slow
def test_a_table_and_a_drawing_of_layouts_show_expert_ranks():
    settings = wide()
    own = Choice.of(settings)
    rows = [PricedLayout(choice, predict(choice.applied(settings), FOUR)) for choice in (own, own._replace(dp=4, ep=1))]
    lines = list(sweep_table(rows, {}, [], own))
    assert lines[0].split()[:4] == ["pp", "dp", "ep", "tp"] and max(map(len, lines)) <= 100
    assert lines[1].split()[1:5] == ["1", "2", "2", "1"]
    assert "experts" in draw("tiny", rows, FOUR, own)
    assert "ep" not in next(sweep_table(rows[1:], {}, [], own)).split()


# ---- words


def test_plans_and_reports_name_the_axis():
    heading = plan_heading("wide", wide(), FOUR)
    assert "mesh pp=1 dp=2 ep=2 tp=1" in heading and "1 microbatch of 2 x 16 tokens a device" in heading
    found = plan(wide(), FOUR)
    assert "exposed over dp ep" in repr(found)
    assert "s of messages over dp and ep hide behind the work" in repr(found)
    model = build((1, 2, 1, 1, 1, 4))
    assert "pp=1 dp=2 ep=4 tp=1" in repr(model)
    step = TrainStep(model, adamw(model), 0)
    batch = {"tokens": jax.ShapeDtypeStruct((ROWS, SEQ), "int32")}
    text = str(report(step, batch, name="wide", compiled=False))
    assert "pp=1 dp=2 ep=4 tp=1 on 8 devices" in text and re.search(r"^dp, ep\n +all-gather", text, re.MULTILINE)


def test_links_of_ep_are_those_between_cp_and_tp():
    sizes = {"pp": 1, "dp": 2, "cp": 2, "ep": 4, "tp": 4}
    routes = [read_topology("v5p:4x4x4").route(sizes, [axis]).bandwidth for axis in ("tp", "ep", "cp")]
    assert routes == sorted(routes, reverse=True)


def test_a_mesh_of_other_devices_says_which_meshes_are_left_beside_ep():
    config = MeshConfig(pp=1, dp=3, tp=1, simulate=0, ep=2)
    with pytest.raises(ConfigError, match=r"mesh.ep=2 .* legal pp·dp·tp for 4: 1·4·1"):
        resolve_sizes(config, 8)
    with pytest.raises(ConfigError, match=r"there are 8, which mesh\.cp=2 x mesh\.ep=3 does not divide; use one of"):
        resolve_sizes(MeshConfig(pp=1, dp=-1, tp=1, simulate=0, cp=2, ep=3), 8)
