"""What is read of compiled programs is what they do: collectives, loops, branches, cycles, and time."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from support.hlo_examples import CHAIN, HEADER, PASS, SPARSE, with_cycles
from support.tiny_model import build, make_batch, params_of

from parallax import schedules
from parallax.analysis.compiled.hlo import axes_of, groups_of, parse_hlo
from parallax.analysis.compiled.program import (
    BranchEvent,
    LoopEvent,
    Share,
    name_of,
    read_compiled,
    read_hlo_text,
    secs_by_module,
    shares_of,
)
from parallax.analysis.planned.step_time import step_time
from parallax.analysis.planned.topology import one_way, read_topology, route
from parallax.config.sections import MeshConfig
from parallax.errors import ConfigError
from parallax.hardware.chips import CHIPS, chip
from parallax.schedules.pricing import Costs, tick_ends
from parallax.sharding.mesh import make_mesh

TURNS, ROWS, WIDTH = 5, 4, 32


def small_mesh(pp, dp, tp):
    return make_mesh(MeshConfig(pp=pp, dp=dp, tp=tp, simulate=0), jax.devices()[: pp * dp * tp])


def every_kind(x, w):
    """All kinds of collectives in a loop, on a mesh of 2·2·2."""

    def turn(x, w):
        x = jnp.tanh(x @ lax.all_gather(w, "dp", axis=0, tiled=True))
        x = lax.psum_scatter(x, "tp", scatter_dimension=1, tiled=True)
        x = lax.all_gather(x, "tp", axis=1, tiled=True)
        return lax.ppermute(x, "pp", [(0, 1), (1, 0)]), ()

    x, _ = lax.scan(turn, lax.pcast(x, ("tp",), to="varying"), w)
    return lax.psum(lax.all_to_all(x, "tp", 0, 1, tiled=True).sum(), ("pp", "dp", "tp"))


def test_the_peak_of_a_device_excludes_host_memory():
    """In KiB, as libtpu has it of a step with states, masters and residuals on the host, and of one without: its peak
    of the first is more than all that is on the device."""

    def peak(of_compiler, device, host):
        kinds = ("argument", "output", "alias", "temp")
        sizes = {f"{kind}_size_in_bytes": size for kind, size in zip(kinds, device)}
        sizes |= {f"host_{kind}_size_in_bytes": size for kind, size in zip(kinds, host)}
        sizes = SimpleNamespace(peak_memory_in_bytes=of_compiler, **sizes)
        text = "ENTRY %main (x: f32[4]) -> f32[4] {\n  ROOT %x = f32[4]{0} parameter(0)\n}\n"
        program = SimpleNamespace(memory_analysis=lambda: sizes, as_text=lambda: text)
        return read_compiled(program, small_mesh(1, 1, 1)).peak

    assert peak(72_335, (61, 61, 61, 20_992), (38_400, 38_400, 38_400, 256)) == 61 + 20_992
    assert peak(84_070, (38_461, 38_461, 38_461, 4_762), (0, 0, 0, 0)) == 84_070


def compiled_on(mesh, function, specs, *shapes):
    cut = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P())
    return jax.jit(cut).lower(*(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)).compile()


def test_collectives_of_a_compiled_program_are_those_that_it_was_written_with():
    mesh = small_mesh(2, 2, 2)
    compiled = compiled_on(mesh, every_kind, (P(("pp", "dp")), P(None, "dp")), (4 * ROWS, WIDTH), (TURNS, WIDTH, WIDTH))
    read = read_compiled(compiled, mesh)
    x, w = 4 * ROWS * WIDTH, 4 * WIDTH * WIDTH // 2  # bytes of a device's piece
    assert {(made.kind, made.axes, made.bytes, made.count) for made in read.collectives} == {
        ("all-gather", ("dp",), w, TURNS),
        ("reduce-scatter", ("tp",), x // 2, TURNS),
        ("all-gather", ("tp",), x // 2, TURNS),
        ("permute", ("pp",), x, TURNS),
        ("all-to-all", ("tp",), x // 2, 1),
        ("all-reduce", ("pp", "dp", "tp"), 2 * 4, 1),  # 7 of 8 bytes, rounded up
    }
    assert not any(made.asynchronous for made in read.collectives) and read.cycles is None
    assert read.arguments == x + TURNS * w and read.outputs == 4 and read.temporaries > 0 and not read.unknown_loops
    with pytest.raises(ConfigError, match="no cycles"):
        step_time(read, chip("v5e"), 1.0)


def test_loops_within_loops_multiply_and_a_loop_of_unknown_length_is_told():
    mesh = small_mesh(1, 8, 1)

    def nested(x):
        add = lambda x, _: (lax.psum(x, "dp") * 0.1 + x, ())  # noqa: E731
        x, _ = lax.scan(lambda x, _: lax.scan(add, x, length=3), x, length=4)
        return lax.while_loop(lambda x: jnp.max(lax.pmax(x, "dp")) < 3, lambda x: x + lax.psum(x, "dp"), x).sum()

    total = lambda x: lax.psum(nested(x), "dp")  # noqa: E731
    read = read_compiled(compiled_on(mesh, total, (P("dp"),), (64,)), mesh)
    counts = [made.count for made in read.collectives if made.bytes == 2 * 7 * 32 // 8]
    assert 12 in counts and len(read.unknown_loops) == 1


@pytest.mark.parametrize(
    "written, groups",
    {
        "replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}": [(0, 1), (2, 3), (4, 5), (6, 7)],
        "replica_groups={}, to_apply=%sum": [tuple(range(8))],
        "replica_groups=[2,4]<=[8], dimensions={0}": [(0, 1, 2, 3), (4, 5, 6, 7)],
        "replica_groups=[4,2]<=[2,4]T(1,0)": [(0, 4), (1, 5), (2, 6), (3, 7)],
        "replica_groups=mesh['a'=2,'b'=4] {'a'}, x": [(0, 4), (1, 5), (2, 6), (3, 7)],
        "replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}": [(0, 4), (1, 5), (2, 6), (3, 7)],
        "source_target_pairs={{0,1},{1,0}}": [(0, 1), (1, 0)],
    }.items(),
)
def test_every_form_of_groups_is_read(written, groups):
    assert groups_of(written, 8) == groups


def test_groups_are_named_by_the_axes_along_which_they_differ():
    sizes = {"pp": 2, "dp": 2, "tp": 2}
    numbers = np.arange(8).reshape(2, 2, 2)
    for axes in [("pp",), ("dp",), ("tp",), ("pp", "tp"), ("dp", "tp"), ("pp", "dp", "tp")]:
        kept = [at for at, axis in enumerate(sizes) if axis not in axes]
        moved = numbers.transpose([*kept, *(at for at in range(3) if at not in kept)])
        assert axes_of(moved.reshape(-1, 2 ** len(axes)).tolist(), sizes) == axes


def test_a_gather_in_pieces_is_one_asynchronous_collective_with_the_compute_between():
    read = read_hlo_text(with_cycles(CHAIN), small_mesh(2, 4, 1))
    (made,) = read.collectives
    assert made[:6] == ("all-gather", ("dp",), 3 * 4 * 8 * 2, 6, 6, True)
    assert made.cycles_between == 3050 and read.cycles == 6 * (1000 + 3050 + 700)
    assert made.source.endswith("Block/mlp/up/all_gather")


def test_what_sparse_cores_do_runs_beside_compute_from_where_its_operands_are():
    read = read_hlo_text(with_cycles(SPARSE), small_mesh(2, 4, 1))
    assert [made[:6] for made in read.collectives] == [("all-gather", ("dp",), 3 * 4 * 8 * 2, 1, 1, True)] * 2
    assert [made.cycles_between for made in read.collectives] == [1000, 30]
    assert read.cycles == 1000 + 200 + 30 + 4
    (rows,) = read.pallas_calls
    assert (rows.operand_bytes, rows.result_bytes) == (16 * 8 * 2, 16 * 8 * 2)


def test_a_line_of_a_kernel_s_metadata_ends_no_computation():
    """Newer compilers write `}}, metadata=…` at the beginning of one, and `}, execution_thread=…` where one ends."""
    module = parse_hlo(with_cycles(PASS + SPARSE.replace("ENTRY %main", "%other").removeprefix(HEADER)))
    assert {"active", "y", "main", "called.1", "rows", "called.2", "x", "other"} <= set(module.computations)
    assert module.computations["active"].root.name == "fusion.9"


def test_branches_messages_fused_and_merged_collectives_and_kernels_are_read():
    read = read_hlo_text(with_cycles(PASS), small_mesh(2, 4, 1), {"F": Share(average=0.5, lockstep=0.75)})
    scatter, message, total = read.collectives
    assert scatter[:6] == ("reduce-scatter", ("dp",), 40 * 4 * 4 * 3 // 4, 0.5, 0.75, False)
    assert message[:7] == ("permute", ("pp",), 10 * 4 * 4, 1, 1, True, 40)
    assert total[:6] == ("all-reduce", ("pp", "dp"), 2 * 24 * 7 // 8, 1, 1, False)
    assert total.merged == 3 and total.source == "jit(step)/norm/mul"
    assert read.cycles == 0.25 * 10 + 0.75 * 900 + 40
    (kernel,) = read.pallas_calls
    assert kernel.operand_bytes == 640 + 3 * 2 * 128 * 64 * 2 + 2 and kernel.result_bytes == 640
    assert kernel.flops == 2 * 2 * 128 * 128 * (64 + 64) and kernel.source.endswith("attention/splash")


def test_without_shares_the_dearer_branch_is_taken():
    assert read_hlo_text(with_cycles(PASS), small_mesh(2, 4, 1)).cycles == 900 + 40


@pytest.mark.parametrize("text", [CHAIN, PASS], ids=["a loop", "a branch"])
@pytest.mark.parametrize("shares", [{}, {"F": Share(average=0.5, lockstep=0.75)}], ids=["no shares", "shares"])
def test_compute_by_module_is_all_compute(text, shares):
    read = read_hlo_text(with_cycles(text), small_mesh(2, 4, 1), shares)
    assert sum(row.total for row in secs_by_module(read, clock_hz=1.0)) == read.cycles


def test_compute_is_of_the_module_and_the_kind_that_its_name_says():
    named = (
        'fusion(%q.5), kind=kLoop, calls=%y, metadata={op_name="jit(step)/F/jvp(Block)/mlp/up/dot_general"}, CYCLES(40)'
    )
    text = PASS.replace("fusion(%q.5), kind=kLoop, calls=%y, CYCLES(40)", named)
    assert text != PASS
    read = read_hlo_text(with_cycles(text), small_mesh(2, 4, 1))
    assert secs_by_module(read, clock_hz=10.0) == [("elsewhere", 0, 90), ("mlp", 4, 0)]


@pytest.mark.parametrize("name, virtual", [(n, 2 if n == "interleaved" else 1) for n in sorted(schedules.SCHEDULES)])
def test_time_by_shares_is_the_schedule_s_own_price_in_lockstep(name, virtual):
    for costs in (Costs(), Costs(forward=1.2, backward=2.1, weights=0.7)):
        schedule = schedules.by_name(name, 4, 8, virtual)
        shares, time_of = shares_of(schedule, costs), costs.of(schedule)
        turns = {kind: segment.stop - segment.start for segment in schedule.segments for kind in segment.kinds}
        kinds, one = [*schedule.kinds, *["FB"] * schedule.joint], time_of["F"] + time_of["B"]
        time_of, turns = time_of | {"FB": one}, turns | {"FB": turns["F"]}
        price = sum(shares[kind].lockstep * turns[kind] * time_of[kind] for kind in kinds)
        assert price == pytest.approx(tick_ends(schedule, costs)[-1], rel=0.05)
        if costs == Costs():
            assert price == pytest.approx(tick_ends(schedule, costs)[-1])
        own = sum(shares[kind].average * turns[kind] * time_of[kind] for kind in kinds)
        assert own == pytest.approx(8 * (costs.forward + costs.backward))


@pytest.mark.slow
def test_the_branches_of_a_pipelined_step_are_known_by_name():
    model = build((2, 2, 1), schedule="one_f_one_b", microbatches=4)
    arguments = params_of(model), make_batch(rows=16)
    read = read_compiled(
        jax.jit(model.loss_and_grad).lower(*arguments).compile(), model.mesh, shares_of(model.schedule)
    )
    found = [event for event in walk(read.timeline) if isinstance(event, BranchEvent)]
    assert found and all(max(branch.average) < 1 for branch in found)
    passes = {made.count for made in read.collectives if "/F/" in made.source and made.axes == ("dp",)}
    assert all(4 % count == 0 or count % 4 == 0 for count in passes)


def walk(events):
    for event in events:
        yield event
        for inner in (
            event.sides if isinstance(event, BranchEvent) else [event.body] if isinstance(event, LoopEvent) else []
        ):
            yield from walk(inner)


def test_names_of_conditionals():
    assert name_of("jit(step)/while/body/closed_call/cond") == "exit"
    assert name_of("jit(step)/while/body/closed_call/W/cond") == "W"
    assert name_of("jit(step)/while/body/B/cond/branch_1_fun/cond") == "B/end"
    assert name_of("jit(step)/while/body/FB/cond") == "FB"
    assert name_of("jit(step)/while/body/FB/cond/branch_1_fun/B/cond") == "FB/B/end"
    assert name_of("jit(step)/cond") == name_of("jit(step)/while/body/dot") == ""


def on_torus(shape, order):
    """A mesh of stand-ins for TPU chips, with this many along its axes, over chips in this order of places."""
    chips = [SimpleNamespace(coords=list(place), slice_index=0) for place in order]
    grid = np.empty(len(chips), object)
    grid[:] = chips
    axes = ("pp", "dp", "tp")
    return SimpleNamespace(devices=grid.reshape(shape), axis_names=axes, shape=dict(zip(axes, shape, strict=True)))


def test_links_follow_the_torus():
    square = [(x, y) for x in range(4) for y in range(4)]
    v5e, line = CHIPS["TPU v5e"], 50e9
    assert route(on_torus((4, 4, 1), square), ("dp",), v5e).bandwidth == line
    assert route(on_torus((1, 16, 1), square), ("dp",), v5e).bandwidth == 2 * line
    assert route(on_torus((4, 2, 2), square), ("tp",), v5e).bandwidth == line
    assert route(on_torus((4, 2, 2), square), ("dp",), v5e).bandwidth == line / 2  # two groups share each link
    cube = [(x, y, z) for x in range(4) for y in range(4) for z in range(4)]
    v5p = CHIPS["TPU v5p"]
    assert route(on_torus((1, 64, 1), cube), ("dp",), v5p).bandwidth == 6 * 100e9
    assert route(on_torus((1, 16, 4), cube), ("tp",), v5p).bandwidth == 2 * 100e9
    flat = [(x, y, z) for x in range(2) for y in range(2) for z in range(4)]
    assert route(on_torus((1, 4, 4), flat), ("tp",), v5p).bandwidth == 100e9  # rings need whole cubes of 4·4·4
    apart = on_torus((1, 16, 1), square)
    apart.devices[0, 0, 0].slice_index = 1
    assert route(apart, ("dp",), v5e).bandwidth == v5e.dcn_bandwidth


def test_two_cores_share_the_links_of_their_chip():
    places = [(x, y, z) for x in range(4) for y in range(4) for z in range(4)]
    v7x, line = CHIPS["TPU v7x"], 100e9
    both = on_torus((1, 64, 2), [place for place in places for _ in range(2)])
    for number, device in enumerate(both.devices.flat):
        device.core_on_chip = number % 2
    assert route(both, ("tp",), v7x).bandwidth == 6 * line  # within a chip
    assert route(both, ("dp",), v7x).bandwidth == 6 * line / 2  # the other core's group sends, too
    assert route(both, ("dp", "tp"), v7x).bandwidth == 6 * line
    assert one_way(both, [(0, 2), (1, 3)], v7x) == line / 2
    assert one_way(both, [(0, 2), (4, 6)], v7x) == line
    topology = read_topology("v7x:4x4x4")
    assert topology.devices == 128
    assert topology.route({"dp": 64, "tp": 2}, ["tp"]).bandwidth == 6 * line


def test_messages_share_the_links_that_they_pass():
    square = [(x, y) for x in range(4) for y in range(4)]
    v5e, line, mesh = CHIPS["TPU v5e"], 50e9, on_torus((1, 16, 1), square)
    assert one_way(mesh, [(0, 1), (1, 2), (2, 3), (3, 0)], v5e) == line  # back along the other direction
    assert one_way(mesh, [(0, 2), (1, 3)], v5e) == line / 2
    snake = [(at, (at + 1) % 16) for at in range(16)]
    assert one_way(mesh, snake, v5e) == line
    ring = on_torus((1, 16, 1), [(0, at) for at in range(16)])
    assert one_way(ring, snake, v5e) == line
    assert one_way(ring, [(at, (at + 5) % 16) for at in range(16)], v5e) == line / 5


def test_a_loop_that_the_compiler_unrolled_turns_less_often():
    rising = "%get-tuple-element.2 = s32[]{:T(128)} get-tuple-element(%p.6), index=0"
    sum_ = "%constant.9 = s32[] constant(2)\n  %add.7 = s32[] add(%get-tuple-element.2, %constant.9)"
    unrolled = CHAIN.replace(rising, f"{rising}\n  {sum_}").replace("tuple(%get-tuple-element.2,", "tuple(%add.7,")
    (made,) = read_hlo_text(with_cycles(unrolled), small_mesh(2, 4, 1)).collectives
    assert made.count == 3


def gpus(**attributes):
    """A mesh of stand-ins for 2·8 GPUs along dp and tp, with attributes by their numbers."""
    mesh = on_torus((1, 2, 8), [()] * 16)
    for at in range(16):
        mesh.devices.flat[at] = SimpleNamespace(**{name: value(at) for name, value in attributes.items()})
    return mesh


H100 = CHIPS["NVIDIA H100"]


def test_of_described_gpus_a_process_is_a_host():
    mesh = gpus(process_index=lambda at: at // 8, slice_index=lambda at: 0, local_hardware_id=lambda at: None)
    assert route(mesh, ("tp",), H100).bandwidth == 450e9
    assert route(mesh, ("dp",), H100).bandwidth == H100.dcn_bandwidth
    assert one_way(mesh, [(0, 1), (1, 0)], H100) == 450e9
    assert one_way(mesh, [(0, 1), (1, 8)], H100) == H100.dcn_bandwidth


def test_of_gpus_that_are_here_a_slice_is_a_host_also_with_a_process_for_each():
    local_id = lambda at: 0 if at == 3 else None  # noqa: E731  # of the GPU of this process
    one_host = gpus(process_index=lambda at: at, slice_index=lambda at: 0, local_hardware_id=local_id)
    assert route(one_host, ("dp", "tp"), H100).bandwidth == 450e9
    assert one_way(one_host, [(0, 15)], H100) == 450e9
    two_hosts = gpus(process_index=lambda at: at, slice_index=lambda at: at // 8, local_hardware_id=local_id)
    assert route(two_hosts, ("tp",), H100).bandwidth == 450e9
    assert route(two_hosts, ("dp",), H100).bandwidth == H100.dcn_bandwidth
    assert route(two_hosts, ("dp", "tp"), H100).secs("all-gather", 1e9) == 1e9 / (8 * H100.dcn_bandwidth)
    assert one_way(two_hosts, [(7, 8)], H100) == H100.dcn_bandwidth


def test_products_in_8_bits_may_take_less_than_the_peak_of_wider_ones():
    read, v5e = read_hlo_text(with_cycles(CHAIN), small_mesh(2, 4, 1)), chip("v5e")
    flops = 1.3 * v5e.peak("bfloat16") * 6 * 4750 / v5e.clock_hz
    assert step_time(read, v5e, flops, matmul="int8").mfu == pytest.approx(1.3)
    with pytest.raises(AssertionError, match="more than TPU v5e can do"):
        step_time(read, v5e, flops)


def test_step_time_adds_compute_what_is_exposed_and_kernels():
    v5e, mesh = chip("v5e"), small_mesh(2, 4, 1)
    hidden = step_time(read_hlo_text(with_cycles(CHAIN), mesh), v5e, 1e6)
    assert hidden.exposed_secs == {"dp": 0} and hidden.bubble == 0
    assert hidden.total_secs == hidden.compute_secs == pytest.approx(6 * 4750 / 1.5e9)
    assert hidden.mfu == pytest.approx(1e6 / 197e12 / hidden.total_secs)
    slow = v5e._replace(ici_bandwidth=1e6)  # 192 bytes over a line of 4 take 192 us, 2.03 of them beside compute
    exposed = step_time(read_hlo_text(with_cycles(CHAIN), mesh), slow, 1e6)
    assert exposed.exposed_secs["dp"] == pytest.approx(6 * (192e-6 - 3050 / 1.5e9))
    assert exposed.total_secs == pytest.approx(hidden.compute_secs + exposed.exposed_secs["dp"])


def test_kernels_are_priced_apart_and_idle_ranks_are_the_bubble():
    read = read_hlo_text(with_cycles(PASS), small_mesh(2, 4, 1), {"F": Share(average=0.5, lockstep=1.0)})
    assert [one.matmul for one in read.pallas_calls] == ["compute"]  # though its tables of masks are int8
    v5e = chip("v5e")._replace(ici_bandwidth=1e30)
    times = step_time(read, v5e, 1.0)
    assert times.pallas_secs == pytest.approx((1280 + 3 * 2 * 128 * 64 * 2 + 2) / 819e9)
    assert times.total_secs - times.pallas_secs == pytest.approx(940 / 1.5e9)
    own = (0.5 * 910 + 40) / 1.5e9 + 0.5 * times.pallas_secs
    assert times.bubble == pytest.approx(1 - own / times.total_secs)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler, libtpu")
def test_the_tpu_compiler_s_program_is_read():
    root = Path(__file__).parents[2]
    nobody_asked = dict(TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1", PYTHONPATH=str(root))
    command = [sys.executable, root / "tests" / "tpu_examples.py"]
    done = subprocess.run(command, env={**os.environ, **nobody_asked}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
