"""The layers that docs/explicit.md writes with explicit types and in strings have the same values and send the same."""

import jax
import jax.numpy as jnp
import nbformat
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support.docs_commands import ROOT, blocks

from parallax.sharding.layout import Layout

PAGE = ROOT / "docs" / "explicit.md"
NOTEBOOK = ROOT / "notebooks" / "09_types_beside_strings.ipynb"
LAYERS = {"mlp": ("x", "gate", "up", "down"), "attention": ("x", "q", "k", "v", "out")}
# Of the result and of the input's gradient over tp, of the weights' gradients over dp.
ARRAYS = {"mlp": {"dp": 3, "tp": 2}, "attention": {"dp": 4, "tp": 2}}
BYTES = {
    "REPLICATED": {"types": 5120, "strings": 5120},
    "SHARDED": {"types": 7680, "strings": 5120},  # XLA for CPU reduces whole arrays
}


@pytest.fixture(scope="module")
def page():
    """The names that the page defines."""
    names = {}
    for text in code_of_page():
        exec(compile(text, "docs/explicit.md", "exec"), names)
    return names


def code_of_page():
    return [block.text for block in blocks(PAGE.read_text()) if block.language == "python"]


def four_devices():
    return np.array(jax.devices()[:4]).reshape(2, 2)


def programs_of(page, layer, arguments, **options):
    """By the way in which it is written, a layer with its gradients, compiled, and what it sends."""
    layouts, names, devices = page[arguments], LAYERS[layer], four_devices()
    made = {}
    for way in ("types", "strings"):
        function = page["partial"](page[f"{layer}_by_{way}"], **options)
        made[way] = page[f"by_{way}"](function, layouts, names, devices=devices)
    return made, {way: page["sent"](program, devices) for way, program in made.items()}


def arrays_of(sent, *kinds):
    return {axis: count for (kind, axis), (count, _) in sent.items() if kind in kinds}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("arguments", BYTES)
def test_types_and_strings_have_the_same_values_gradients_and_collectives(page, layer, arguments):
    programs, sent = programs_of(page, layer, arguments)
    rng, layouts = np.random.default_rng(0), page[arguments]
    shapes = [[page["SIZES"][dim] for dim in Layout.parse(layouts[name]).names] for name in (*LAYERS[layer], "x")]
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    of_types, of_strings = (jax.tree.leaves(program(*arrays)) for program in programs.values())
    for found, expected in zip(of_types, of_strings, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)
    for found in sent.values():
        assert arrays_of(found, "all-reduce", "reduce-scatter") == ARRAYS[layer]
        assert arrays_of(found, "all-gather") == (ARRAYS[layer] if arguments == "SHARDED" else {})
    assert arguments == "SHARDED" or sent["types"] == sent["strings"]
    if layer == "mlp":
        assert {way: sum(size for _, size in found.values()) for way, found in sent.items()} == BYTES[arguments]


@pytest.mark.parametrize(("layer", "uses"), [("mlp", 2), pytest.param("attention", 3, marks=pytest.mark.slow)])
def test_without_a_mark_the_inputs_gradient_is_summed_at_each_use(page, layer, uses):
    _, sent = programs_of(page, layer, "REPLICATED", delayed=())
    assert [arrays_of(found, "all-reduce")["tp"] for found in sent.values()] == [1 + uses] * 2
    _, sent = programs_of(page, layer, "SHARDED", delayed=())
    assert arrays_of(sent["types"], "all-reduce")["tp"] == 1 + uses
    assert arrays_of(sent["strings"], "reduce-scatter")["tp"] == 2


def test_before_partitioning_types_are_shardings_and_strings_are_one_manual_computation(page, monkeypatch):
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda lowered: lowered.as_text())
    monkeypatch.setitem(
        page, "sent", lambda text, devices: (text.count("sdy.manual_computation("), "unreduced" in text)
    )
    texts, said = programs_of(page, "mlp", "SHARDED")
    assert said == {"types": (0, True), "strings": (1, False)}
    collectives = {way: text.count('all_gather"') + text.count('reduce_scatter"') for way, text in texts.items()}
    assert collectives == {"types": 0, "strings": sum(ARRAYS["mlp"].values()) * 2}


def partial_sums(wide, down):
    return jnp.einsum("BSF,FD->BSD", wide, down, out_sharding=P("dp", None, None, unreduced={"tp"}))


def summed_in_a_loop(wide, down):
    start = jax.sharding.reshard(jnp.zeros((8, 4, 16)), P("dp", None, None))
    start = jax.sharding.reshard(start, P("dp", None, None, unreduced={"tp"}))
    return lax.fori_loop(0, 3, lambda _, total: total + partial_sums(wide, down), start)


# What the page says of partial sums: whether types take it, with jax 0.10 and with later ones.
TAKEN = {
    "added": (lambda *given: partial_sums(*given) + partial_sums(*given), True, True),
    "cast": (lambda *given: partial_sums(*given).astype("bfloat16"), True, True),
    "carried": (summed_in_a_loop, True, True),
    "times 2": (lambda *given: 2 * partial_sums(*given), False, False),
    "not linear": (lambda *given: jax.nn.silu(partial_sums(*given)), False, False),
    "reshaped": (lambda *given: partial_sums(*given).reshape(8, 64), False, True),
    "contracted without a word": (lambda wide, down: jnp.einsum("BSF,FD->BSD", wide, down), False, False),
}


@pytest.mark.parametrize("what", TAKEN)
def test_types_take_of_partial_sums_what_the_page_says(what):
    function, in_0_10, later = TAKEN[what]
    mesh = Mesh(four_devices(), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    cuts = {(8, 4, 32): P("dp", None, "tp"), (32, 16): P("tp", None)}
    given = [jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, cut)) for shape, cut in cuts.items()]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        if in_0_10 if jax.__version__.startswith("0.10.") else later:
            assert "{U:tp}" in str(jax.typeof(jax.eval_shape(function, *given)))
        else:
            with pytest.raises(Exception, match="(?i)reduced|contracting"):
                jax.eval_shape(function, *given)


def test_the_notebook_runs_what_the_page_shows():
    cells = [cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    assert [text for text in map(str.rstrip, code_of_page()) if text not in cells] == []
