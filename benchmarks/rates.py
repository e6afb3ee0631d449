"""What this machine's device reaches: products, grouped products, copies, its link to the host, and small operations.

    python benchmarks/rates.py [--only products joined grouped copies operations] [--tokens 16384] [--rounds 8]

*products* are of --tokens rows, by shape and dtype. *joined* compares q, k and v, and gate and up with what follows
them, as products apart and as one product, forward and backward in bfloat16; kernels rest apart in float32 either way,
and so do their gradients. *grouped* are products of experts, forward and backward in bfloat16, by the forms of
parallax/model/experts/grouped.py; *padded* is one batch of products of groups of even size, *dense* has one matrix for
all. *copies* are within the device's memory and over its link to the host, each way alone and both in one program;
bytes are counted once. *operations* are sums of 1,024 numbers: programs of one, operations of a program, steps of a
loop. Times are medians over rounds of three calls.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arguments import Arguments, run_benchmark, whole_number
from attention import median_secs

PARTS = ("products", "joined", "grouped", "copies", "operations")
SMALLEST = {"tokens": 256, "rounds": 2, "only": ["products", "copies"]}
SHAPES = (2048, 8192), (4096, 16_384), (8192, 28_672)  # d_model and d_ff of the products
DTYPES = "bfloat16", "float8_e4m3fn", "int8"
# By name: the width of the input and of each product's output.
JOINED = {
    "q, k, v": [(2048, (2048,) * 3), (4096, (4096,) * 3), (4096, (4096, 1024, 1024))],
    "gate, up": [(2048, (8192,) * 2), (4096, (14_336,) * 2)],
}
GROUPED = (8, 2048, 4096), (64, 2048, 1408)  # experts, their input's width and their own
COPIED_BYTES, NUMBERS, OPERATIONS = 2**30, 1024, 200


def main() -> None:
    parser = Arguments(description=__doc__, smallest=SMALLEST)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART")
    parser.add_argument("--tokens", type=whole_number, default=16_384)
    parser.add_argument("--rounds", type=whole_number, default=8)
    args = parser.parse_args()
    import jax

    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    lines_of = {part.__name__: part for part in (products, joined, grouped, copies, operations)}
    for name in args.only:
        for line in lines_of[name](args):
            print(line, flush=True)


def table(*columns: str) -> str:
    return f"\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|"


def random(*shape: int, dtype: Any = "bfloat16", seed: int = 0) -> Any:
    """Random numbers of variance 1."""
    import jax

    return jax.jit(lambda: jax.random.normal(jax.random.key(seed), shape).astype(dtype))()


def products(args: argparse.Namespace) -> Iterator[str]:
    """Lines of the table of products, by shape and dtype."""
    import jax
    import jax.numpy as jnp

    yield table("product", "dtype", "time", "TFLOP/s")
    for d_model, d_ff in [(64, 256)] if args.smoke else SHAPES:
        for dtype in DTYPES:
            x, w = random(args.tokens, d_model, dtype=dtype), random(d_model, d_ff, dtype=dtype, seed=1)
            summed = jnp.int32 if dtype == "int8" else jnp.bfloat16
            options = {"xla_gpu_enable_triton_gemm": False} if jax.default_backend() == "gpu" else None
            product = jax.jit(partial(jnp.matmul, preferred_element_type=summed), compiler_options=options)
            secs = median_secs(product, args.rounds, x, w)
            rate = 2 * args.tokens * d_model * d_ff / secs / 1e12
            yield f"| {args.tokens} x {d_model} x {d_ff} | {dtype} | {1e6 * secs:.0f} us | {rate:.0f} |"


def joined(args: argparse.Namespace) -> Iterator[str]:
    """Lines of the table of products that share their input."""
    import jax

    yield table("products", "tokens", "input", "outputs", "apart", "joined", "times as fast")
    for name, sizes in JOINED.items():
        for width, widths in [(64, (64,) * len(sizes[0][1]))] if args.smoke else sizes:
            for tokens in (args.tokens // 2, args.tokens):
                x, dy = random(tokens, width), tuple(random(tokens, out, seed=1) for out in widths)
                kernels = tuple(width**-0.5 * random(width, out, dtype="float32", seed=2) for out in widths)
                then = gated if name == "gate, up" else tuple
                dy = dy[0] if name == "gate, up" else dy
                runs = [jax.jit(partial(forward_and_back, form, then)) for form in (apart, at_once)]
                secs = [median_secs(run, args.rounds, x, kernels, dy) for run in runs]
                times = " | ".join(f"{1e6 * taken:.0f} us" for taken in secs)
                shown = " + ".join(map(str, widths))
                yield f"| {name} | {tokens} | {width} | {shown} | {times} | {secs[0] / secs[1]:.2f} |"


def forward_and_back(form: Callable, then: Callable, x: Any, kernels: Any, dy: Any) -> Any:
    import jax

    y, pull = jax.vjp(lambda x, kernels: then(form(x, kernels)), x, kernels)
    return y, pull(dy)


def apart(x: Any, kernels: Any) -> list[Any]:
    return [x @ kernel.astype(x.dtype) for kernel in kernels]


def at_once(x: Any, kernels: Any) -> list[Any]:
    import jax.numpy as jnp

    ends = [sum(kernel.shape[1] for kernel in kernels[: at + 1]) for at in range(len(kernels) - 1)]
    return jnp.split(x @ jnp.concatenate([kernel.astype(x.dtype) for kernel in kernels], axis=1), ends, axis=1)


def gated(parts: Any) -> Any:
    import jax

    gate, up = parts
    return jax.nn.silu(gate) * up


def grouped(args: argparse.Namespace) -> Iterator[str]:
    """Lines of the table of grouped products and their gradients."""
    import jax
    import jax.numpy as jnp

    from parallax.model.experts.grouped import FORMS, grouped_dot, grouped_sums

    def pass_of(form: str) -> Callable:
        return lambda x, w, dy, sizes: (
            grouped_dot(x, w, sizes, form=form),
            grouped_dot(dy, w, sizes, transposed=True, form=form),
            grouped_sums(x, dy, sizes, form=form),
        )

    def dense(x: Any, w: Any, dy: Any, sizes: Any) -> tuple:
        return x @ w[0], dy @ w[0].T, x.T @ dy

    def padded(x: Any, w: Any, dy: Any, sizes: Any) -> tuple:
        x, dy = (array.reshape(len(w), -1, array.shape[1]) for array in (x, dy))
        return (
            jnp.einsum("ebi,eio->ebo", x, w),
            jnp.einsum("ebo,eio->ebi", dy, w),
            jnp.einsum("ebi,ebo->eio", x, dy),
        )

    forms = {form: pass_of(form) for form in FORMS} | {"padded": padded, "dense": dense}
    yield table("rows, experts, widths", "form", "time", "TFLOP/s")
    for experts, width, out in [(4, 64, 64)] if args.smoke else GROUPED:
        x, dy = random(args.tokens, width), random(args.tokens, out, seed=1)
        w, sizes = width**-0.5 * random(experts, width, out, seed=2), jnp.full(experts, args.tokens // experts)
        for name, run in forms.items():
            secs = median_secs(jax.jit(run), args.rounds, x, w, dy, sizes)
            rate = 3 * 2 * args.tokens * width * out / secs / 1e12
            yield f"| {args.tokens}, {experts}, {width} x {out} | {name} | {1e3 * secs:.2f} ms | {rate:.0f} |"


def copies(args: argparse.Namespace) -> Iterator[str]:
    """Lines of the table of copies."""
    import jax

    from parallax.sharding.host import to_device, to_host

    numbers = (2**20 if args.smoke else COPIED_BYTES) // 4
    here = random(numbers, dtype="float32")
    there, host = jax.jit(to_host)(here), here.sharding.with_memory_kind("pinned_host")
    runs = {
        "within the device": (lambda here, there: here + 1, here.sharding),
        "to the host": (lambda here, there: to_host(here), host),
        "from the host": (lambda here, there: to_device(there), here.sharding),
        "both at once, each way": (lambda here, there: (to_host(here), to_device(there)), (host, here.sharding)),
    }
    yield table("copy", "MiB", "time", "GB/s")
    for name, (run, places) in runs.items():
        secs = median_secs(jax.jit(run, out_shardings=places), args.rounds, here, jax.device_put(there, host))
        yield f"| {name} | {numbers * 4 / 2**20:.0f} | {1e3 * secs:.2f} ms | {numbers * 4 / secs / 1e9:.0f} |"


def operations(args: argparse.Namespace) -> Iterator[str]:
    """Lines of the table of small operations."""
    import jax
    from jax import lax

    x, times = random(NUMBERS, dtype="float32"), 20 if args.smoke else OPERATIONS
    add = jax.jit(lambda x: x + 1)

    def programs(x: Any) -> Any:
        for _ in range(times):
            x = add(x)
        return x

    @jax.jit
    def unrolled(x: Any) -> Any:
        for _ in range(times):
            x = lax.optimization_barrier(x + 1)
        return x

    looped = jax.jit(lambda x: lax.fori_loop(0, times, lambda _, x: lax.optimization_barrier(x + 1), x))
    yield table("small operation", "time of each")
    for name, run in {"a program": programs, "an operation of one": unrolled, "a step of a loop": looped}.items():
        yield f"| {name} | {1e6 * median_secs(run, args.rounds, x) / times:.1f} us |"


if __name__ == "__main__":
    run_benchmark(main)
