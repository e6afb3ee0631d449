"""Training steps in low precision, emulated on one device with float32 numbers on the grids of narrower dtypes: no
mesh, no executor, and each rounding written out.

Products in 8 bits with the maxima of the step before, kernels that are rounded before they travel, and moments and
weights that are rounded stochastically.
"""

import functools
import zlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from parallax.model.batch import IGNORED
from parallax.step.low_precision import Blocks, block_of, from_float8
from support.numpy_layers import frequencies
from support.plain_model import best

# Largest number, bits of mantissa, exponent of the least normal number, and what the largest magnitude of the step
# before is mapped to. int8 is a grid of whole numbers.
GRIDS = {"int8": (127, None, None, 127), "e4m3": (448, 3, -6, 256), "e5m2": (57344, 2, -14, 32768)}
KINDS = {"int8": ("int8", "int8"), "float8": ("e4m3", "e5m2")}  # of operands and of gradients
ROUNDING = 0x524F554E  # folded into the seed for the random bits of stochastic rounding


# ---- 8-bit products and gathers


def on_grid(x, unit, kind):
    """The nearest number of a grid to each entry over the unit, of two the even one; larger ones are clipped."""
    most, bits, least, _ = GRIDS[kind]
    over = jnp.clip(x * (1 / unit), -most, most)
    if bits is None:
        return jnp.round(over)
    step = jnp.ldexp(jnp.float32(1), jnp.maximum(jnp.frexp(over)[1] - 1, least) - bits)
    return jnp.round(over / step) * step


def unit_of(amax, kind):
    return amax * jnp.float32(1 / GRIDS[kind][3])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def product(letters, form, x, w, amax, first):
    """einsum of x and w on the grid of a form's operands. `amax` has the largest magnitudes of x, w and the result's
    gradient in the step before; those of this step are its "gradient". x is rounded with the scale of `first`, the amax
    of the first product that reads it."""
    return _product(letters, form, x, w, amax, first)[0]


def _product(letters, form, x, w, amax, first):
    kind, _ = KINDS[form]
    of_x, of_w = unit_of(first[0], kind), unit_of(amax[1], kind)
    y = jnp.einsum(letters, on_grid(x, of_x, kind), on_grid(w, of_w, kind)) * (of_x * of_w)
    return y, (x, w, amax)


def _pull(letters, form, saved, dy):
    (x, w, amax), (kind, of_gradients) = saved, KINDS[form]
    operands, result = letters.split("->")
    left, right = operands.split(",")
    of_dy, of_w = unit_of(amax[2], of_gradients), unit_of(amax[1], kind)
    dx = jnp.einsum(f"{result},{right}->{left}", on_grid(dy, of_dy, of_gradients), on_grid(w, of_w, kind)) * (
        of_dy * of_w
    )
    dw = jnp.einsum(f"{left},{result}->{right}", x, dy)
    return dx, dw, jnp.stack([jnp.abs(one).max() for one in (x, w, dy)]), None


product.defvjp(_product, _pull)


def travelled(w, kind):
    """A kernel as a gather in 8 bits leaves it: on the grid over its largest magnitude; its gradient is not rounded."""
    if kind == "compute":
        return w
    kind, _ = KINDS[kind]
    unit = jnp.abs(w).max() * jnp.float32(1 / GRIDS[kind][0])
    rounded = on_grid(w, unit, kind) * unit
    return lax.stop_gradient(rounded) + (w - lax.stop_gradient(w))


class Form(NamedTuple):
    """How a model multiplies: the form of 8-bit products, and what kernels of other products travel in."""

    matmul: str = "compute"
    gathers: str = "compute"

    def __call__(self, letters, x, weights, name="kernel", first=None):
        """x times a kernel of a module; `first` are the weights and the name whose scale rounds x."""
        scales = "amax" if name == "kernel" else f"{name}_amax"
        if scales not in weights:
            return jnp.einsum(letters, x, travelled(weights[name], self.gathers))
        own, first_of = weights[scales], weights[scales] if first is None else first
        return product(letters, self.matmul, x, weights[name], own, lax.stop_gradient(first_of))


# ---- the model


def norm(x, scale, eps):
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps) * scale[None, None]


def rotated(x, positions, theta):
    angles = (positions[..., None] * jnp.float32(frequencies(x.shape[-1], theta))[None, None])[:, :, None]
    left, right = jnp.split(x, 2, -1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)


def attention(m, form, weights, x, batch):
    q, k, v = (weights[name] for name in "qkv")
    q, k, v = (form(f"BSD,D{h}P->BS{h}P", x, own, first=q.get("amax")) for own, h in ((q, "H"), (k, "K"), (v, "K")))
    q, k = (rotated(one, batch["positions"], m.rope_theta) for one in (q, k))
    k, v = (jnp.repeat(one, m.heads // m.kv_heads, axis=2) for one in (k, v))
    scores = jnp.einsum("BSHP,BTHP->BHST", q, k) * m.d_head**-0.5
    places, segments = jnp.arange(x.shape[1]), batch["segments"]
    seen = (places[:, None] >= places[None])[None] & (segments[:, :, None] == segments[:, None])
    heads = jnp.einsum("BHST,BTHP->BSHP", jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf)), v)
    return form("BSHP,HPD->BSD", heads, weights["out"])


def dense(form, weights, x):
    gate, up = weights["gate"], weights["up"]
    hidden = jax.nn.silu(form("BSD,DF->BSF", x, gate)) * form("BSD,DF->BSF", x, up, first=gate.get("amax"))
    return form("BSF,FD->BSD", hidden, weights["down"])


def mixture(m, loss, form, weights, x):
    """(result, the router's losses, the loads of experts). Every expert computes all tokens, with 0 those that
    did not choose it."""
    logits = x @ weights["router"]["kernel"][None]
    scores = jax.nn.softmax(logits)
    chosen, _ = best(scores + weights["router"]["bias"][None, None], m.experts_per_token)
    shares = scores * chosen
    shares /= shares.sum(-1, keepdims=True)
    experts = weights["experts"]
    first = experts.get("gate_amax")
    gate, up = (form("BSD,EDU->BSEU", x, experts, name, first) for name in ("gate", "up"))
    y = form("BSEU,EUD->BSD", jax.nn.silu(gate) * up * shares[..., None], experts, "down")
    share = chosen.mean(1) / m.experts_per_token
    balance = (m.experts * share * (scores / scores.sum(-1, keepdims=True)).mean(1)).sum(-1).mean()
    z = jnp.square(jax.nn.logsumexp(logits, -1)).mean()
    return y, loss.balance_coefficient * balance + loss.router_z_coefficient * z, chosen.sum((0, 1))


def loss_and_grads(m, loss, form, params, batch):
    """(cross-entropy, gradients), where the gradient of scales is the largest magnitudes, and that of a router's bias
    the loads of its experts."""

    def total(params):
        x, extra, loads = params["embedding"]["table"][batch["tokens"]], 0.0, []
        at = dict.fromkeys(m.layer_kinds, 0)
        for kind in m.layer_kinds:
            stack = params["blocks"] if len(at) == 1 else params["blocks"][kind]
            weights = jax.tree.map(lambda leaf, row=at[kind]: leaf[row], stack)
            at[kind] += 1
            normed = norm(x, weights["attention_norm"]["scale"], m.norm_eps)
            x += attention(m, form, weights["attention"], normed, batch)
            normed = norm(x, weights["mlp_norm"]["scale"], m.norm_eps)
            if kind == "dense":
                x += dense(form, weights["mlp"], normed)
            else:
                y, own, load = mixture(m, loss, form, weights["mlp"], normed)
                x, extra, loads = x + y, extra + own, [*loads, load]
        table = params["embedding" if m.tied else "head"]["table"]
        logits = norm(x, params["head"]["norm"]["scale"], m.norm_eps) @ table.T[None]
        logsumexp, labels = jax.nn.logsumexp(logits, -1), batch["labels"]
        real = labels != IGNORED
        found = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
        mean = lambda losses: jnp.sum(losses * real) / jnp.sum(real)  # noqa: E731
        entropy = mean(logsumexp - found)
        return entropy + mean(loss.z_coefficient * jnp.square(logsumexp)) + extra, (entropy, loads)

    (_, (entropy, loads)), grads = jax.value_and_grad(total, has_aux=True)(params)
    if loads:
        stack = grads["blocks"] if len({*m.layer_kinds}) == 1 else grads["blocks"]["moe"]
        stack["mlp"]["router"]["bias"] = jnp.stack(loads).reshape(stack["mlp"]["router"]["bias"].shape)
    return entropy, grads


def next_scale(found, before):
    """Maxima rounded up to 4 bits of mantissa behind the first; the scale before, where there was nothing."""
    fraction, exponent = np.frexp(np.asarray(found, np.float32))
    return np.where(found > 0, np.ldexp(np.ceil(fraction * 32) / 32, exponent), before).astype(np.float32)


# ---- what is stored


def random_bits(seed, step, field, name, shape):
    """Threefry of the seed, the step and the array's name, counted over the whole array."""
    parts = np.uint32([ROUNDING, step, zlib.crc32(f"{field} {name}".encode())])
    return np.asarray(_bits(seed, parts, shape)).astype(np.int64)


@functools.partial(jax.jit, static_argnums=2)
def _bits(seed, parts, shape):
    key = jax.random.key(seed, impl="threefry2x32")
    for part in parts:
        key = jax.random.fold_in(key, part)
    return jax.random.bits(key, shape)


def neighbours(values, dtype):
    """The numbers of a dtype next to each value, nearer to 0 and farther; the same one twice where it is one."""
    finite = np.arange(1 << 8 * np.dtype(dtype).itemsize, dtype=f"u{np.dtype(dtype).itemsize}").view(dtype)
    with np.errstate(invalid="ignore"):
        finite = np.unique(np.abs(finite.astype(np.float64)))  # infinity and NaN come last
    size = np.abs(values.astype(np.float64))
    at = np.searchsorted(finite, size, side="right") - 1
    below = finite[at]
    above = np.where(below == size, below, finite[np.minimum(at + 1, len(finite) - 1)])
    return np.copysign(below, values), np.copysign(above, values)


def rounded(x, bits, dtype, drawn):
    """Away from 0 where a random number below 1 is above what the value lacks of the farther neighbour."""
    below, above = neighbours(x, dtype)
    place = np.where(above == below, 0, (x - below) / np.where(above == below, 1, above - below))
    return np.where(place + (bits >> (32 - drawn)) / 2.0**drawn >= 1, above, below)


def stored(field, name, x, dtype, row, noise):
    """An array as it is stored, in float64, by NumPy; `noise` is (seed, step)."""
    bits = random_bits(*noise, field, name, x.shape)
    if dtype == "bfloat16":
        return rounded(x, bits, ml_dtypes.bfloat16, 16)
    block = block_of(row.spec, row.at_rest, x.shape) if dtype == "float8" else ()
    if not block:
        return x.astype(np.float64)
    x = np.sqrt(x) if field == "nu" else x
    parts = x.reshape([part for size, own in zip(x.shape, block) for part in (size // own, own)])
    largest = np.abs(parts).max(axis=tuple(range(1, parts.ndim, 2)), keepdims=True).astype(np.float64)
    scale = 2.0 ** np.ceil(np.log2(np.where(largest, largest, 1) / 448))
    scale = np.broadcast_to(scale, parts.shape).reshape(x.shape)
    found = rounded(x / scale, bits, ml_dtypes.float8_e4m3fn, 20)
    if field == "nu":
        return np.square(np.where((found == 0) & (x > 0), 2.0**-9, found) * scale)
    return found * scale


def kept(state, of):
    """Arrays of an optimizer's field by the parameter's name, in float64."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda x: isinstance(x, Blocks)):
        fields = [at for at, key in enumerate(path) if getattr(key, "name", "") == of]
        if fields:
            name = jax.tree_util.keystr(path[fields[0] + 1 :], simple=True, separator="/")
            wide = from_float8(leaf, root=of == "nu") if isinstance(leaf, Blocks) else leaf
            found[name] = np.asarray(wide, np.float64)
    return found


def as_float32(stored_state, plain_state):
    """A state that is stored in any dtypes as the plain optimizer has it."""
    leaves = jax.tree_util.tree_leaves_with_path(stored_state, is_leaf=lambda x: isinstance(x, Blocks))
    wide = []
    for path, leaf in leaves:
        root = any(getattr(key, "name", "") == "nu" for key in path)
        wide.append(from_float8(leaf, root=root) if isinstance(leaf, Blocks) else leaf)
    like = jax.tree.leaves(plain_state)
    assert len(like) == len(wide)
    return jax.tree.unflatten(jax.tree.structure(plain_state), [jnp.asarray(x, y.dtype) for x, y in zip(wide, like)])
