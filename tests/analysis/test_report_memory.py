"""What a step is given is exact, what grows with a setting grows in the prediction, and all commands print the same."""

import pathlib

import jax.numpy as jnp
import pytest
from support import tiny_model
from support.run_examples import as_flags, write_corpus

from parallax.analysis.compiled.program import read_compiled
from parallax.analysis.report import GIVEN
from parallax.analysis.traced.memory import Memory, memory
from parallax.cli import plan as plan_command
from parallax.cli import report as report_command
from parallax.cli import train
from parallax.config.sections import GuardConfig
from parallax.step.optimizer import global_norm, make_optimizer
from parallax.step.step import TrainState, TrainStep, abstract_state
from parallax.training import run as run_module

# Large enough that arrays, and not the counters beside them, are what is held; attention, MLP, logits and weights are
# all of about one size.
WIDE = dict(vocab=2048, d_model=128, d_ff=384, heads=8, kv_heads=8, d_head=16, d_latent=32, d_rope=8)
WIDE |= dict(layers=8, chunk_tokens=256, microbatches=8)
ROWS, SEQ = 64, 128


def build(mesh, optimizer="adamw", **changes):
    model = tiny_model.build(mesh, **(WIDE | changes))
    return model, make_optimizer(tiny_model.optimizer_config(name=optimizer), 1000, model.plan.rows)


def compiled_step(model, tx, step=None, rows=ROWS):
    return read_compiled((step or TrainStep(model, tx, 0)).lower(rows, SEQ).compile(), model.mesh)


def predicted(model, tx):
    return memory(model, abstract_state(model, tx).opt_state, global_batch=ROWS, seq=SEQ)


@pytest.mark.slow
def test_the_arguments_are_exact():
    model, tx = build((2, 2, 2))
    arguments = sum(getattr(predicted(model, tx), name) for name in GIVEN)
    assert abs(arguments - compiled_step(model, tx).arguments) < 100  # a few counters


class Unguarded(TrainStep):
    """A step that changes parameters whatever its numbers are."""

    def train_step(self, state, batch):
        noise = jnp.stack([jnp.int32(0), state.step])
        metrics, grads, statistics = self.model.loss_grads_and_statistics(state.params, batch, noise)
        params, opt_state = self.update(state.params, state.opt_state, grads, statistics, global_norm(grads))
        return TrainState(state.step + 1, params, opt_state, state.guard), metrics


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 1, 1), pytest.param((2, 2, 2), marks=pytest.mark.slow)], ids=str)
def test_a_step_that_may_change_nothing_holds_no_second_state(mesh):
    """The batch is small: what is held is parameters, moments and gradients."""
    model, tx = build(mesh, layers=2 * mesh[0], microbatches=mesh[0], chunk_tokens=64)
    guard = GuardConfig(max_skipped_steps=3, spike_z=6.0, spike_signal="loss", spike_window_steps=4)
    steps = Unguarded(model, tx, 0), TrainStep(model, tx, 0, guard)
    without, guarded = (compiled_step(model, tx, step, rows=4).together for step in steps)
    assert guarded < without + 4096  # the numbers of the guard, and a branch


def test_of_a_larger_vocab_the_logits_and_the_table_grow():
    held = {}
    for vocab in (8192, 16384):
        model, tx = build((1, 2, 1), vocab=vocab)
        held[vocab] = predicted(model, tx)
    assert held[16384].logits == 2 * held[8192].logits > 0
    assert held[16384].working_activations == held[8192].working_activations


# ---- what the commands print

ROOT = pathlib.Path(__file__).parents[2]
SMALL = {"model.layers": 2, "model.d_model": 64, "model.vocab": 2048, "data.seq": 64, "data.global_batch": 16}
PRINTED = [
    {"pipeline.microbatches": 2},
    pytest.param(
        {"pipeline.schedule": "one_f_one_b", "pipeline.remat": "stage", "optimizer.name": "adamw"},
        marks=pytest.mark.slow,
    ),
    {"mesh.pp": 1, "mesh.dp": -1, "data_parallel.policy": "zero1", "model.attention": "gqa", "model.kv_heads": 2},
]


class Introduced(Exception):
    """Raised where a run would compile its step: its tables are printed by then."""


def stop(*_):
    raise Introduced


@pytest.fixture
def commands(monkeypatch, tmp_path, known_speed):
    """Runs a command with the flags of a config; returns what it prints before anything is compiled or measured."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(run_module, "begin", lambda parts, folder, start, say: (None, start))
    monkeypatch.setattr(run_module, "TrainStep", stop)
    monkeypatch.setattr(plan_command.plan, "helpful_changes", lambda *_: [])
    corpus = write_corpus(tmp_path / "corpus")
    data = {"data.source": "text", "data.path": str(corpus / "*.txt"), "data.cache": str(corpus / "cache")}
    return ["--config=configs/quickstart.py", *as_flags(SMALL | data | {"data.tokenizer": "bytes"})]


def table_of(printed, head):
    """Component to bytes as printed, of the table below the line that begins with `head`; what is 0 is left out."""
    lines = printed[printed.index(head) :].splitlines()[1:]
    names = {name.replace("_", " ") for name in Memory._fields}
    rows = (line.split() for line in lines)
    found = {}
    for words in rows:
        at = next((at for at, word in enumerate(words) if word[0].isdecimal()), 0)
        if " ".join(words[:at]) in names:
            found.setdefault(" ".join(words[:at]), " ".join(words[at : at + 2]))
    return {name: size for name, size in found.items() if size != "0 B"}


@pytest.mark.slow
@pytest.mark.parametrize("changes", PRINTED, ids=str)
def test_train_report_and_plan_print_the_same_memory(commands, changes, tmp_path, capsys):
    """The run and a compiled report predict on simulated devices, the others on a mesh that says that it is of such."""
    flags = [*commands, *as_flags(changes)]
    with pytest.raises(Introduced):
        train.main(["train.py", *flags, f"--workdir={tmp_path / 'run'}"])
    trained = table_of(capsys.readouterr().out, "on each device")
    assert report_command.main(["report", *flags, "--trace-only"]) == 0
    reported = table_of(capsys.readouterr().out, "Memory of a device")
    assert plan_command.main(["plan", *flags, "--analytic"]) == 0
    planned = table_of(capsys.readouterr().out, "memory of a chip")
    assert len(trained) > 6 and reported == trained and planned == trained
