"""What `parallax/sharding/compiler.py` says for each chip, tried against the installed compiler; run as a process."""

import contextlib
import io

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from parallax.analysis.planned.topology import Topology, devices_of, read_topology, without_chips
from parallax.config.sections import MeshConfig
from parallax.hardware.chips import CHIPS
from parallax.sharding import compiler
from parallax.sharding.mesh import make_mesh

ONE_HOST = {2: "2x2", 3: "2x2x1"}


def main() -> None:
    without_chips(["--topology"])
    for name, chip in CHIPS.items():
        if not chip.torus_dims:
            continue
        topology = read_topology(f"{name.split()[1]}:{ONE_HOST[chip.torus_dims]}")
        devices = devices_of(topology)  # a chip of v7x has two
        mesh = make_mesh(MeshConfig(pp=1, dp=len(devices), tp=1, simulate=0), devices)
        said, heard = compiler.OPTIONS.get(name, {}), io.StringIO()
        with contextlib.redirect_stderr(heard):
            assert compiler.compiler_options(mesh) == said and not heard.getvalue(), heard.getvalue()
            of_mixtures = said | compiler.OF_MIXTURES.get(name, {})
            assert compiler.compiler_options(mesh, has_mixtures=True) == of_mixtures and not heard.getvalue()
            of_streams = said | compiler.OF_STREAMS.get(name, {})
            assert compiler.compiler_options(mesh, has_streams=True) == of_streams and not heard.getvalue()
            of_ranges = said | compiler.OF_FIXED_RANGES.get(name, {})
            taken = compiler.compiler_options(mesh, "float8", has_fixed_ranges=True)
            assert taken == of_ranges and not heard.getvalue()
            compiler.OPTIONS[name] = {"xla_tpu_no_such_option": True} | said
            assert compiler.compiler_options(mesh) == said
        (line,) = heard.getvalue().splitlines()
        assert line.startswith("libtpu 0.0.") and f"xla_tpu_no_such_option=True for {name}, left out" in line
        print(f"{name}: {len(said)} options taken")
    for name in ("v5e:2x4", "v5e:4x4", "v5e:4x8", "v5e:8x8", "v5e:16x16", "v5p:4x4x4", "v6e:8x8", "v7x:4x4x4"):
        exchanges_hide_as_a_plan_has_it(read_topology(name))
        ragged_exchanges_compile_where_they_are_chosen(read_topology(name))


def exchanges_hide_as_a_plan_has_it(topology: Topology) -> None:
    """All-to-alls beside products: asynchronous where `hides_exchanges` says so, and compiled everywhere."""
    devices = devices_of(topology)
    dp = min(8, len(devices))
    mesh = make_mesh(MeshConfig(pp=1, dp=dp, tp=len(devices) // dp, simulate=0), devices)
    options, hides = compiler.compiler_options(mesh), compiler.hides_exchanges(topology.chip.name, topology.slice_chips)
    assert hides == ("xla_tpu_enable_async_all_to_all" in options), topology.name
    refused = "" if hides else "UNIMPLEMENTED: Async all-to-all not supported on limited ICI"
    assert compiler.refusal(mesh, compiler.EXCHANGE) == refused, topology.name

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.tanh(x @ w), lax.all_to_all(w, "dp", 0, 0, tiled=True)

    where = P("dp"), P(None, "dp")
    layers = jax.shard_map(lambda x, w: lax.scan(layer, x, w), mesh=mesh, in_specs=where, out_specs=where)
    x, w = (
        jax.ShapeDtypeStruct(shape, "bfloat16", sharding=NamedSharding(mesh, cut))
        for shape, cut in zip(((512 * dp, 512), (4, 512 * dp, 512)), where, strict=True)
    )
    compiled = jax.jit(layers).lower(x, w).compile(compiler_options=options)
    assert (" all-to-all-start(" in compiled.as_text()) == hides, topology.name
    print(f"{topology.name}: exchanges {'hide' if hides else 'are waited for'}")


def ragged_exchanges_compile_where_they_are_chosen(topology: Topology) -> None:
    """Ragged all-to-alls among two, eight and all of the slice's devices."""
    devices = devices_of(topology)
    for ranks in sorted({2, min(8, len(devices)), len(devices)}):
        mesh = make_mesh(MeshConfig(pp=len(devices) // ranks, dp=1, ep=ranks, tp=1, simulate=0), devices)
        assert compiler.has_ragged(mesh) == topology.has_ragged

        def send(x: jax.Array, sizes: jax.Array) -> jax.Array:
            return lax.ragged_all_to_all(x, jnp.zeros_like(x), sizes, sizes, sizes, sizes, axis_name="ep")

        on_ranks = P(("pp", "ep"))
        sent = jax.shard_map(send, mesh=mesh, in_specs=(on_ranks, on_ranks), out_specs=on_ranks)
        x, sizes = (
            jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, on_ranks))
            for shape, dtype in (((64 * mesh.size, 128), "bfloat16"), ((ranks * mesh.size,), "int32"))
        )
        try:
            jax.jit(sent).lower(x, sizes).compile()
        except jax.errors.JaxRuntimeError as error:
            assert "HasLimitedIciRouting" in str(error) and not topology.has_ragged, (topology.name, ranks, error)
        else:
            assert topology.has_ragged, (topology.name, ranks)
    print(f"{topology.name}: {'ragged exchanges' if topology.has_ragged else 'no ragged exchange'}")


if __name__ == "__main__":
    main()
