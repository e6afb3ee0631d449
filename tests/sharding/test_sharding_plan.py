"""The sharding plan: what it says is what a step does, and what FSDP is for a Flax module alone."""

import flax.linen as nn
import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from support.tiny_model import MESHES, build, make_batch, mesh_of, params_of

from parallax.analysis.traced.collectives import sent_by
from parallax.config.sections import AXES, POLICY_NAMES, FsdpConfig
from parallax.errors import ConfigError
from parallax.model.dense import Dense
from parallax.sharding.collectives import as_varying
from parallax.sharding.layout import named_leaves
from parallax.sharding.plan import POLICIES, Policies, ShardingPlan
from parallax.step.step import model_of

SIZES = {"batch": 4, "seq": 8, "d_model": 16, "d_ff": 32}
DENSE = ("d_model d_ff/tp", "batch/dp seq d_model", "batch/dp seq d_ff/tp", SIZES)


def test_every_policy_that_a_config_may_name_is_there():
    assert tuple(POLICIES) == POLICY_NAMES


@pytest.mark.fast(15)
@pytest.mark.parametrize("mesh", [*MESHES, (2, 2, 1, 2)], ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_plan_says_how_arrays_lie(policy, mesh):
    """At rest as the shardings of the parameters, in a step as the weights that `load` returns; and `store` brings the
    gradients that microbatches are summed in back to the parameters' layouts."""
    model = build(mesh, policy=policy, schedule="one_f_one_b")
    rows, found = named_leaves(model.plan.rows), {}
    for name, sharding in named_leaves(model.shardings).items():
        assert sharding.spec == rows[name].at_rest.spec(model.mesh)
        assert ("dp" in rows[name].at_rest.used_axes()) == (policy != "ddp" and rows[name].dtype is not None)

    def local(params):
        weights = model.plan.load(params)
        grads = {part: model.plan.zero_grads(part, weights[part]) for part in weights}
        found.update(weights=named_leaves(weights), grads=named_leaves(grads))
        return model.plan.store(grads)[0]

    specs = jax.tree.map(lambda sharding: sharding.spec, model.shardings)
    stored = jax.shard_map(local, mesh=model.mesh, in_specs=(specs,), out_specs=specs, check_vma=True)
    shapes = named_leaves(model.shapes)
    assert {name: x.shape for name, x in named_leaves(jax.eval_shape(stored, model.shapes)).items()} == {
        name: x.shape for name, x in shapes.items()
    }
    for name, row in rows.items():
        sizes = dict(zip(row.compute.names, shapes[name].shape))
        for held, layout in (("weights", row.resident), ("grads", row.summed)):
            assert found[held][name].shape == layout.local_shape(sizes, dict(model.mesh.shape)), (held, name)


def test_gradients_have_the_shapes_of_parameters_where_pp_does_not_divide_the_layers():
    model = build((2, 2, 1), layers=3, schedule="one_f_one_b", policy="zero2")
    _, grads = jax.eval_shape(model.loss_and_grad, model.shapes, make_batch())
    assert jax.tree.map(lambda x: x.shape, grads) == jax.tree.map(lambda x: x.shape, model.shapes)


def test_a_table_that_is_gathered_over_two_axes_at_once_is_whole():
    model = build((2, 2, 2), policy="zero1", vocab=128)
    row = model.plan.rows["embedding"]["table"]
    assert str(row.at_rest) == "vocab/tp/dp/pp d_model"
    specs = jax.tree.map(lambda sharding: sharding.spec, model.shardings)
    load = lambda params: as_varying(model.plan.load(params)["embedding"]["table"])[None]  # noqa: E731
    params = params_of(model)
    tables = jax.jit(jax.shard_map(load, mesh=model.mesh, in_specs=(specs,), out_specs=P(AXES), check_vma=True))(params)
    halves = np.split(np.asarray(params["embedding"]["table"]), 2)  # of the vocab, one for each rank of tp
    np.testing.assert_array_equal(np.asarray(tables).reshape(4, 2, 64, -1), [halves] * 4)


@pytest.mark.parametrize("reduce", ["float32", "compute"])
def test_a_gradient_that_is_scattered_over_two_axes_at_once_is_the_sum_of_all_ranks(reduce):
    """Of whole numbers, whose sums are exact in any order."""
    model = build((2, 2, 2), policy="zero1", vocab=128, reduce=reduce)
    params = jax.tree.map(lambda leaf: np.arange(leaf.size, dtype=np.float32).reshape(leaf.shape), model.shapes)

    def local(params):
        weights = model.plan.load(params)
        grads = {part: model.plan.zero_grads(part, weights[part]) for part in weights}
        share = 1 + lax.axis_index("dp") + 2 * lax.axis_index("pp")  # 1 to 4
        grads["embedding"]["table"] = share * weights["embedding"]["table"]
        return model.plan.store(grads)[0]["embedding"]["table"]

    specs = jax.tree.map(lambda sharding: sharding.spec, model.shardings)
    out = specs["embedding"]["table"]
    store = jax.jit(jax.shard_map(local, mesh=model.mesh, in_specs=(specs,), out_specs=out, check_vma=True))
    np.testing.assert_array_equal(store(params), 10 * params["embedding"]["table"])


def dense_and_plan(policy="zero3", gather="compute"):
    dense = Dense(*DENSE)
    x = np.random.default_rng(0).normal(size=(4, 8, 16)).astype(np.float32)
    variables = jax.eval_shape(dense.init, jax.random.key(0), x)
    plan = ShardingPlan(
        variables, Policies(policy), SIZES, {"pp": 1, "dp": 2, "tp": 2}, "float32", fsdp=FsdpConfig(gather_dtype=gather)
    )
    return dense, plan, nn.meta.unbox(dense.init(jax.random.key(0), x)), x


def test_fsdp_is_a_flax_module_that_gathers_its_own_kernel():
    """One all-gather forward, one reduce-scatter backward, and the numbers of a Dense on one device."""
    dense, plan, variables, x = dense_and_plan()
    assert str(plan.rows["params"]["kernel"].at_rest) == "d_model/dp d_ff/tp"
    gathered = nn.map_variables(Dense, "params", trans_in_fn=plan.use)(*DENSE)

    def loss(apply):
        return lambda kernel, x: (apply({"params": {"kernel": kernel}}, x) ** 2).sum()

    def local(kernel, x):
        value, grad = jax.value_and_grad(loss(gathered.apply))(kernel, x)
        return jax.lax.psum(value, ("dp", "tp")), grad

    kernel = plan.at_rest["params"]["kernel"].spec()
    specs = (kernel, P("dp")), (P(), kernel)
    run = jax.shard_map(local, mesh=mesh_of(1, 2, 2), in_specs=specs[0], out_specs=specs[1], check_vma=True)
    value, grad = jax.jit(run)(variables["params"]["kernel"], x)
    expected = jax.value_and_grad(loss(dense.apply))(variables["params"]["kernel"], x)
    np.testing.assert_allclose(value, expected[0], rtol=1e-6)
    assert np.abs(grad - expected[1]).max() <= 1e-5 * np.abs(expected[1]).max()
    sent = sent_by(
        lambda kernel, x: gathered.apply({"params": {"kernel": kernel}}, x),
        ["d_model/dp d_ff/tp", "batch/dp seq d_model"],
        [variables["params"]["kernel"], x],
        mesh_of(1, 2, 2),
    )
    over_dp = {(one.kind, one.direction): one.count for one in sent if one.axes == ("dp",)}
    assert over_dp == {("all-gather", "forward"): 1, ("reduce-scatter", "backward"): 1}


def test_the_gradient_of_a_module_alone_is_that_of_the_rounded_as_if_it_were_not():
    """Of a Dense, which is linear in its kernel: that of any kernel."""
    _, plan, variables, x = dense_and_plan(gather="int8")
    apply = nn.map_variables(Dense, "params", trans_in_fn=plan.use)(*DENSE).apply
    spec = plan.at_rest["params"]["kernel"].spec()
    grad = jax.grad(lambda kernel, x: (apply({"params": {"kernel": kernel}}, x) * x.mean()).sum())
    run = jax.shard_map(grad, mesh=mesh_of(1, 2, 2), in_specs=(spec, P("dp")), out_specs=spec, check_vma=True)
    found = jax.jit(run)(variables["params"]["kernel"], x)
    halves = [np.einsum("bsd,bs->d", half, np.full(half.shape[:2], half.mean())) for half in np.split(x, 2)]
    expected = np.broadcast_to(sum(halves)[:, None], found.shape)
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


def own_zero1(compute, cut):
    return cut, compute, compute, compute


def test_a_policy_of_ones_own_is_a_function():
    batch, one = make_batch(), build((2, 2, 2), policy="zero1")
    mine = model_of(one.settings, one.mesh, code={"data_parallel.policy": own_zero1})
    same = [jax.jit(model.loss_and_grad)(params_of(model), batch) for model in (one, mine)]
    jax.tree.map(np.testing.assert_array_equal, *same)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": "zero4"}, "data_parallel.policy='zero4' is unknown; did you mean 'zero3'"),
        ({"exceptions": "embeding=zero1"}, "names 'embeding', which is not a part, .*; did you mean 'embedding'"),
        ({"exceptions": "embedding=zero9"}, "data_parallel.exceptions: embedding='zero9' is unknown"),
        ({"exceptions": "embedding"}, "'embedding' is not NAME=POLICY; write"),
    ],
)
def test_policies_that_mean_nothing_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        build((1, 2, 1), **changes)
