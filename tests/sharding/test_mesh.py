"""The mesh holds every device exactly once, and says which sizes would fit when they do not."""

import math
from collections import Counter
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.stand_ins import ChipMesh

from parallax.analysis.planned.topology import read_topology, route
from parallax.config.sections import AXES, MeshConfig
from parallax.errors import ConfigError
from parallax.hardware.devices import simulate_devices
from parallax.sharding.compiler import first_group
from parallax.sharding.mesh import factorisations, make_mesh, place_devices, resolve_sizes


def config(pp=1, dp=1, tp=1, simulate=0, replica=1):
    return MeshConfig(pp=pp, dp=dp, tp=tp, simulate=simulate, replica=replica)


def eight_devices():
    simulate_devices(8)
    return jax.devices()[:8]


@pytest.mark.parametrize("sizes", factorisations(8), ids=str)
def test_every_factorisation_of_the_devices_makes_a_mesh(sizes):
    mesh = make_mesh(config(*sizes), eight_devices())
    assert tuple(mesh.shape.items()) == tuple(zip(AXES, sizes, strict=True))
    assert {d.id for d in mesh.devices.flat} == {d.id for d in eight_devices()}


def test_neighbours_along_tp_are_neighbours_in_the_list_of_devices():
    devices = eight_devices()
    assert list(make_mesh(config(2, 2, 2), devices).devices[0, 0]) == devices[:2]


@given(devices=st.integers(1, 200), unknown=st.sampled_from(AXES), data=st.data())
def test_the_inferred_axis_takes_all_devices_that_are_left(devices, unknown, data):
    sizes = dict(zip(AXES, data.draw(st.sampled_from(factorisations(devices))), strict=True))
    assert resolve_sizes(config(**{**sizes, unknown: -1}), devices) == sizes


@given(devices=st.integers(1, 200))
def test_factorisations_are_all_there_are(devices):
    found = factorisations(devices)
    assert len(found) == len(set(found)) and all(math.prod(f) == devices for f in found)
    pairs = [(a, b) for a in range(1, devices + 1) for b in range(1, devices // a + 1) if devices % (a * b) == 0]
    assert len(found) == len(pairs)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((3, 1, 1), "mesh.pp=3 mesh.dp=1 mesh.tp=1 wants 3 devices, but there are 8; legal pp·dp·tp for 8: "),
        ((4, 4, 1), "wants 16 devices, but there are 8"),
        ((1, 1, 4), "wants 4 devices, but there are 8; legal pp·dp·tp for 8: 1·1·8, 1·2·4, 2·1·4, 1·4·2"),
        ((3, -1, 1), "mesh.dp=-1 mesh.tp=1 wants a multiple of 3 devices, but there are 8"),
    ],
)
def test_sizes_that_do_not_fit_the_devices_are_refused_with_those_that_do(sizes, message):
    with pytest.raises(ConfigError) as error:
        make_mesh(config(*sizes), eight_devices())
    assert message in str(error.value)


def test_an_axis_that_does_not_divide_the_devices_is_told_which_sizes_do():
    with pytest.raises(ConfigError, match=r"there are 8, which mesh\.cp=3 does not divide; use one of 1, 2, 4, 8"):
        resolve_sizes(MeshConfig(pp=1, dp=-1, tp=1, simulate=0, cp=3), 8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tp": 0}, "mesh.tp=0 is not a number of devices"),
        ({"pp": -2}, "mesh.pp=-2 is not a number of devices"),
        ({"dp": 2.0}, "mesh.dp=2.0 is a number, but it must be a whole number"),
        ({"dp": True}, "mesh.dp=True is True or False, but it must be a whole number"),
        ({"pp": -1, "dp": -1}, "mesh.pp=-1, mesh.dp=-1: at most one axis can be inferred"),
        ({"simulate": -1}, "mesh.simulate=-1 is not a number of devices"),
        ({"replica": 0}, "mesh.replica=0 is not a number of devices"),
    ],
)
def test_wrong_sizes_are_named(fields, message):
    with pytest.raises(ConfigError, match=message):
        config(**fields)


def test_long_lists_of_legal_sizes_are_cut_with_the_nearest_first():
    with pytest.raises(ConfigError, match=r"legal pp·dp·tp for 256: 1·8·32, 1·64·4, 8·8·4, .* and 33 more"):
        resolve_sizes(config(1, 8, 4), 256)


def test_simulating_after_jax_has_started_is_an_error_unless_nothing_changes():
    eight_devices()
    simulate_devices(8)
    with pytest.raises(ConfigError, match=r"mesh.simulate=4 comes too late: JAX already runs with 8 cpu device"):
        simulate_devices(4)


def test_simulated_devices_must_be_the_ones_that_are_there():
    with pytest.raises(ConfigError, match=r"mesh.simulate=4 but JAX runs with 8 device"):
        make_mesh(config(dp=4, simulate=4), eight_devices())


def test_devices_that_do_not_divide_over_the_processes_are_refused():
    with pytest.raises(ConfigError, match="mesh.simulate=8 does not divide over 3 processes"):
        simulate_devices(8, 3)


# ---- several slices


def chips_of(slices, rows=2, columns=4):
    """Chips as libtpu describes them: slices of v5e, one core a chip, four chips a host."""
    places = [(number, x, y) for number in range(slices) for y in range(columns) for x in range(rows)]
    return [
        SimpleNamespace(
            id=at,
            platform="tpu",
            device_kind="TPU v5 lite",
            coords=(x, y, 0),
            core_on_chip=0,
            slice_index=number,
            process_index=at // 4,
        )
        for at, (number, x, y) in enumerate(places)
    ]


@pytest.mark.parametrize(
    ("axis", "sizes"),
    [
        ("replica", (1, 8, 1, 2)),
        ("replica", (2, 2, 2, 2)),
        ("replica", (1, 1, 4, 4)),
        ("pp", (2, 4, 2, 1)),
        ("pp", (4, 1, 4, 1)),
        ("pp", (2, 8, 1, 1)),
    ],
)
def test_replicas_or_else_stages_alone_go_from_slice_to_slice(axis, sizes):
    pp, dp, tp, replica = sizes
    chips, wanted = chips_of(slices=2), config(pp, dp, tp, replica=replica)
    grid = place_devices(wanted, chips)
    assert grid.shape == tuple(wanted.sizes.values()) and {chip.id for chip in grid.flat} == {chip.id for chip in chips}
    slice_of = np.vectorize(lambda chip: chip.slice_index)(grid)
    along = list(wanted.sizes).index(axis)
    for other in set(range(grid.ndim)) - {along}:
        assert (slice_of == slice_of.take([0], other)).all()
    # The first half of the axis is in one slice, the second in the other: one step of it crosses the network.
    assert (np.diff(slice_of, axis=along) != 0).sum(along).max() == 1


def test_expert_ranks_fill_a_cube_of_a_torus():
    """Also in plans, whose chips are stand-ins: an all-to-all then has links of three dims, not of two."""
    places = np.ndindex(4, 2, 2)
    chips = [
        SimpleNamespace(
            id=at, platform="tpu", device_kind="TPU v5", coords=(x, y, z), core_on_chip=0, slice_index=0,
            process_index=at // 4,
        )
        for at, (z, y, x) in enumerate(places)
    ]  # fmt: skip
    wanted = MeshConfig(pp=1, dp=2, ep=8, tp=1, simulate=0)
    for cube in place_devices(wanted, chips).reshape(2, 8):
        assert (np.ptp([chip.coords for chip in cube], axis=0) == 1).all()
    topology = read_topology("v5p:2x2x4")
    assert topology.route(wanted.sizes, ["ep"]).bandwidth == 3 * topology.chip.ici_bandwidth


@pytest.mark.parametrize(
    ("dp", "cp", "shape", "links"), [(64, 1, (4, 4, 2), 2), (64, 2, (4, 4, 4), 4), (32, 4, (4, 4, 4), 4)]
)
def test_the_last_step_of_a_gather_has_both_cores_of_its_chips(dp, cp, shape, links):
    """They share the links: so each core takes in at the rate of all, not of half of them. Context ranks are on chips
    next to each other, since FSDP gathers over both axes."""
    places = np.ndindex(*shape, 2)
    cores = [
        SimpleNamespace(
            id=at, platform="tpu", device_kind="TPU7x", coords=(x, y, z), core_on_chip=core, slice_index=0,
            process_index=at // 8,
        )
        for at, (x, y, z, core) in enumerate(places)
    ]  # fmt: skip
    wanted, topology = MeshConfig(pp=1, dp=dp, tp=1, cp=cp), read_topology(f"v7x:{'x'.join(map(str, shape))}")
    axes = ("dp", "cp") if cp > 1 else ("dp",)
    placed = place_devices(wanted, cores)
    mesh = ChipMesh(placed, (*wanted.sizes,))
    near = first_group(mesh, axes)
    assert near in (2, 4) and {core.id for core in placed.flat} == {*range(2 * math.prod(shape))}
    assert all(len({core.coords for core in row}) == cp for row in placed.reshape(-1, cp))
    for first in range(near):
        ranks = [*range(dp * cp)[first::near]]
        chips = Counter(placed.flat[rank].coords for rank in ranks)
        assert len(chips) == len(ranks) // 2 and {*chips.values()} == {2}
        assert route(mesh, axes, topology.chip, ranks).bandwidth == links * topology.chip.ici_bandwidth


@pytest.mark.parametrize("sizes", [(1, 8, 1, 2), (2, 8, 1, 1)])
def test_a_plan_of_several_slices_has_the_links_that_training_uses(sizes):
    pp, dp, tp, replica = sizes
    wanted, topology = config(pp, dp, tp, replica=replica), read_topology("2xv5e:2x4")
    there = SimpleNamespace(devices=place_devices(wanted, chips_of(slices=2)), axis_names=tuple(wanted.sizes))
    for axes in [("replica",), ("pp",), ("dp",), ("dp", "tp"), ("pp", "replica", "dp")]:
        if any(wanted.sizes.get(axis, 1) > 1 for axis in axes):
            assert topology.route(wanted.sizes, axes) == route(there, axes, topology.chip)
    crossing = "replica" if replica > 1 else "pp"
    assert topology.route(wanted.sizes, [crossing]).bandwidth == topology.chip.dcn_bandwidth


def test_in_one_slice_any_axes_will_do():
    grid = place_devices(config(1, 4, 2), chips_of(slices=1))
    assert grid.shape == (1, 4, 2)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((1, 16, 1), "mesh.replica=1 and mesh.pp=1: neither .* 2 slices of 8 chips, .*with mesh.replica=2 mesh.dp=8$"),
        ((1, 1, 16), "other axes send too much .*; make one a multiple of 2$"),
    ],
)
def test_axes_that_do_not_divide_over_the_slices_are_refused(sizes, message):
    with pytest.raises(ConfigError, match=message):
        place_devices(config(*sizes), chips_of(slices=2))


def test_gpus_stay_in_the_order_of_their_hosts_which_jax_calls_slices():
    gpus = [SimpleNamespace(id=at, platform="gpu", slice_index=at // 8, process_index=at // 8) for at in range(16)]
    grid = place_devices(config(1, 4, 4), gpus)
    hosts = np.vectorize(lambda gpu: gpu.process_index)(grid)
    assert [gpu.id for gpu in grid.flat] == [*range(16)] and (np.diff(hosts, axis=-1) == 0).all()
    assert place_devices(config(1, 16, 1), gpus).shape == (1, 16, 1)
