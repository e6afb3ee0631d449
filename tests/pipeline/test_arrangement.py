"""Layers in the order of the ranks, and stored in that of the model, whatever the schedule."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from support.tiny_model import build, make_batch, mesh_of, optimizer_config
from test_runs import RUN_ERROR, initial, losses_of_run, losses_on_one_device

from parallax.checkpoint.restore import restore
from parallax.checkpoint.save import CheckpointWriter
from parallax.config.sections import AXES, CheckpointConfig
from parallax.pipeline.layer_runs import repeats_of
from parallax.sharding.collectives import as_varying
from parallax.sharding.layers_on_ranks import Arrangement
from parallax.sharding.layout import Layout
from parallax.sharding.plan import cut_over_pp
from parallax.step.optimizer import make_optimizer
from parallax.step.step import TrainStep, abstract_state, init_state

LOOP, ZIGZAG = (0, 1, 2, 3, 0, 1, 2, 3), (0, 1, 2, 3, 3, 2, 1, 0)
SIZES = {"layers": 11, "d_model": 16, "d_ff": 3}


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 12), st.booleans())
def test_every_layer_has_one_place_on_the_rank_of_its_stage_and_a_rank_runs_them_in_order(ranks, virtual, more, zigzag):
    turns = [range(ranks) if turn % 2 == 0 or not zigzag else range(ranks)[::-1] for turn in range(virtual)]
    placement = tuple(rank for turn in turns for rank in turn)
    arrangement = Arrangement(placement, ("dense",) * (len(placement) + more))
    numbers = arrangement.numbers
    assert sorted(numbers[numbers >= 0]) == list(range(arrangement.layers))
    start = 0
    for stage, rank in enumerate(placement):
        chunk = placement[:stage].count(rank)
        own = numbers[rank].reshape(virtual, -1)[chunk]
        size = int((own >= 0).sum())
        assert own[:size].tolist() == list(range(start, start + size)) and (own[size:] == -1).all()
        assert 1 <= size <= arrangement.stage_layers
        start += size


@pytest.mark.parametrize("layout", ["layers/pp d_model/dp d_ff", "layers/pp d_ff"])
@pytest.mark.parametrize(("placement", "layers"), [(LOOP, 8), (ZIGZAG, 8), (LOOP, 11), ((0, 1, 2, 3), 6)], ids=str)
def test_layers_come_to_their_ranks_and_their_gradients_back(placement, layers, layout):
    arrangement, layout = Arrangement(placement, ("dense",) * layers), Layout.parse(layout)
    sizes, axis_sizes = SIZES | {"layers": layers}, {"pp": 4, "dp": 2, "tp": 1}
    stored = cut_over_pp(layout.without("pp"), sizes, axis_sizes, names=layout.names[1:])
    # d_ff=3 divides over nothing: then every rank stores all layers.
    assert stored == Layout.parse("layers d_model/dp/pp d_ff" if "d_model" in layout.names else "layers d_ff")
    whole = np.random.default_rng(0).normal(size=[sizes[name] for name in layout.names]).astype(np.float32)

    def there_and_back(x):
        staged = arrangement.moved([stored], [as_varying(x)])[0]
        back = arrangement.moved([stored], [2 * staged], back=True)[0]
        return staged[None], back[None], as_varying(2 * x)[None]

    mapped = jax.shard_map(
        there_and_back, mesh=mesh_of(4, 2, 1), in_specs=stored.spec(), out_specs=P(AXES), check_vma=True
    )
    staged, back, doubled = (np.asarray(out).reshape(4, 2, *out.shape[1:]) for out in jax.jit(mapped)(whole))
    for pp, numbers in enumerate(arrangement.numbers):
        there = (numbers >= 0).reshape(-1, *[1] * (whole.ndim - 1))
        own = np.where(there, whole[numbers], 0)
        pieces = np.split(own, 2, axis=1) if "dp" in layout.used_axes() else [own, own]
        np.testing.assert_array_equal(staged[pp], pieces)
    # Where nothing is cut over pp, the way back leaves shares of a sum.
    back = back if "pp" in stored.used_axes() else back.sum(axis=0, keepdims=True).repeat(4, axis=0)
    np.testing.assert_array_equal(back, doubled)


SCHEDULES = [
    ((4, 1, 2), dict(schedule="interleaved", virtual=2, layers=8)),
    ((4, 2, 1), dict(schedule="zero_bubble_v", layers=11)),
    ((2, 2, 2), dict(schedule="zero_bubble", layers=7)),
]


@functools.cache
def initial_on_one_device(layers):
    return initial((1, 1, 1), layers=layers)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "changes"), SCHEDULES, ids=str)
def test_initial_values_do_not_depend_on_the_schedule(mesh, changes):
    expected = initial_on_one_device(changes["layers"])
    jax.tree.map(np.testing.assert_array_equal, initial(mesh, **changes), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "changes"), SCHEDULES, ids=str)
def test_a_run_with_dropout_has_the_losses_of_one_device(mesh, changes):
    expected = losses_on_one_device(6, layers=changes["layers"], dropout=0.1)
    np.testing.assert_allclose(losses_of_run(mesh, 6, dropout=0.1, **changes), expected, rtol=0, atol=RUN_ERROR)


def parts_of(mesh, **changes):
    model = build(mesh, **changes)
    return model, make_optimizer(optimizer_config(learning_rate=3e-3, warmup_steps=2), 20, model.plan.rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "changes"), [SCHEDULES[0], pytest.param(*SCHEDULES[1], marks=pytest.mark.slow)], ids=str
)
def test_what_one_schedule_trained_another_takes_up_bit_for_bit(tmp_path, mesh, changes):
    model, tx = parts_of(mesh, **changes)
    state, step = init_state(model, tx, seed=0), TrainStep(model, tx, seed=0)
    state, _ = step(state, jax.device_put(make_batch(rows=16), model.batch_sharding))
    with CheckpointWriter(
        tmp_path, CheckpointConfig(every_steps=1, keep_last=1, keep_best=0), settings={}
    ) as checkpoints:
        checkpoints.save(1, {"state": state._asdict()})
    other, other_tx = parts_of((2, 2, 2), schedule="gpipe", layers=changes["layers"])
    wanted = abstract_state(other, other_tx)
    found = restore(tmp_path, 1, {"state": wanted._asdict()})["state"]
    assert jax.tree.structure(found) == jax.tree.structure(state._asdict())
    for got, had, want in zip(*map(jax.tree.leaves, (found, state._asdict(), wanted._asdict())), strict=True):
        assert got.sharding == want.sharding
        assert np.asarray(got).tobytes() == np.asarray(had).tobytes()
    batch = make_batch(rows=16, seed=1)
    losses = [jax.jit(m.loss)(p, batch)["loss"] for m, p in ((model, state.params), (other, found["params"]))]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)


@pytest.mark.parametrize(
    ("placement", "kinds"),
    [
        ((0,), "a b b b"), ((0,), "a b b " * 6), ((0,), "c " + "a b b " * 5 + "c"), ((0, 1), "a b " * 4),
        ((0, 1, 2, 3), "a " + "b " * 26), ((0, 1, 0, 1), "a b b a b b a"), ((0, 1, 1, 0), "a " * 5 + "b " * 6),
        ((0,), "a b a a b a a a b a a a a b a a a a a b b a b b b a"),
    ],
    ids=str,
)  # fmt: skip
def test_the_loops_of_a_stage_meet_each_of_its_places_once_with_its_kind(placement, kinds):
    kinds = tuple(kinds.split())
    names = sorted(set(kinds))
    order = Arrangement(placement, kinds)
    stages = order.kinds_in_places.reshape(2, -1, order.stage_layers)
    place = 0
    for repeat in repeats_of(order):
        for turn in range(repeat.times):
            for run in (repeat.run_in(run, turn) for run in repeat.runs):
                assert run.place == place
                for at in range(run.places):
                    found, before = stages[:, :, place]
                    there = found < len(names)
                    assert set(found[there].tolist()) <= set(run.kinds) and (there.all() or run.uneven)
                    assert run.layer is None or (before[there] == run.layer + at).all()
                    place += 1
    assert place == order.stage_layers
    assert sum(len(repeat.runs) for repeat in repeats_of(order)) <= 8
