"""Numbers that go wrong: found before the update, skipped or the end of the run, named, and replayed."""

import copy
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.checkpoint_examples import flip as flip_file
from support.checkpoint_examples import largest_file
from support.run_examples import stop_at, tiny_config
from support.tiny_model import build, make_batch, optimizer_config, params_of

from parallax.checkpoint.steps import latest_step
from parallax.cli import replay
from parallax.config.sections import GuardConfig
from parallax.pipeline import ShardedModel
from parallax.step.guard import init_guard, judge
from parallax.step.optimizer import make_optimizer
from parallax.step.step import TrainStep, init_state, state_shardings, updated_if
from parallax.storage.run_files import read_metrics
from parallax.training import run as run_module
from parallax.training.corruption import CorruptionError, SilentCorruptionCheck
from parallax.training.divergence import make_diagnosis, not_finite
from parallax.training.folder import RunFolder
from parallax.training.loop import TrainingLoop
from parallax.training.run import DivergenceError, train

NOTHING = dict(max_skipped_steps=3, spike_z=0.0, spike_signal="loss", spike_window_steps=4)


def bits(tree):
    """All arrays of a tree as integers: NaN equals itself, and 0 is not -0."""
    return [np.asarray(leaf).view(np.uint32) for leaf in jax.tree.leaves(tree)]


def assert_same_bits(tree, other):
    for a, b in zip(bits(tree), bits(other), strict=True):
        np.testing.assert_array_equal(a, b)


def with_gradients(monkeypatch, change):
    """Programs that are traced from now on change their gradients: `change(step number, gradients)`."""
    as_it_was = ShardedModel.loss_grads_and_statistics

    def changed(self, params, batch, noise=None):
        metrics, grads, statistics = as_it_was(self, params, batch, noise)
        grads = grads if noise is None else change(noise[1], grads)  # no step: what it takes is planned
        return metrics, grads, statistics

    monkeypatch.setattr(ShardedModel, "loss_grads_and_statistics", changed)


def not_a_number(step, grads):
    """One entry of one gradient is NaN, on one device alone: in steps 3 and 4, counted from 1, and from step 6 on."""
    number, leaf = step + 1, grads["blocks"]["mlp"]["up"]["kernel"]
    bad = (number == 3) | (number == 4) | (number >= 6)
    grads["blocks"]["mlp"]["up"]["kernel"] = leaf.at[1, 0, 0].add(jnp.where(bad, jnp.nan, 0))
    return grads


# Runs of these settings share a program, and no others have it.
BAD = {
    "train.seed": 34,
    "checkpoint.every_steps": 2,
    "train.steps": 10,
    "guard.max_skipped_steps": 2,
    "checkpoint.keep_best": 0,
}


@functools.cache
def tiny_step(mesh):
    model = build(mesh)
    tx = make_optimizer(optimizer_config(warmup_steps=2), 20, model.plan.rows)
    return model, init_state(model, tx, 0), TrainStep(model, tx, 0, GuardConfig(**NOTHING))


def batch_of(model, seed=0):
    return jax.device_put(make_batch(rows=16, seed=seed), model.batch_sharding)


@pytest.mark.fast(1)
@pytest.mark.parametrize("mesh", [pytest.param((1, 1, 1), marks=pytest.mark.slow), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_a_step_that_is_not_finite_changes_no_bit_of_parameters_and_optimizer(mesh, value):
    model, initial, step = tiny_step(mesh)
    batch = batch_of(model)
    state, metrics = step(jax.tree.map(jnp.copy, initial), batch)
    assert not metrics["skipped"] and not metrics["in_a_row"]
    state.params["blocks"]["mlp"]["up"]["kernel"] = state.params["blocks"]["mlp"]["up"]["kernel"].at[3, 0, 0].set(value)
    before = jax.tree.map(np.asarray, (state.params, state.opt_state))
    for number in (1, 2):
        state, metrics = step(state, batch)  # donated, as in a run
        assert_same_bits(before, (state.params, state.opt_state))
        assert metrics["skipped"] == 1 and metrics["in_a_row"] == metrics["skipped_steps"] == number
    assert int(state.step) == 3


@pytest.mark.parametrize("passes", [True, False])
def test_an_update_in_a_loop_is_that_of_a_branch(passes):
    """As on GPUs, where a loop updates in place."""

    def update(params, opt_state, grads):
        return jax.tree.map(lambda x, g: x - g, params, grads), opt_state + 1

    params = {"kernel": jnp.arange(3.0), "scale": jnp.float32(jnp.nan)}
    kept, given = (params, jnp.int32(7)), (jax.tree.map(jnp.ones_like, params),)
    in_loop, in_branch = (
        jax.jit(functools.partial(updated_if, update=update, in_loop=loop))(jnp.bool_(passes), kept=kept, given=given)
        for loop in (True, False)
    )
    assert in_loop[1] == 7 + passes and float(in_loop[0]["kernel"][2]) == 2 - passes
    assert_same_bits(in_branch, in_loop)


def test_after_too_many_in_a_row_nothing_passes_any_more():
    """The host reads metrics a step late: what it dispatched meanwhile finds the state as it was."""
    model, initial, step = tiny_step((2, 2, 2))
    state, batch = jax.tree.map(jnp.copy, initial), batch_of(model)
    state = state._replace(params=jax.tree.map(lambda x: x * jnp.nan, state.params))
    for number in range(1, NOTHING["max_skipped_steps"] + 2):
        state, metrics = step(state, batch)
        assert metrics["in_a_row"] == number
    state = state._replace(params=jax.tree.map(jnp.copy, initial.params))
    state, metrics = step(state, batch)
    assert metrics["skipped"] == 1 and np.isfinite(metrics["loss"]) and metrics["in_a_row"] == 0
    assert_same_bits(state.params, initial.params)


PLACES = []  # where the run `diverged` says that it is, and how


@pytest.fixture(scope="module")
def diverged(corpus, tmp_path_factory):
    """A run whose gradients are NaN in steps 3 and 4 and from step 6 on, and its error; not to be changed."""
    folder = tmp_path_factory.mktemp("diverged")
    with pytest.MonkeyPatch.context() as patch:
        with_gradients(patch, not_a_number)
        patch.setattr("parallax.training.divergence.set_phase", lambda what, **how: PLACES.append((what, how)))
        with pytest.raises(DivergenceError) as error:
            train(tiny_config(corpus, **BAD, **{"checkpoint.keep_last": 9}), folder)
    return folder, error.value


@pytest.mark.slow
def test_what_is_skipped_is_logged_with_its_windows_and_documents_and_the_run_goes_on(diverged):
    folder, _ = diverged
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["train/skipped_steps"] for row in rows] == [0, 0, 1, 2, 2, 3, 4, 5]
    skipped = [row for row in rows if "skipped/reason" in row]
    assert [row["step"] for row in skipped] == [3, 4, 6, 7, 8]
    for row in skipped:
        assert row["skipped/reason"] == "not finite" and row["train/grad_norm"] is None and row["train/loss"] > 0
        assert len(set(row["skipped/windows"])) == 8 and set(row["skipped/documents"]) <= set(range(40))
    log = (folder / "log.txt").read_text()
    assert "step 3 skipped: not finite, loss" in log and "grad_norm nan (1 in a row, 2 are let pass); windows" in log
    assert all("NaN" not in line and json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    # The rate is that of the next update, not of the next step.
    rates = [row["train/learning_rate"] for row in rows]
    assert rates[2] == rates[3] == rates[4] != rates[5]
    # The save and the evaluation of step 4, which is skipped, wait for step 5; those of step 8 for none.
    assert [row["step"] for row in rows if "eval/loss" in row] == [5]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["2", "5"]


@pytest.mark.slow
def test_the_diagnosis_has_the_time_of_what_is_compiled(diverged):
    assert PLACES == [("the diagnosis of step 6", {"compiling": True})]


def test_windows_and_documents_are_those_of_the_batch(corpus, tmp_path, monkeypatch):
    """The oracle looks for the batch's text in the files."""
    from parallax.config.settings import read_settings
    from parallax.data import open_reader

    data = read_settings(tiny_config(corpus)).data
    reader = open_reader(data, folder=tmp_path, vocab=None, split="train")
    texts = [path.read_bytes() for path in sorted(corpus.glob("*.txt"))]
    for step in (0, 5, 200):
        windows, tokens = reader.windows_of(step), reader.batch(step)["tokens"]
        for window, row in zip(windows, tokens, strict=True):
            end = reader.tokenizer.end
            pieces = [bytes(p[p != end].astype(np.uint8)) for p in np.split(row, np.flatnonzero(row == end) + 1)]
            found = reader.documents_of(np.array([window]))
            joined = b"".join(texts[document] for document in found)
            assert b"".join(pieces) in joined
            assert len(found) in ((row[:-1] == end).sum() + 1, (row == end).sum() + 1)


@pytest.mark.slow
def test_too_many_end_the_run_with_status_4_and_say_where_and_how_to_replay(diverged):
    folder, error = diverged
    message, rows = str(error), read_metrics(folder / "metrics.jsonl")
    assert error.exit_status == 4
    assert (
        f"step 6 is not finite: loss {rows[5]['train/loss']:.4g}, grad_norm nan, nor are the 2 steps after" in message
    )
    assert str(min(rows[5]["skipped/windows"])) in message.split("of windows ")[1].split(",")[0]
    assert "the first value that is not finite is the gradient of blocks.mlp.up.kernel in layer 1" in message
    assert f"`python -m parallax.replay --workdir={folder} --step=6`" in message
    assert latest_step(folder / "checkpoints") == 5  # the last healthy one
    assert [row["step"] for row in rows] == list(range(1, 9))


def test_a_step_of_which_only_its_save_is_recorded_is_compared_with_nothing(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "perf/on_disk_secs": 1.5}\n')
    lines = replay.compare_with_metrics({"loss": 1.5, "grad_norm": 2.0}, RunFolder(tmp_path), 3)
    assert lines == [f"{name} now, not recorded in metrics.jsonl" for name in ("loss 1.5", "grad_norm 2.0")]


@pytest.mark.slow
@pytest.mark.parametrize("start", [5, *(pytest.param(start, marks=pytest.mark.slow) for start in (2, 0))])
def test_a_step_is_replayed_from_the_nearest_checkpoint_before_it(start, diverged, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "copy"
    shutil.copytree(diverged[0], folder)
    if start == 2:
        flip_file(largest_file(folder / "checkpoints" / "5" / "params"))
    elif not start:
        shutil.rmtree(folder / "checkpoints")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with_gradients(monkeypatch, not_a_number)
    # Either way to write a flag will do.
    assert replay.main(["replay", *(["--workdir", str(folder)] if start else [f"--workdir={folder}"]), "--step=6"]) == 0
    said = capsys.readouterr().out
    assert f"replaying step 6 from {f'the checkpoint of step {start}' if start else 'initial values'}" in said
    assert "step 6: windows" in said and ("step 4 is skipped on the way" in said) == (start < 4)
    assert ("the checkpoint of step 5 in" in said and "is damaged" in said) == (start == 2)
    assert "first value that is not finite: gradient of blocks.mlp.up.kernel in layer 1" in said
    rows = {line.split("  ")[0]: line for line in said.splitlines()}
    assert "1 not finite" in rows["layer 1"] and "not finite" not in rows["layer 0"] + rows["embedding"] + rows["head"]
    row = read_metrics(folder / "metrics.jsonl")[5]
    assert f"loss {row['train/loss']!r} now, {row['train/loss']!r} in metrics.jsonl: the same" in said
    assert "grad_norm nan now, None in metrics.jsonl: the same" in said
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("arguments", "message", "status"),
    [
        (["--step=3"], "--workdir is required: the folder of the run", 2),
        (["--workdir=nowhere", "--step=3"], "--workdir=nowhere is not the folder of a run", 3),
        (["--workdir={run}"], "--step=0 is not a step of this run; use 1 to train.steps=8", 2),
        (["--workdir={run}", "--step=9"], "--step=9 is not a step of this run; use 1 to train.steps=8", 2),
        (["--workdir={run}", "--step=x"], "invalid literal", 2),
        (["--workdir={run}", "--stepp=1"], "unknown flag --stepp; did you mean '--step'?", 2),
    ],
    ids=str,
)
def test_a_replay_of_what_is_not_there_is_one_line(arguments, message, status, observed_run, capsys):
    assert replay.main(["replay", *(argument.format(run=observed_run) for argument in arguments)]) == status
    captured = capsys.readouterr()
    *before, last = captured.err.splitlines()
    assert message in last and not captured.out and all("/config.json " in line for line in before)


def test_who_is_asked_to_stop_among_bad_steps_saves_after_the_next_good_one(corpus, tmp_path, monkeypatch):
    with_gradients(monkeypatch, not_a_number)
    stop_at(monkeypatch, 2)
    outcome = train(tiny_config(corpus, **BAD), tmp_path)
    assert outcome.reason == "stopped" and outcome.step == 5 == latest_step(tmp_path / "checkpoints")


def test_parameters_that_are_not_finite_are_never_saved(corpus):
    model, initial, _ = tiny_step((2, 2, 2))
    params = jax.tree.map(jnp.copy, initial.params)
    assert not not_finite(params)
    params["head"]["norm"]["scale"] = params["head"]["norm"]["scale"].at[2].set(jnp.inf)
    steps = TrainingLoop.__new__(TrainingLoop)  # it comes as far as the check
    with pytest.raises(DivergenceError, match=r"after step 7 parameters are not finite: head.norm.scale; they are not"):
        steps.save(7, initial._replace(params=params), None)


CASES = {
    "parameter": ("blocks.mlp.up.kernel", (5, 0, 0), np.nan, "parameter blocks.mlp.up.kernel in layer 5"),
    "activation": ("blocks.mlp.down.kernel", (5,), 3e38, "output of layer 5"),
    "embedding": ("embedding.table", (7, 3), np.inf, "parameter embedding.table"),
    "loss": ("head.norm.scale", (), 3e38, "loss, of finite activations"),
}


INTERLEAVED = ((2, 2, 2), "interleaved", 2)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [pytest.param(((1, 1, 1), "gpipe", 1), marks=pytest.mark.slow), INTERLEAVED], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_first_value_that_is_not_finite_is_named(cut, case):
    path, at, value, expected = CASES[case]
    model, diagnose = diagnosed(*cut)
    params = params_of(model)
    *parts, leaf = path.split(".")
    inner = functools.reduce(lambda tree, key: tree[key], parts, params)
    inner[leaf] = jax.device_put(inner[leaf].at[at].set(value), inner[leaf].sharding)
    found = diagnose(params, batch_of(model), np.zeros(2, np.int32))
    assert found.first == expected
    assert f"first value that is not finite: {expected}" in found.lines()


@functools.cache
def diagnosed(mesh, schedule, virtual):
    model = build(mesh, schedule=schedule, virtual=virtual)
    return model, make_diagnosis(model)


@pytest.mark.slow
def test_a_healthy_step_is_found_finite_with_its_norms():
    model, diagnose = diagnosed(*INTERLEAVED)
    params, batch = params_of(model), batch_of(model)
    found = diagnose(params, batch, np.zeros(2, np.int32))
    assert found.first is None and "all is finite" in found.lines()
    _, grads = jax.jit(model.loss_and_grad)(params, batch)
    squares = sum(float(np.sum(value[..., 1] ** 2)) for value in found.gradients.values())
    assert squares == pytest.approx(sum(float(jnp.sum(g**2)) for g in jax.tree.leaves(grads)), rel=1e-5)
    assert found.grad_norm == pytest.approx(squares**0.5, rel=1e-5)


# ---- spikes


def judged(losses, norms, **changes):
    """Which of these values the guard lets pass, by the compiled function."""
    config = GuardConfig(**NOTHING | changes)
    state, passed = init_guard(), []
    step = jax.jit(lambda state, loss, norm: judge(config, state, {"loss": loss, "grad_norm": norm}))
    for loss, norm in zip(losses, norms, strict=True):
        passes, state = step(state, jnp.float32(loss), jnp.float32(norm))
        passed.append(bool(passes))
    return passed, state


def test_spikes_are_found_by_the_running_z_score():
    """The oracle keeps the same statistics in ten lines of float64."""
    rng, window, z = np.random.default_rng(0), 8, 3.0
    values = rng.normal(2.0, 0.1, 200)
    values[[40, 41, 90, 150]] = 5.0, 4.0, 2.9, 1000.0
    values[160:] += 20  # a level that lasts
    values[120] = np.nan
    mean = variance = seen = 0
    expected = []
    for value in values:
        bound = mean + z * variance**0.5
        spike = seen >= window and variance > 0 and value > bound
        expected.append(bool(np.isfinite(value) and not spike))
        if np.isfinite(value):
            weight = 1 / (min(seen, window - 1) + 1)
            off, seen = (bound if spike else value) - mean, min(seen + 1, window)
            mean, variance = mean + weight * off, (1 - weight) * (variance + weight * off**2)
    assert not any(expected[at] for at in (40, 41, 90, 120, 150, 160)) and all(expected[190:])
    found, state = judged(values, np.ones(200), spike_z=z, spike_window_steps=window, max_skipped_steps=1)
    assert found == expected and int(state.skipped) == expected.count(False) and int(state.in_a_row) == 0
    # The other signal, and the guard turned off.
    assert judged(np.ones(200), values, spike_z=z, spike_window_steps=window, spike_signal="grad_norm")[0] == expected
    assert judged(values, np.ones(200))[0] == np.isfinite(values).tolist()


def test_after_too_many_steps_that_are_not_finite_one_more_is_skipped():
    """The host has read of them one step late; who has no host, as a user's own loop, goes on behind it."""
    values = [1.0, np.nan, np.nan, 1.0, 1.0, np.nan, 1.0]
    assert judged(values, np.ones(7), max_skipped_steps=1)[0] == [True, False, False, False, True, False, True]


def test_values_that_never_change_are_no_spikes():
    assert all(judged(np.full(20, 2.0), np.ones(20), spike_z=1.0)[0])


def spiky(step, grads):
    """Gradients of step 6 are 10,000 times what they are."""
    factor = jnp.where(step + 1 == 6, 1e4, 1.0)
    return jax.tree.map(lambda grad: grad * factor, grads)


@pytest.mark.slow
def test_a_resumed_run_skips_the_same_spike_as_one_that_never_stopped(corpus, tmp_path, monkeypatch, capsys):
    with_gradients(monkeypatch, spiky)
    changes = {"train.seed": 36, "guard.spike_z": 20.0, "guard.spike_window_steps": 4, "train.eval_batches": 0}
    changes |= {"guard.spike_signal": "grad_norm", "checkpoint.keep_best": 0}
    train(tiny_config(corpus, **changes), tmp_path / "whole")
    assert "step 6 skipped: a spike of grad_norm beyond guard.spike_z=20, loss" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        stop_at(patch, 3)
        assert train(tiny_config(corpus, **changes), tmp_path / "parts").step in (4, 5)
    train(tiny_config(corpus, **changes), tmp_path / "parts")
    whole, parts = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "parts"))
    own = [{key: value for key, value in row.items() if "perf/" not in key} for row in whole]
    assert own == [{key: value for key, value in row.items() if "perf/" not in key} for row in parts]
    assert [row["step"] for row in whole if row.get("skipped/reason") == "spike"] == [6]
    assert [row["train/skipped_steps"] for row in whole] == [0] * 5 + [1] * 3


# ---- faulty hardware


def flip(array, device, bit=3):
    """The same array with a bit of one entry flipped on one device."""
    pieces = []
    for shard in array.addressable_shards:
        words = np.array(shard.data).view(np.uint32)
        if shard.device.id == device:
            words.reshape(-1)[-1] ^= np.uint32(1 << bit)
        pieces.append(jax.device_put(words.view(array.dtype), shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, pieces)


@pytest.mark.parametrize("bit", [0, 31])
def test_a_flipped_bit_of_one_copy_is_found_and_named(bit):
    model, initial, step = tiny_step((2, 2, 2))
    recheck = SilentCorruptionCheck(
        state_shardings(model, make_optimizer(optimizer_config(warmup_steps=2), 20, model.plan.rows))
    )
    recheck.compare_copies(recheck.bits(initial), 0)
    params = jax.tree.map(lambda x: x, initial.params)
    params["head"]["norm"]["scale"] = flip(params["head"]["norm"]["scale"], device=5, bit=bit)
    with pytest.raises(CorruptionError) as error:
        recheck.compare_copies(recheck.bits(initial._replace(params=params)), 9)
    assert error.value.exit_status == 4
    assert (
        "after step 9 copies of an array are not the same: params.head.norm.scale on device 5 of process 0 (pp=1, "
        in (str(error.value))
    )


@pytest.mark.slow
def test_a_step_is_taken_twice_and_nothing_else_changes(corpus, tmp_path):
    changes = {"train.eval_batches": 0, "checkpoint.keep_best": 0, "checkpoint.every_steps": 0}
    for name, every in (("plain", 0), ("checked", 3)):
        train(tiny_config(corpus, **changes, **{"train.check_every": every}), tmp_path / name)
    plain, checked = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("plain", "checked"))
    assert [row["train/loss"].hex() for row in plain] == [row["train/loss"].hex() for row in checked]


def faulty(make, fault):
    """A maker of steps of which the `fault`-th call, counted from 1, loses a bit of what it has computed."""

    def made(*args):
        step, calls = copy.copy(make(*args)), []
        take = step.take

        def run(state, batch):
            calls.append(None)
            state, metrics = take(state, batch)
            if len(calls) == fault:
                params = jax.tree.map(lambda x: x, state.params)
                params["blocks"]["mlp"]["up"]["kernel"] = flip(params["blocks"]["mlp"]["up"]["kernel"], device=2)
                state = state._replace(params=params)
            return state, metrics

        step.take = run
        return step

    return made


@pytest.mark.slow
@pytest.mark.parametrize("call", [3, 4])
def test_a_step_that_hardware_computes_wrong_once_ends_the_run_with_status_4(call, corpus, tmp_path, monkeypatch):
    """Of the two times that step 3 is taken, one goes wrong."""
    monkeypatch.setattr(run_module, "TrainStep", faulty(run_module.TrainStep, call))
    changes = {"train.check_every": 3, "train.eval_batches": 0, "checkpoint.keep_best": 0, "checkpoint.every_steps": 2}
    with pytest.raises(CorruptionError) as error:
        train(tiny_config(corpus, **changes), tmp_path)
    assert str(error.value).startswith(
        "step 3, taken twice, gave different bits: params.blocks.mlp.up.kernel on device 2 of process 0 (pp=0, dp=2,"
    )
    assert error.value.exit_status == 4 and latest_step(tmp_path / "checkpoints") == 2
    assert "CorruptionError: step 3, taken twice" in (tmp_path / "log.txt").read_text()
