"""What `parallax/sharding/compiler.py` says for each chip, tried against the installed compiler; run as a process."""

import contextlib
import io

from parallax.analysis.planned.topology import devices_of, read_topology, without_chips
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
            compiler.OPTIONS[name] = {"xla_tpu_no_such_option": True} | said
            assert compiler.compiler_options(mesh) == said
        (line,) = heard.getvalue().splitlines()
        assert line.startswith("libtpu 0.0.") and f"xla_tpu_no_such_option=True for {name}, left out" in line
        print(f"{name}: {len(said)} options taken")
    heard = io.StringIO()
    mesh = make_mesh(MeshConfig(pp=1, dp=64, tp=1, simulate=0), devices_of(read_topology("v5e:8x8")))
    with contextlib.redirect_stderr(heard):
        assert "xla_tpu_enable_async_all_to_all" not in compiler.compiler_options(mesh)
    assert "left out: UNIMPLEMENTED: Async all-to-all not supported on limited ICI" in heard.getvalue()


if __name__ == "__main__":
    main()
