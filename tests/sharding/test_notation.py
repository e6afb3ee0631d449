"""Layouts print what they parse, cut every dim into equal pieces, and refuse what cannot be, with advice."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from parallax.config.sections import ALL_AXES, AXES
from parallax.errors import NotationError
from parallax.sharding.layout import DIMS, Layout, parse_move

KNOWN = ", ".join(ALL_AXES)


@st.composite
def layouts(draw):
    """Any legal layout: distinct dims, each axis on one of them, partial, or unused."""
    names = draw(st.lists(st.sampled_from(list(DIMS)), min_size=1, max_size=5, unique=True))
    cuts, partial = [[] for _ in names], []
    for axis in draw(st.permutations(AXES)):
        place = draw(st.integers(-2, len(names) - 1))
        if place >= 0:
            cuts[place].append(axis)
        elif place == -1:
            partial.append(axis)
    return Layout(tuple(names), tuple(map(tuple, cuts)), tuple(a for a in AXES if a in partial))


axis_sizes = st.fixed_dictionaries({axis: st.integers(1, 4) for axis in AXES})


@given(layouts())
def test_a_layout_is_what_its_text_says(layout):
    assert Layout.parse(str(layout)) == layout
    assert str(Layout.parse(str(layout))) == str(layout)


@given(layouts(), axis_sizes, st.integers(1, 5))
def test_local_pieces_make_up_the_whole(layout, axis_sizes, piece):
    pieces = {name: math.prod(axis_sizes[a] for a in layout.cut_of(name)) for name in layout.names}
    sizes = {name: piece * count for name, count in pieces.items()}
    assert layout.local_shape(sizes, axis_sizes) == (piece,) * len(layout.names)
    assert layout.local_shape(sizes, {}) == tuple(sizes.values())


@given(layouts(), axis_sizes)
def test_a_size_that_does_not_divide_is_refused_with_both_numbers(layout, axis_sizes):
    for name in layout.names:
        pieces = math.prod(axis_sizes[a] for a in layout.cut_of(name))
        sizes = dict.fromkeys(layout.names, 4**3 * 3**3) | {name: pieces + 1}
        if pieces > 1:
            with pytest.raises(NotationError, match=rf"{name}={pieces + 1} does not divide over .*{pieces} or "):
                layout.local_shape(sizes, axis_sizes)


@given(layouts())
def test_the_spec_names_the_axes_of_each_dim(layout):
    spec = layout.spec()
    assert isinstance(spec, PartitionSpec) and len(spec) == len(layout.names)
    as_tuples = [entry if isinstance(entry, tuple) else (() if entry is None else (entry,)) for entry in spec]
    assert tuple(as_tuples) == layout.axes


@given(layouts())
def test_without_an_axis_nothing_is_cut_over_it(layout):
    for axis in AXES:
        left = layout.without(axis)
        assert axis not in left.used_axes() and axis not in left.partial and left.names == layout.names
        assert left.without(axis) == left


@given(layouts())
def test_a_move_is_two_layouts(layout):
    assert parse_move(f"{layout} -> {layout.without(*AXES)}") == (layout, layout.without(*AXES))


def test_partial_sums_are_named_in_mesh_order():
    assert str(Layout.parse("batch +tp +dp")) == "batch +dp +tp"
    assert Layout.parse("batch d_ff").with_partial("tp", "pp").partial == ("pp", "tp")


def test_the_cut_of_a_dim_can_be_changed():
    layout = Layout.parse("batch/dp seq d_model/tp")
    assert str(layout.with_cut("batch", ("dp", "pp"))) == "batch/dp/pp seq d_model/tp"
    with pytest.raises(NotationError, match="axis 'tp' occurs 2 times"):
        layout.with_cut("seq", ("tp",))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("d_modle/tp", "'d_modle/tp': unknown dim 'd_modle'; did you mean 'd_model'? Known: batch, seq, "),
        ("banana", "'banana': unknown dim 'banana'; known: batch, seq, "),
        ("d_model/pt", f"unknown axis 'pt'; known: {KNOWN}."),
        ("d_model//tp", f"'d_model//tp': unknown axis ''; known: {KNOWN}."),
        ("d_model/", f"'d_model/': unknown axis ''; known: {KNOWN}."),
        ("/tp", "'/tp': unknown dim ''; known: "),
        ("d_model +", f"'d_model +': unknown axis ''; known: {KNOWN}."),
        ("d_model +d_ff", "unknown axis 'd_ff'; "),
        ("seq seq", "'seq seq': dim 'seq' occurs 2 times; an array has each dim once."),
        ("seq/tp d_ff/tp", "axis 'tp' occurs 2 times; an axis shards one dim or is partial."),
        ("d_model/tp/tp", "axis 'tp' occurs 2 times; an axis shards one dim or is partial."),
        ("d_model/tp +tp", "axis 'tp' occurs 2 times; an axis shards one dim or is partial."),
        ("batch +tp d_ff", "'batch +tp d_ff': partial sums (+tp) go last; move them after 'd_ff'."),
    ],
)
def test_a_wrong_layout_is_quoted_with_advice(text, message):
    with pytest.raises(NotationError) as caught:
        Layout.parse(text)
    assert message in str(caught.value) and repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("d_model", "'d_model': write 'before -> after'."),
        ("d_model/tp d_model", "write 'before -> after'"),
        ("d_model -> d_ff", "'d_model -> d_ff': a collective keeps the dims, but 'd_model' became 'd_ff'."),
        ("batch seq -> seq batch", "a collective keeps the dims, but 'batch seq' became 'seq batch'."),
        ("batch seq -> batch", "a collective keeps the dims, but 'batch seq' became 'batch'."),
        ("batch -> batch -> batch", "unknown dim '->'"),
        ("batch/tq -> batch", "unknown axis 'tq'"),
    ],
)
def test_a_wrong_move_is_quoted_with_advice(pattern, message):
    with pytest.raises(NotationError) as caught:
        parse_move(pattern)
    assert message in str(caught.value)


def test_a_size_that_does_not_divide_is_refused_with_what_would():
    layout = Layout.parse("d_model/tp/dp d_ff")
    with pytest.raises(NotationError) as caught:
        layout.local_shape({"d_model": 12, "d_ff": 3}, {"dp": 2, "tp": 4})
    assert str(caught.value) == (
        "'d_model/tp/dp d_ff': d_model=12 does not divide over tp=4*dp=2; "
        "shard it into one of {1, 2, 3, 4, 6, 12} pieces, or use d_model=8 or 16."
    )


def test_an_unknown_size_or_dim_is_refused_with_the_known_ones():
    layout = Layout.parse("d_model d_ff")
    with pytest.raises(NotationError, match="no size is known for 'd_ff'; known: d_model"):
        layout.local_shape({"d_model": 4}, {})
    with pytest.raises(NotationError, match="'d_model d_ff' has no dim 'vocab'; it has d_model, d_ff"):
        layout.cut_of("vocab")
