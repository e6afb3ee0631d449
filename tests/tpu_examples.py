"""Programs compiled for TPU, with what the report must read in them; run as a process of its own, for libtpu's sake."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import topologies
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from support.docs_commands import ROOT, blocks

from configs.tiny_gqa import get_config
from parallax.analysis.compiled.program import read_compiled, read_step
from parallax.analysis.planned.layouts import model_on_topology
from parallax.analysis.planned.step_time import step_time
from parallax.analysis.planned.topology import read_topology
from parallax.analysis.traced.memory import predicted_memory
from parallax.config.sections import MeshConfig
from parallax.config.settings import read_settings
from parallax.hardware.chips import chip
from parallax.sharding.host import order_on_tpu
from parallax.sharding.mesh import make_mesh
from parallax.step.step import step_of

TOPOLOGIES = {"v4:2x2x2": {"chip_config_name": "megacore"}, "v5e:4x4": {}, "v5p:2x2x4": {}, "v6e:4x4": {}}
LAYERS, ROWS, WIDTH = 12, 1024, 2048


def devices_of(topology):
    options = TOPOLOGIES[topology]
    return topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices


def one_chip_agrees_with_the_table(topology):
    """Its memory is what the compiler lets a program fill, and a large product runs near its peak, not above."""
    device, known, size = devices_of(topology)[0], chip(topology), 8192
    assert chip(device.device_kind) == known
    here = SingleDeviceSharding(device)
    x = jax.ShapeDtypeStruct((size, size), "bfloat16", sharding=here)
    mesh = make_mesh(MeshConfig(pp=1, dp=1, tp=1, simulate=0), [device])
    read = read_compiled(jax.jit(jnp.matmul).lower(x, x).compile(), mesh)
    share = 2 * size**3 / known.peak("bfloat16") / (read.cycles / known.clock_hz)
    assert 0.6 < share < 1, share
    try:
        jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((1 << 30, 200), "int8", sharding=here)).compile()
    except jax.errors.JaxRuntimeError as error:
        limit = float(re.search(r"exceeds available HBM \(([\d.]+)G\)", str(error))[1])
        assert abs(limit * 2**30 - known.usable_bytes) < 0.01 * 2**30, limit


def gathers_in_a_loop_are_counted_and_hidden():
    """Layers whose weights are gathered over 16 chips while others compute."""
    mesh = make_mesh(MeshConfig(pp=1, dp=16, tp=1, simulate=0), devices_of("v5e:4x4"))

    def layers(x, w):
        gather = lambda w: lax.all_gather(w, "dp", axis=0, tiled=True)  # noqa: E731
        layer = lambda x, w: (jax.nn.silu(x @ gather(w[0])) @ gather(w[1]), None)  # noqa: E731
        return lax.scan(layer, x, w)[0]

    cut = jax.shard_map(layers, mesh=mesh, in_specs=(P("dp"), P(None, None, "dp")), out_specs=P("dp"))
    x = jax.ShapeDtypeStruct((16 * ROWS, WIDTH), "bfloat16", sharding=NamedSharding(mesh, P("dp")))
    w = jax.ShapeDtypeStruct((LAYERS, 2, WIDTH, WIDTH), "bfloat16", sharding=NamedSharding(mesh, P(None, None, "dp")))
    read = read_compiled(jax.jit(cut).lower(x, w).compile(), mesh)
    gathers = [made for made in read.collectives if made.kind == "all-gather"]
    sent = sum(made.bytes * made.count for made in gathers)
    assert sent == 15 / 16 * LAYERS * 2 * WIDTH * WIDTH * 2, [made[:5] for made in read.collectives]
    assert all(made.axes == ("dp",) for made in read.collectives)
    hidden = [made for made in gathers if made.asynchronous]
    assert hidden and all(made.cycles_between > 0 for made in hidden)
    flops = LAYERS * 2 * 2 * ROWS * WIDTH * WIDTH
    times = step_time(read, chip("v5e"), flops)
    assert flops / 197e12 < times.compute_secs < 2 * flops / 197e12, times
    assert times.exposed_secs["dp"] < sent / 100e9 and 0 < times.mfu < 1, times


def a_ring_hides_its_messages(pp):
    """Each permute of keys over cp, and each of their gradients, has compute between its start and its end."""
    settings = read_settings(get_config().to_dict())
    model = dict(layers=2, d_model=512, d_ff=1024, heads=8, kv_heads=4, d_head=64, vocab=2048, dtype="bfloat16")
    settings = dataclasses.replace(
        settings,
        mesh=MeshConfig(pp=pp, dp=4 // pp, tp=1, cp=4, simulate=0),
        model=dataclasses.replace(settings.model, **model),
        layout=dataclasses.replace(settings.layout, context="ring"),
        data=dataclasses.replace(settings.data, seq=8192, global_batch=4),
        pipeline=dataclasses.replace(settings.pipeline, schedule="one_f_one_b", microbatches=pp),
    )
    step = step_of(settings, make_mesh(settings.mesh, devices_of("v5e:4x4")))
    read = read_step(step.lower(4, 8192).compile(), step.model, seq=8192)
    ring = [made for made in read.collectives if made.axes == ("cp",) and made.kind == "permute"]
    assert len(ring) > 4, read.collectives
    for made in ring:
        assert made.asynchronous and made.cycles_between > 0, made


def sums_of_tables_stay_in_the_loop():
    """Of each microbatch as traced. Behind the loop, sums would be whole on each chip until then."""
    config = get_config()
    config.model.update(d_model=512, d_ff=512, heads=4, kv_heads=4, d_head=128, vocab=65_536, tied=False)
    config.model.update(dtype="bfloat16", kernel="xla")
    config.mesh.update(pp=1, dp=16, tp=1, simulate=0)
    config.data.update(seq=128, global_batch=64)
    config.pipeline.update(microbatches=4)
    config.fsdp.update(reduce="float32")
    settings = read_settings(config.to_dict())
    step = step_of(settings, make_mesh(settings.mesh, devices_of("v5p:2x2x4")))
    compiled = step.lower(64, 128).compile()
    table, read = 65_536 * 512 * 4, read_step(compiled, step.model, seq=128)
    of_tables = [made for made in read.collectives if made.kind == "reduce-scatter" and made.bytes > table / 2]
    assert sum(made.count for made in of_tables) == 2 * 4, [made[:5] for made in read.collectives]
    planned = predicted_memory(model_on_topology(settings, read_topology("v5p:2x2x4")), settings).peak
    assert read.together - planned < table, (read.together, planned)  # two whole sums would be twice that


def arguments_have_the_order_of_the_rule():
    sizes = itertools.product((1, 2, 3, 4, 8, 32), (1, 8, 64, 100, 130, 300, 4096), (1, 16, 64, 100, 128, 199, 200))
    shapes = [(), (7,), (300,), *sizes, *itertools.product((2, 8), (1, 4, 33), (8, 100, 130, 4096), (16, 128, 200))]
    mesh = make_mesh(MeshConfig(pp=1, dp=16, tp=1, simulate=0), devices_of("v5e:4x4"))
    whole = NamedSharding(mesh, P(), memory_kind="pinned_host")
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn):
        arrays = [jax.ShapeDtypeStruct(shape, dtype, sharding=whole) for shape in shapes]
        compiled = jax.jit(lambda *arrays: None, keep_unused=True).lower(*arrays).compile()
        for shape, found in zip(shapes, compiled.input_formats[0], strict=True):
            assert tuple(found.layout.major_to_minor) == order_on_tpu(shape, dtype), (shape, dtype, found)


def compiled_with(d_model, pipeline, optimizer):
    settings = read_settings(get_config().to_dict())
    model = dict(layers=4, d_model=d_model, d_ff=512, heads=4, kv_heads=4, d_head=128, vocab=1024, dtype="bfloat16")
    settings = dataclasses.replace(
        settings,
        mesh=MeshConfig(pp=1, dp=16, tp=1, simulate=0),
        model=dataclasses.replace(settings.model, **model),
        data=dataclasses.replace(settings.data, seq=512, global_batch=16),
        pipeline=dataclasses.replace(settings.pipeline, microbatches=1, **pipeline),
        optimizer=dataclasses.replace(settings.optimizer, **optimizer),
    )
    return step_of(settings, make_mesh(settings.mesh, devices_of("v5e:4x4"))).lower(16, 512).compile()


def masters_come_from_the_host_in_the_layout_of_their_stack(d_model):
    """A copy from the host that changes the memory layout ends the compiler, and this process."""
    assert compiled_with(d_model, {}, dict(masters_on="host")).memory_analysis().temp_size_in_bytes > 0


def slots_on_the_host_are_allocated_there():
    """Zeros would take memory of the chip first, and travel."""
    compiled = compiled_with(512, dict(residuals_on="host", remat="elementwise"), {})
    on_host = [line for line in compiled.as_text().splitlines() if re.search(r"= \S*S\(5\)|= \(\S*S\(5\)", line)]
    allocated = [line for line in on_host if "AllocateBuffer" in line]
    assert len(allocated) > 8 and not any("copy-start(" in line for line in on_host), on_host


def types_and_strings_send_the_same():
    """The layers of docs/explicit.md, whose sums are reduce-scatters here however they are written."""
    page, sizes = {}, dict(batch=16, seq=256, d_model=512, d_ff=1024, kv_heads=4, group=2, d_head=128)
    for block in blocks((ROOT / "docs" / "explicit.md").read_text()):
        if block.language == "python":
            exec(compile(block.text, "docs/explicit.md", "exec"), page)
    four = np.array(devices_of("v5e:4x4")[:4]).reshape(2, 2)
    for layer, names in (("mlp", ("x", "gate", "up", "down")), ("attention", ("x", "q", "k", "v", "out"))):
        given = dict(layouts=page["SHARDED"], names=names, devices=four, sizes=sizes)
        made = (page[f"by_{way}"](page[f"{layer}_by_{way}"], **given) for way in ("types", "strings"))
        of_types, of_strings = (page["sent"](program, four) for program in made)
        assert of_types == of_strings and {kind for kind, _ in of_types} == {"all-gather", "reduce-scatter"}, of_types


if __name__ == "__main__":
    for topology in TOPOLOGIES:
        one_chip_agrees_with_the_table(topology)
    gathers_in_a_loop_are_counted_and_hidden()
    for stages in (1, 2):
        a_ring_hides_its_messages(stages)
    sums_of_tables_stay_in_the_loop()
    arguments_have_the_order_of_the_rule()
    for piece in (64, 100, 128):
        masters_come_from_the_host_in_the_layout_of_their_stack(16 * piece)
    slots_on_the_host_are_allocated_there()
    types_and_strings_send_the_same()
