"""Whatever is written for a key of a config is taken, or refused in one line that names the key, and at once."""

import dataclasses
import itertools
import math
import re
import time

import pytest
from jax.sharding import AbstractMesh

from configs.base import get_config
from parallax.cli.command import read_command
from parallax.config.sections import ALL_AXES, AXES, RESIDUAL_VALUES, SECTIONS, MeshConfig
from parallax.config.settings import EXPERT_KEYS, check_has_experts, read_settings
from parallax.errors import ConfigError
from parallax.model.checks import check_divides, check_layouts
from parallax.sharding.layout import named_leaves
from parallax.sharding.mesh import resolve_sizes
from parallax.step.step import model_of, optimizer_of

BASE = get_config().to_dict()
KEYS = [f"{section}.{field.name}" for section, kind in SECTIONS.items() for field in dataclasses.fields(kind)]
LONG = "x" * 5000
LETTERS = 500  # of an error: what was written is cut at 80; half is a list of what is known


class Odd:
    """A value that cannot be shown."""

    def __repr__(self):
        raise RuntimeError("no")


NUMBERS = [10**400, -(10**400), 10**5000, -(10**5000), 2**63, 2**31, -2, -1, 0, 1, 3, 0.5, -0.5, 1e39, 1e-320, 1e308]
NUMBERS += [float("nan"), float("inf"), -float("inf"), True, False]
TEXTS = [
    "",
    "abc",
    LONG,
    "a\nb",
    "\0",
    "\ud800",
    "é",
    "3:2",
    "~no_such_user/x",
    "/" + LONG,
    "batch/dp " * 1000,
    "batch/tq",
]
TEXTS += ["+" * 9, LONG + ".csv", LONG + ".json", "x/" * 3000]
OTHERS = [None, [], [10**5000], [1] * 10_000, {}, {"a": 1}, (1,), b"x", 1j, Odd()]


def refusal(key, act, *arguments, **changes):
    """What a refusal says; None where the value is taken. Any other exception is a failure, and so is a slow answer."""
    began = time.monotonic()
    try:
        act(*arguments, **changes)
        return None
    except ConfigError as error:
        message = str(error)
    assert time.monotonic() - began < 1
    assert len(message.splitlines()) == 1 and message.isprintable(), message[:200]
    assert re.search(rf"\b{re.escape(key)}\b", message), message[:200]
    assert len(message) < LETTERS, len(message)
    return message


@pytest.mark.fast(60)
@pytest.mark.parametrize("key", KEYS)
def test_any_value_of_any_key_is_taken_or_refused_in_one_line_that_names_it(key):
    section, name = key.split(".")
    for value in [*NUMBERS, *TEXTS, *OTHERS]:
        refusal(key, read_settings, BASE, **{section: {name: value}})


@pytest.mark.fast(60)
@pytest.mark.parametrize("key", KEYS)
def test_any_text_for_any_key_on_a_command_line_is_taken_or_refused_in_one_line_that_names_it(key):
    for value in (10**400, -1, "nan", 1e39, "1e400", "", "None", "[1]", "a\nb: c", LONG, "~no_such_user/x"):
        line = ["train.py", "--config=configs/base.py", f"--config.{key}={value}"]
        refusal(key, read_command, line, {})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "optimizer.learning_rate",
            10**400,
            f"=1{'0' * 79}… (401 letters) is not a number that float32 holds; use 3.4e+38",
        ),
        ("optimizer.learning_rate", 10**5000, "=<a whole number of 5001 digits> is not a number that float32 holds"),
        ("model.layers", -(10**5000), "=<a whole number of 5001 digits> must be a whole number of 1 or more"),
        ("mesh.tp", LONG, f"='{'x' * 80}'… (5000 letters) is a text in quotes, but it must be a whole number"),
        (
            "layout.residual",
            "batch seq d_model/tq",
            "='batch seq d_model/tq' is not a layout of the residual stream; use 'batch/dp seq d_model/tp' or",
        ),
        (
            "layout.residual",
            "batch seq",
            "='batch seq' is not a layout of the residual stream; use 'batch/dp seq d_model",
        ),
        ("layout.residual", "", "='' is not a layout of the residual stream; use 'batch/dp seq d_model/tp' or"),
        ("data.cache", "~no_such_user/x", "='~no_such_user/x' begins with the home of a user who does not exist here"),
        ("data.cache", LONG, "is too long for a path: it has 5000 bytes, its longest name 5000; use at most 4095"),
        ("sample.prompt", "\0", r"='\x00' holds a zero byte or half a surrogate pair, which is not text"),
    ],
    ids=range(10),
)
def test_a_refusal_quotes_what_was_written_and_says_what_would_be_right(key, value, message):
    section, name = key.split(".")
    assert message in refusal(key, read_settings, BASE, **{section: {name: value}})


MIXTURE = {"layers": 4, "layers_of": "dense moe*3", "experts": 8, "experts_per_token": 3, "shared_experts": 1}
MIXTURE = {"model": BASE["model"] | MIXTURE | {"router_groups": 4, "router_groups_chosen": 2}}
OF_MIXTURES = [f"model.{name}" for name in MIXTURE["model"] if name.split("_")[0] in ("layers", "router", "experts")]
OF_MIXTURES += ["model.d_expert", "model.shared_experts", "layout.exchange", "layout.expert_chunk_tokens"]
OF_MIXTURES += ["layout.exchange_hosts"]
OF_MIXTURES += ["loss.balance_coefficient", "loss.router_z_coefficient", "optimizer.balance_rate"]
KINDS = [
    "moe*",
    "*4",
    "(moe",
    "moe)*4",
    "(dense moe)*2*2",
    "moe*-1",
    "moe*0",
    "moe*4 x",
    "dense moe*99999999999",
    "mo*4",
]
KINDS += ["(moe*99999999999)*4", "(dense moe)*" + "9" * 400, "moe*٣", "moe*" + "9" * 5000, "(" * 2000, "moe " * 2000]


@pytest.mark.parametrize("key", OF_MIXTURES)
def test_any_value_of_a_mixtures_key_is_taken_or_refused_in_one_line_that_names_it(key):
    section, name = key.split(".")
    for value in [*NUMBERS, *TEXTS, *OTHERS, *KINDS]:
        refusal(key, read_settings, BASE | MIXTURE, **{section: {name: value}})


@pytest.mark.parametrize("key", EXPERT_KEYS)
def test_a_key_of_experts_is_refused_where_no_layer_has_any(key):
    section, name = key.split(".")
    default = SECTIONS[section].__dataclass_fields__[name].default
    texts = {"router_score": "sigmoid", "expert_activation": "clamped", "exchange": "ragged"}
    changed = {section: {name: texts.get(name, not default if isinstance(default, bool) else 2 * default or 1)}}
    message = refusal(key, check_has_experts, read_settings(BASE, **changed))
    assert "does nothing with model.layers_of='', which has no layer of experts; use " in message
    assert f"use {name}={default!r}, or layers_of='moe*4'." in message
    flag = f"--config.{key}={changed[section][name]}"
    assert message in refusal(key, read_command, ["plan", "--config=configs/base.py", flag], {})


def test_a_key_of_experts_is_taken_where_a_layer_has_some_or_is_a_class_of_the_users():
    mixture = read_settings(
        BASE, model={"layers_of": "dense*2 moe*2", "experts": 16}, loss={"balance_coefficient": 1.0}
    )
    check_has_experts(mixture)
    check_has_experts(
        dataclasses.replace(mixture, model=dataclasses.replace(mixture.model, layers_of="", mlp="mine:MLP"))
    )


def test_keys_of_experts_are_those_of_the_model_its_layout_loss_and_optimizer():
    assert len(EXPERT_KEYS) == 20 and {*EXPERT_KEYS} >= {
        "model.experts",
        "layout.exchange_hosts",
        "optimizer.balance_rate",
    }


@pytest.mark.parametrize("kinds", KINDS, ids=range(len(KINDS)))
def test_what_is_no_sequence_of_kinds_is_refused(kinds):
    assert refusal("model.layers_of", read_settings, BASE | MIXTURE, model={"layers_of": kinds})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"experts": 6},
            "model.experts=6 does not divide over model.router_groups=4; use router_groups in {1, 2, 3, 6}",
        ),
        ({"router_groups_chosen": 5}, "model.router_groups_chosen=5 is more than model.router_groups=4; use at most 4"),
        ({"experts_per_token": 5}, "=5 is more than the 4 experts that model.router_groups_chosen=2 of"),
        ({"layers": 5}, "model.layers_of='dense moe*3' has 4 layers, not model.layers=5; \"moe*5\" has as many"),
        ({"layers": 3}, "model.layers_of='dense moe*3' has more than model.layers=3;"),
        ({"layers_of": "dense mow*3"}, "is not a sequence of kinds: did you mean 'moe'?"),
    ],
    ids=range(6),
)
def test_a_refusal_of_a_mixture_says_what_would_be_right(changes, message):
    found = refusal(f"model.{next(iter(changes))}", read_settings, BASE | MIXTURE, model=changes)
    assert message in found, found


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("odd", [None, 5, LONG, [1] * 10_000, {LONG: 1}, {5: 1}, {None: 1}, {"a\nb": 1}], ids=range(8))
def test_what_is_no_section_is_refused_in_one_line(section, odd):
    assert refusal(section, read_settings, BASE, **{section: odd})
    assert refusal(section, read_settings, {**BASE, section: odd})


@pytest.mark.parametrize("odd", [None, 5, LONG, [1], Odd()], ids=range(5))
def test_what_is_no_config_is_refused_in_one_line(odd):
    assert refusal("config", read_settings, odd)


# ---- sizes over the mesh

SIZES = dict(vocab=48, layers=4, d_model=48, d_ff=48, heads=48, kv_heads=48, d_head=4, d_latent=48, d_latent_q=48)
FORMS = [
    {"model": {"attention": attention}, "layout": {"residual": residual, "tensor_parallel": family, "embedding": table}}
    for attention in ("mla", "gqa")
    for residual in RESIDUAL_VALUES
    for family in ("column_row", "scatter")
    for table in ("vocab_parallel", "all_to_all")
]
# kv_heads divide heads; and where kv_heads are the ones that do not divide, heads do.
AS_WELL = {"heads": {"kv_heads": 2 * 29}, "kv_heads": {"heads": 24 * 29}}
LIKE = r"(model|data)\.(\w+)=(\d+) (does not divide over|and) (.*mesh\.(\w+)=(\d+).*); use (.+)"


def on(sizes, *changes, **more):
    """The model of changed settings on an abstract mesh: no device is needed, and nothing is compiled."""
    config = {"model": SIZES, "data": {"seq": 48, "global_batch": 48}}
    for change in (*changes, more):
        config = {section: config.get(section, {}) | change.get(section, {}) for section in config | change}
    sizes = {axis: sizes.get(axis, 1) for axis in ALL_AXES if axis in AXES or axis in sizes}
    settings = read_settings(BASE, **config)
    model = model_of(settings, AbstractMesh(tuple(sizes.values()), tuple(sizes)))
    model.check_batch(settings.data.global_batch, settings.data.seq)
    optimizer_of(model)
    return model


@pytest.mark.parametrize(
    ("sizes", "changes", "message"),
    [
        ({"tp": 2}, {"model": {"vocab": 49}}, "model.vocab=49 does not divide over mesh.tp=2; use tp in {1, 7, 49} or"),
        ({"tp": 2}, {"model": {"d_model": 49}}, "model.d_model=49 does not divide over mesh.tp=2; use tp in {1, 7, 49"),
        ({"tp": 2}, {"model": {"heads": 49}}, "model.heads=49 does not divide over mesh.tp=2; use tp in {1, 7, 49} or"),
        ({"tp": 2}, {"model": {"d_ff": 49}}, "model.d_ff=49 does not divide over mesh.tp=2; use tp in {1, 7, 49} or"),
        (
            {"tp": 6},
            {"model": {"attention": "gqa", "kv_heads": 16}},
            "model.kv_heads=16 and mesh.tp=6: one must divide the other; use kv_heads in {1, 2, 3, 6} or a multiple",
        ),
        (
            {"tp": 2},
            {"model": {"d_latent": 49}},
            "model.d_latent=49 does not divide over mesh.tp=2, which shards blocks/",
        ),
        (
            {"tp": 2},
            {"model": {"d_latent_q": 49}},
            "model.d_latent_q=49 does not divide over mesh.tp=2, which shards b",
        ),
        ({"dp": 5}, {"data": {"global_batch": 50}}, "model.d_model=48 does not divide over mesh.dp=5, which shards "),
        (
            {"dp": 5, "tp": 2},
            {"model": {"d_model": 50, "d_ff": 4, "d_latent": 4}, "layout": {"tensor_parallel": "scatter"}},
            "does not divide over mesh.",
        ),
        ({"pp": 6}, {}, "model.layers=4 is less than mesh.pp=6; use layers=6 or more, or pp=4 or less"),
        (
            {"dp": 3},
            {"data": {"global_batch": 4}},
            "data.global_batch=4 does not divide over mesh.dp=3 x pipeline.micro",
        ),
        (
            {"dp": 3},
            {"data": {"global_batch": 6}, "pipeline": {"microbatches": 4}},
            "data.global_batch=6 does not divide over mesh.dp=3 x pipeline.microbatches=4; use a multiple of 12, "
            "or pipeline.microbatches in {1, 2}.",
        ),
        (
            {"pp": 4, "dp": 2},
            {"data": {"global_batch": 4}},
            "data.global_batch=4 does not divide over mesh.dp=2 x mesh.pp=4, which share embedding and head by rows",
        ),
        ({"tp": 2}, {"data": {"seq": 49}}, "data.seq=49 does not divide over mesh.tp=2; use a multiple of 2"),
        (
            {"cp": 4},
            {"data": {"seq": 12}},
            "data.seq=12 does not divide over 2 x mesh.cp=4: each context rank has two chunks of a row; "
            "use a multiple of 8",
        ),
        (
            {"tp": 2, "cp": 4},
            {"model": {"heads": 12}, "layout": {"context": "ulysses"}},
            "model.heads=12 does not divide over mesh.tp=2 x mesh.cp=4, which shard them under layout.context="
            "'ulysses'; "
            "use tp x cp in {1, 2, 3, 4, 6, 12} or heads=16",
        ),
        (
            {"cp": 4},
            {"model": {"kernel": "splash"}, "layout": {"context": "ring"}},
            "layout.context='ring' sends keys from rank to rank, which model.kernel='splash' does not support",
        ),
        (
            {"pp": 4},
            {"data": {"seq": 6, "global_batch": 4}, "pipeline": {"microbatches": 4, "schedule": "one_f_one_b"}},
            "data.seq=6 does not divide over 4: mesh.pp=4 ranks and mesh.tp=1 share the head of a microbatch",
        ),
    ],
    ids=str,
)
def test_a_size_that_does_not_divide_is_named_with_its_key_and_its_axis(sizes, changes, message):
    with pytest.raises(ConfigError) as error:
        on(sizes, changes)
    assert message in str(error.value) and len(str(error.value).splitlines()) == 1


@pytest.mark.fast(8)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join([*form["model"].values(), *form["layout"].values()]))
def test_every_dim_that_a_mesh_cuts_is_checked_on_every_mesh(form):
    """For each dim a size that nothing divides: either the model can be cut as its layouts say, or an error has the
    key of that dim, an axis of the mesh, and numbers that would do."""
    model = on({}, form)
    refused = set()
    for dim in ("vocab", "d_model", "d_ff", "heads", "kv_heads", "d_head", "d_latent", "d_latent_q", "d_rope"):
        config = dataclasses.replace(model.config, **{dim: 2 * 29} | AS_WELL.get(dim, {}))
        for dp, tp in itertools.product((1, 2, 3, 4, 6, 29), (1, 2, 3, 4, 6, 29)):
            sizes = {"pp": 1, "dp": dp, "tp": tp}
            try:
                check_divides(config, sizes)
                check_layouts(config, model.layouts, model.shapes, sizes)
            except ConfigError as error:
                found = re.fullmatch(LIKE, str(error))
                assert found, error
                key, size, axis = found[2], int(found[3]), found[6]
                assert size == config.sizes[key] and sizes[axis] > 1
                refused.add((dim, key))
            else:
                for layout in named_leaves(model.layouts).values():
                    layout.local_shape(config.sizes, sizes)
    own = {"mla": {"d_latent", "d_latent_q"}, "gqa": {"kv_heads"}}[form["model"]["attention"]]
    assert refused >= {(dim, dim) for dim in {"vocab", "d_model", "d_ff", "heads"} | own}


def test_sizes_of_a_mesh_that_no_machine_has_are_refused_at_once():
    for sizes in itertools.product((1, 7, 2**20, -1), repeat=3):
        if sizes.count(-1) > 1 or math.prod(sizes) == 1:
            continue
        refusal("mesh.pp", resolve_sizes, MeshConfig(*sizes, simulate=0), 8)


@pytest.mark.parametrize("size", [2**24, 2**24 - 3, 14_414_400])
def test_sizes_with_many_divisors_are_refused_at_once_and_in_short(size):
    config = dataclasses.replace(on({}).config, d_ff=size, heads=17)
    assert refusal("model.d_ff", check_divides, config, {"pp": 1, "dp": 1, "tp": 17})
