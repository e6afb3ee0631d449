"""A product that XLA gets wrong on two CPU devices with two threads: bare JAX, and Parallax with an argument.

    NPROC=2 python tests/hardware/product_behind_loops.py              # some rows wrong, with jaxlib 0.10.2 and 0.12.0
    NPROC=2 python tests/hardware/product_behind_loops.py parallax     # none

Each device runs a product and a parallel loop 1,500 times, which leave entries in the queues of XLA's threads, and then
a product of integers, which is exact. Each line counts the wrong rows of both devices; which device is wrong changes
from line to line, and now and then none is. parallax.hardware.devices says why.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

RANKS, LOOPS = 2, 1500
TOKENS, VOCAB, D_MODEL = 512, 8192, 16


def main() -> None:
    if sys.argv[1:] == ["parallax"]:
        from parallax.hardware.devices import simulate_devices

        simulate_devices(RANKS)
    else:
        jax.config.update("jax_num_cpu_devices", RANKS)
        jax.config.update("jax_platforms", "cpu")
    random = np.random.default_rng(0)
    a_RTV, b_RTD = (random.integers(-1, 2, (RANKS, TOKENS, size)).astype("float32") for size in (VOCAB, D_MODEL))
    noise_RNM = np.full((RANKS, 2048, 64), 1e-3, "float32")
    expected_RVD = np.einsum("RTV,RTD->RVD", a_RTV, b_RTD, optimize=True)
    mesh, cut = jax.make_mesh((RANKS,), ("rank",), axis_types=(AxisType.Auto,)), PartitionSpec("rank")
    program = jax.jit(jax.shard_map(product_behind_loops, mesh=mesh, in_specs=cut, out_specs=cut))
    for _ in range(3):
        wrong_RVD = np.asarray(program(a_RTV, b_RTD, noise_RNM)) != expected_RVD
        print(wrong_RVD.any(axis=2).sum(axis=1).tolist())


def product_behind_loops(a_1TV, b_1TD, x_1NM):
    x_NM = jax.lax.fori_loop(0, LOOPS, lambda _, x_NM: jnp.sin(x_NM @ x_NM[:64]) + jnp.cos(x_NM), x_1NM[0])
    return jnp.einsum("TV,TD->VD", a_1TV[0], b_1TD[0] + 0 * x_NM[0, 0])[None]


if __name__ == "__main__":
    main()
