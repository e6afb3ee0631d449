"""The experts of a rank, and the weighted sum of their outputs for each token."""

import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from parallax.config.sections import (
    CLAMPED,
    COMPUTE,
    CURRENT,
    DELAYED,
    EXPERT_ADAPTER,
    EXPERTS,
    FIXED,
    ROW_SCALES,
    ModelConfig,
)
from parallax.model.experts.exchange_costs import usual_rows
from parallax.model.experts.grouped import grouped_dot, grouped_rows, grouped_sums, sums_of_groups
from parallax.model.experts.grouped_kernel import (
    gated,
    gated_by_group,
    has_kernel,
    input_gradient_by_group,
)
from parallax.model.experts.grouped_triton import IN_TILES, fits_triton, gated_in_tiles, input_gradient_in_tiles
from parallax.model.experts.rows import Rows, collect, dispatch, sort_rows, sums_of_tokens
from parallax.model.lora import LORA_A, LORA_B, adapts, first_matrix
from parallax.model.mlp import SWIGLU, Activation
from parallax.model.products import (
    AMAX,
    AMAX_LAYOUT,
    GRADIENT,
    INPUT,
    MEASURED,
    ROUNDED,
    WEIGHT,
    WIDEST_BLOCKS,
    EightBitProduct,
    Operand,
    kernel_operand,
    largest,
    product_of,
    scales_of,
    token_operand,
)
from parallax.sharding.activations import EXPERT_AXIS
from parallax.sharding.collectives import as_varying, is_bound, offset, vary_alike, varying_axes
from parallax.sharding.eight_bits import KERNEL_UNIT, normal_in_units
from parallax.sharding.layout import Layout
from parallax.sharding.parameter import parameter

ALL = sys.maxsize  # rows: one for each choice
USUAL_LOAD = "usual_load"  # the scope of branches that are taken unless experts get more tokens than usual
INTO, BACK = "experts/ep d_model d_expert/tp", "experts/ep d_expert/tp d_model"


class Experts(nn.Module):
    """The kernels of this rank's experts, in the model's dtype, with the biases of gate and up and with adapters if the
    model has them there; the bias of down is MoE's. `matmul` is the form of their products: see
    parallax/model/products.py. All experts of a layer share their scales. In place of current scales each row has one
    of its own: the number of rows depends on the load, and they come in rounds, of which the first would wait for the
    last one's maximum. The sum of rows for a kernel's gradient is never in 8 bits.

    Communication:
        forward   nothing
        backward  nothing
    """

    model: ModelConfig
    out_scale: float
    matmul: str = COMPUTE

    def setup(self):
        self.gate = self._kernel("gate", INTO, self.model.d_model**-0.5)
        self.up = self._kernel("up", INTO, self.model.d_model**-0.5)
        self.down = self._kernel("down", BACK, self.out_scale * self.model.d_expert**-0.5, "d_expert")
        # By name of their kernels, as adapters are.
        self.units = {name: self._units(name) for name in HeldExperts._fields if self.model.stored_base}
        adapted = [name for name in HeldExperts._fields if adapts(self.model, (*self.path, name))]
        self.adapters = {name: self._adapter(name) for name in adapted}
        self.biases = {name: self._bias(name) for name in ("gate", "up") if self.model.expert_bias}
        if self._is_delayed:
            self.gate_amax, self.up_amax, self.down_amax = map(self._amax, HeldExperts._fields)

    def __call__(self) -> "HeldExperts":
        return HeldExperts(*map(self._held, HeldExperts._fields))

    def _held(self, name: str) -> "ExpertKernels":
        kernels, layout = getattr(self, name).astype(self.model.dtype), _layout_of(name)
        if self.units:
            kernels = (kernels.astype(jnp.float32) * self.units[name][:, None]).astype(self.model.dtype)
        is_clamped = self.model.expert_activation == CLAMPED
        activation = Activation(CLAMPED, self.model.expert_limit) if is_clamped else SWIGLU
        adapter, bias = self.adapters.get(name), self.biases.get(name)
        bias = None if bias is None else bias.astype(self.model.dtype)
        if self.matmul == COMPUTE:
            return ExpertKernels(kernels, adapter=adapter, bias=bias, activation=activation)
        rounded = self.get_variable(ROUNDED, name) if self.has_variable(ROUNDED, name) else None
        amax = product_of(self.matmul).amax(getattr(self, _scales_of(name)) if self._is_delayed else None)
        return ExpertKernels(kernels, amax, rounded, adapter, bias, self.matmul, layout, activation)

    @property
    def _is_delayed(self) -> bool:
        return self.matmul != COMPUTE and product_of(self.matmul).scales == DELAYED

    def _amax(self, name: str) -> Array:
        zeros, what = nn.initializers.zeros, dict(role="maxima", part=EXPERTS)
        return parameter(self, _scales_of(name), AMAX_LAYOUT, self.model.sizes, zeros, **what)

    def _kernel(self, name: str, layout: str, deviation: float, inputs: str = "d_model") -> Array:
        init = nn.initializers.normal(deviation)
        scales = scales_of(self.matmul, _scales_of(name)) if self.matmul != COMPUTE else ""
        what = dict(role="weight", part=EXPERTS, inputs=inputs, products=self.matmul, scales=scales)
        if stored := self.model.stored_base:
            init, what = normal_in_units(deviation, stored)[0], what | dict(stored=stored, unit=f"{name}_{KERNEL_UNIT}")
        # Shards of whole experts, or else of their rows, are contiguous in memory, as products read and write them.
        return parameter(self, name, layout, self.model.sizes, init, at_rest=f"experts {inputs}", **what)

    def _bias(self, name: str) -> Array:
        experts, _, columns = _layout_of(name).split()
        zeros, what = nn.initializers.zeros, dict(role="bias", part=EXPERTS)
        return parameter(self, f"{name}_bias", f"{experts} {columns}", self.model.sizes, zeros, **what)

    def _units(self, name: str) -> Array:
        """The values of one unit of the 8-bit numbers of each kernel's columns."""
        experts, contracted, columns = _layout_of(name).split()
        scale, width = (self.out_scale, "d_expert") if name == "down" else (1.0, "d_model")
        init = normal_in_units(scale * self.model.sizes[width] ** -0.5, self.model.stored_base)[1]
        what = dict(role="norm", part=EXPERTS, stored="float32")
        return parameter(self, f"{name}_{KERNEL_UNIT}", f"{experts} {columns}", self.model.sizes, init, **what)

    def _adapter(self, name: str) -> "ExpertAdapter":
        experts, contracted, columns = _layout_of(name).split()
        inputs = contracted.partition("/")[0]
        sizes = {**self.model.sizes, "rank": self.model.lora_rank}
        what = dict(role="weight", part=EXPERT_ADAPTER, adapts=name)
        first, zeros = first_matrix(sizes[inputs]), nn.initializers.zeros
        a = parameter(self, f"{name}_{LORA_A}", f"{experts} {contracted} rank", sizes, first, inputs=inputs, **what)
        b = parameter(self, f"{name}_{LORA_B}", f"{experts} rank {columns}", sizes, zeros, inputs="rank", **what)
        dtype, factor = self.model.dtype, self.model.lora_alpha / self.model.lora_rank
        return ExpertAdapter(a.astype(dtype), b.astype(dtype), factor)


def _layout_of(kernels: str) -> str:
    return BACK if kernels == "down" else INTO


def _scales_of(kernels: str) -> str:
    """The name of the parameter with the scales of these kernels' products."""
    return f"{kernels}_{AMAX}"


class ExpertAdapter(struct.PyTreeNode):
    """What an adapter adds to each expert's product with a kernel: `factor * (x @ a) @ b`, a [E, I, X], b [E, X, O].

    Communication:
        forward   nothing
        backward  nothing
    """

    a: Array
    b: Array
    factor: float = struct.field(pytree_node=False)

    def times(self, x: Array, sizes_E: Array, *, transposed: bool = False) -> Array:
        """What it adds to `ExpertKernels.times`."""
        first, last = (self.b, self.a) if transposed else (self.a, self.b)
        narrow = grouped_dot(x, first, sizes_E, transposed=transposed)
        return self.factor * grouped_dot(narrow, last, sizes_E, transposed=transposed)

    def sums(self, x: Array, dy: Array, sizes_E: Array, others: "ExpertAdapter | None" = None) -> "ExpertAdapter":
        """Its gradient from rows and their results' gradients, added to others."""
        before = (None, None) if others is None else (others.a, others.b)
        of_a = grouped_dot(dy, self.factor * self.b, sizes_E, transposed=True)
        of_b = grouped_dot(x, self.factor * self.a, sizes_E)
        return self.replace(a=grouped_sums(x, of_a, sizes_E, before[0]), b=grouped_sums(of_b, dy, sizes_E, before[1]))


class KernelSums(NamedTuple):
    """Gradients of kernels, and of their adapter and bias if they have one."""

    kernels: Array
    adapter: ExpertAdapter | None
    bias: Array | None


class ExpertKernels(struct.PyTreeNode):
    """A kernel of each expert, [E, I, O], of this layout, with the form of its products, and a bias [E, O] if it has
    one. For 8 bits, `amax` has the largest magnitudes [3] of input, kernels and gradient if these are known before, and
    `rounded` the kernels in 8 bits if they were rounded before.

    Communication:
        forward   all_reduce of the rows' maxima over tp if scales are of rows and tp cuts them; of kernels that were
                  not rounded before, of theirs over the axes that cut them
        backward  the same of the gradient's rows
    """

    kernels: Array
    amax: Array | None = None
    rounded: Array | Operand | None = None
    adapter: ExpertAdapter | None = None
    bias: Array | None = None
    form: str = struct.field(pytree_node=False, default=COMPUTE)
    layout: str = struct.field(pytree_node=False, default=INTO)
    activation: Activation = struct.field(pytree_node=False, default=SWIGLU)  # behind the products of gate and up

    def input(self, x: Array) -> Operand:
        """The products' input, rounded."""
        return self._operand(x, self._product.operand, INPUT)

    def gradient(self, dy: Array) -> Operand:
        """The gradient of their result, rounded."""
        return self._operand(dy, self._product.gradient, GRADIENT)

    def times(self, x: Operand, sizes_E: Array, *, transposed: bool = False) -> Array:
        """Each row times its expert's kernel, plus its bias; or times the transposed kernel."""
        weight, dtype = self._weight(transposed), self.kernels.dtype
        if self._product.scales in WIDEST_BLOCKS:
            x, weight = x.unrounded(dtype), weight.unrounded(dtype)
        y = grouped_dot(x, weight, sizes_E, transposed=transposed, dtype=dtype)
        if self.adapter is not None:
            y += self.adapter.times(x.unrounded(dtype).values, sizes_E, transposed=transposed)
        return y if self.bias is None or transposed else y + grouped_rows(self.bias, sizes_E, len(y))

    def sums(self, x: Array, dy: Array, sizes_E: Array, others: KernelSums | None = None) -> KernelSums:
        """Their gradients from rows and their results' gradients, added to others."""
        kernels, of_adapter, of_bias = others or (None, None, None)
        adapter = self.adapter and self.adapter.sums(x, dy, sizes_E, of_adapter)
        bias = None if self.bias is None else sums_of_groups(dy, sizes_E, of_bias)
        return KernelSums(grouped_sums(x, dy, sizes_E, kernels), adapter, bias)

    def most(self, x: Array, sizes_E: Array | None = None) -> Array | None:
        """The largest magnitude; with `sizes_E`, of the rows in use. None but for delayed scales."""
        if self.form == COMPUTE or self._product.scales != DELAYED:
            return None
        return largest(x if sizes_E is None else jnp.where((jnp.arange(len(x)) < sizes_E.sum())[:, None], x, 0))

    def with_gradient(self, sums: KernelSums, of_input: Array | None, of_gradient: Array | None) -> "ExpertKernels":
        """The gradients; that of `amax` has the largest magnitudes, with 0 for kernels that were rounded before."""
        given = self.replace(kernels=sums.kernels, adapter=sums.adapter, bias=sums.bias, amax=None, rounded=None)
        if of_input is None:
            return given
        of_kernels = largest(self.kernels) if self.rounded is None else jnp.zeros_like(of_input)
        return given.replace(amax=jnp.stack([of_input, of_kernels, of_gradient]))

    def _weight(self, transposed: bool) -> Operand:
        product, rounded = self._product, self.rounded
        if transposed and not product.gradient:
            return Operand(self.kernels, None)
        if isinstance(rounded, Operand):
            return rounded
        if product.known:
            amax = None if self.amax is None else self.amax[WEIGHT]
            return Operand.of(self.kernels, product.operand, amax, rounded)
        layout = Layout.parse(self.layout)
        return kernel_operand(product, self.kernels, layout, [layout.names[2 if transposed else 1]])

    def _operand(self, x: Array, kind: str, which: int) -> Operand:
        product = self._product
        if product.known or not kind:
            fixed = product.scales == FIXED
            return Operand.of(x, kind, self.amax[which], fixed=fixed) if kind else Operand(x, None)
        weight = Layout.parse(self.layout)
        dim = 1 if which == INPUT else 2
        layout = Layout(("entries", weight.names[dim]), ((), weight.axes[dim]))
        return token_operand(product, x, kind, layout, weight)

    @property
    def _product(self) -> EightBitProduct:
        product = product_of(MEASURED if self.form == COMPUTE else self.form)
        return product._replace(scales=ROW_SCALES) if product.scales == CURRENT else product


class HeldExperts(NamedTuple):
    """Gated MLPs [E, D, U] and [E, U, D] with consecutive ids; this rank holds a shard of each over tp."""

    gate: ExpertKernels
    up: ExpertKernels
    down: ExpertKernels

    def __call__(self, x: Array, weights_NK: Array, ids_NK: Array) -> Array:
        """Weighted sum of the outputs of this rank's experts, [..., D] in x's dtype; weights are [N, K].

        It is a partial sum over tp, and over ep for other ranks' experts. There are rows for all choices that may
        occur; if no more occur than usual, fewer are computed, see `usual_rows`.
        """
        x, weights_NK, ids_NK, experts = vary_alike((x, weights_NK, ids_NK, self))
        count = self.count
        held_NK = ids_NK - offset(Layout.parse(INTO), "experts", count)
        rows = sort_rows(held_NK, count, most=min(ids_NK.shape[1], count))
        ranks = lax.axis_size(EXPERT_AXIS) if is_bound(EXPERT_AXIS) else 1
        usual = usual_rows(ids_NK.size, len(rows.choice_R), ranks) if ranks > 1 else ALL
        return _summed(usual, x, weights_NK, experts, rows)

    @property
    def activation(self) -> Activation:
        """What stands between the products."""
        return self.gate.activation

    @property
    def count(self) -> int:
        """The number of experts."""
        return len(self.gate.kernels)

    def ids(self) -> Array:
        """The ids of these experts."""
        return offset(Layout.parse(INTO), "experts", self.count) + jnp.arange(self.count)

    def gated(self, x: Operand, weights_R1: Array, sizes_E: Array) -> tuple[Array, Array, Array]:
        """Gate and up products of each row and `gated` of them, the input of down, all [R, U]."""
        by_kernel = self._kernel_for(x, gated_by_group, gated_in_tiles)
        if by_kernel is not None:
            kernels = self.gate.kernels, self.up.kernels
            biases = [] if self.gate.bias is None else [self.gate.bias, self.up.bias]
            return by_kernel(x.values, *kernels, weights_R1, sizes_E, self.activation, biases)
        gate, up = (kernels.times(x, sizes_E) for kernels in (self.gate, self.up))
        return gate, up, gated(gate, up, weights_R1, self.activation).astype(gate.dtype)

    def gated_gradients(
        self, dy: Operand, gate_RU: Array, up_RU: Array, weights_R1: Array, sizes_E: Array
    ) -> tuple[Array, Array, Array, Array]:
        """Gradients of the two products and of the weights, and the input of down, recomputed."""
        d_hidden = self.down.times(dy, sizes_E, transposed=True)
        hidden, pull = jax.vjp(partial(gated, activation=self.activation), gate_RU, up_RU, weights_R1)
        return *pull(d_hidden.astype(hidden.dtype)), hidden.astype(d_hidden.dtype)

    def input_gradients(self, d_gate_RU: Array, d_up_RU: Array, sizes_E: Array) -> tuple[Array, ...]:
        """One or two arrays [R, D]; their sum is the gradient of the rows."""
        pairs = (self.gate, self.gate.gradient(d_gate_RU)), (self.up, self.up.gradient(d_up_RU))
        by_kernel = self._kernel_for(pairs[0][1], input_gradient_by_group, input_gradient_in_tiles)
        if by_kernel is not None:
            return (by_kernel(d_gate_RU, d_up_RU, self.gate.kernels, self.up.kernels, sizes_E),)
        return tuple(kernels.times(d, sizes_E, transposed=True) for kernels, d in pairs)

    def _kernel_for(self, x: Operand, for_tpus: Callable, for_gpus: Callable) -> Callable | None:
        """The kernel for gated experts that multiplies these rows; None if they are multiplied by products apart."""
        if self.gate.adapter is not None or self.up.adapter is not None:
            return None
        if has_kernel(x):
            return for_tpus
        in_tiles = self.activation.name in IN_TILES and fits_triton(x, self.gate.kernels)
        return for_gpus if in_tiles else None

    def with_gradients(self, sums: Iterable[KernelSums], most: Iterable[tuple]) -> "HeldExperts":
        """Their gradients; `most` has the largest magnitudes of each product's input and of its result's gradient."""
        given = zip(self, sums, most, strict=True)
        return HeldExperts(*(held.with_gradient(gradient, *largest_two) for held, gradient, largest_two in given))

    def for_each(self, chunks: int) -> list[Array]:
        """The scales once for each chunk of a batch, for `with_scales`."""
        return [_scales_of_each(chunks, kernels.amax) for kernels in self if kernels.amax is not None]

    def with_scales(self, scales: Iterable[Array]) -> "HeldExperts":
        """The experts with the scales of one chunk."""
        return HeldExperts(*(kernels.replace(amax=amax) for kernels, amax in zip(self, scales))) if scales else self


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scales_of_each(chunks: int, amax: Array) -> Array:
    """The same scales for each chunk; the gradient is the maximum over chunks, not the sum."""
    return jnp.broadcast_to(amax, (chunks, *amax.shape))


def _scales_forward(chunks: int, amax: Array) -> tuple[Array, None]:
    return _scales_of_each(chunks, amax), None


def _scales_backward(chunks: int, _: None, of_chunks: Array) -> tuple[Array]:
    return (of_chunks.max(axis=0),)


_scales_of_each.defvjp(_scales_forward, _scales_backward)


# A custom gradient: only the two products of the usual number of rows are saved for it; if there are more rows, the
# products are recomputed. Products for the weights' gradients are separate, so that a divided backward pass can run
# them later.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed(usual: int, x: Array, weights_NK: Array, experts: HeldExperts, rows: Rows) -> Array:
    return _forward(usual, x, weights_NK, experts, rows)[0]


def _forward(
    usual: int, x: Array, weights_NK: Array, experts: HeldExperts, rows: Rows
) -> tuple[Array, tuple[Any, ...]]:
    x_ND = x.reshape(-1, x.shape[-1])
    operand = experts.gate.input(x_ND)  # shared with up; rounded once, before tokens are copied to rows
    products = partial(_products, usual, experts, operand, weights_NK)
    gate, up, hidden = _on_rows_in_use(usual, rows, products)
    saved = [checkpoint_name(array, "experts") for array in (gate, up)]

    # Separate, so that a backward pass that recomputes the products recomputes nothing else.
    def run(rows: Rows, sums: Callable) -> Array:
        inputs = hidden if _is_usual(usual, rows) else _gated(experts, operand, weights_NK, rows)[2]
        # Multiplied with the weights before the last product, so that its result need not be saved for their gradient.
        return sums(experts.down.times(experts.down.input(inputs), rows.sizes_E))

    y_ND = _on_rows_in_use(usual, rows, run)
    return y_ND.reshape(x.shape), (x, weights_NK, experts, rows, experts.gate.most(x_ND), *saved)


def _products(
    usual: int, experts: HeldExperts, x: Operand, weights_NK: Array, rows: Rows, sums: Callable
) -> tuple[Array, Array, Array]:
    """`_gated` of the usual number of rows; if there are more, none are saved, and zeros take their place."""
    if _is_usual(usual, rows):
        return _gated(experts, x, weights_NK, rows)
    kernels = experts.gate.kernels
    none = as_varying(jnp.zeros((usual, kernels.shape[2]), kernels.dtype), varying_axes(x.values))
    return none, none, none


def _gated(experts: HeldExperts, x: Operand, weights_NK: Array, rows: Rows) -> tuple[Array, Array, Array]:
    return experts.gated(_dispatched_operand(x, rows), _weights(weights_NK, rows), rows.sizes_E)


def _weights(weights_NK: Array, rows: Rows) -> Array:
    return dispatch(weights_NK.reshape(-1, 1), rows.of_choices())


def _dispatched_operand(x: Operand, rows: Rows) -> Operand:
    unit = x.unit if x.unit is None or not x.unit.ndim else dispatch(x.unit, rows)
    return x._replace(values=dispatch(x.values, rows), unit=unit)


def _is_usual(usual: int, rows: Rows) -> bool:
    return len(rows.choice_R) <= usual


def _backward(usual: int, saved: tuple[Any, ...], dy: Array) -> tuple[Array, Array, HeldExperts, None]:
    x, weights_NK, experts, rows, of_x, *gate_and_up = saved
    x_ND, dy_ND = (array.reshape(-1, x.shape[-1]) for array in (x, dy))
    gate, up, down = experts
    dy_operand = down.gradient(dy_ND)

    def of_products(rows: Rows) -> tuple[Array, ...]:
        products = gate_and_up if _is_usual(usual, rows) else _gated(experts, gate.input(x_ND), weights_NK, rows)[:2]
        dy = _dispatched_operand(dy_operand, rows)
        return experts.gated_gradients(dy, *products, _weights(weights_NK, rows), rows.sizes_E)

    def of_tokens(rows: Rows, sums: Callable) -> tuple[Array, ...]:
        dgate, dup, dweights, hidden = of_products(rows)
        dx_ND = sums(*experts.input_gradients(dgate, dup, rows.sizes_E))
        pairs = (gate, dgate), (up, dup), (down, hidden)
        most = [kernels.most(array, rows.sizes_E) for kernels, array in pairs]
        return dx_ND, collect(dweights, rows.of_choices()), most, dgate[:usual], dup[:usual], hidden[:usual]

    dx_ND, dweights, (of_dgate, of_dup, of_hidden), *of_usual = _on_rows_in_use(usual, rows, of_tokens)

    def of_kernels(rows: Rows, sums: Callable) -> list[KernelSums]:
        x_RD, dy_RD = dispatch(x_ND, rows), dispatch(dy_ND, rows)
        dgate, dup, hidden = of_usual
        if not _is_usual(usual, rows):
            dgate, dup, _, hidden = of_products(rows)
        pairs = (x_RD, dgate), (x_RD, dup), (hidden, dy_RD)
        return [held.sums(*pair, rows.sizes_E) for held, pair in zip(experts, pairs, strict=True)]

    most = (of_x, of_dgate), (of_x, of_dup), (of_hidden, down.most(dy_ND))
    dexperts = experts.with_gradients(_on_rows_in_use(usual, rows, of_kernels), most)
    return dx_ND.reshape(x.shape), dweights.reshape(weights_NK.shape), dexperts, None


_summed.defvjp(_forward, _backward)


def _on_rows_in_use(usual: int, rows: Rows, run: Callable[[Rows, Callable], Any]) -> Any:
    """Call `run` on the usual number of rows if they suffice, otherwise on all rows. Its second argument sums the rows
    of each token, over several arrays [R, D], to [N, D]."""
    if usual == ALL:
        return run(rows, partial(sums_of_tokens, rows.row_NK, mode="promise_in_bounds"))
    few = rows._replace(choice_R=rows.choice_R[:usual])
    last = usual - 1  # not in use in that case; it stands for all missing rows

    def sums(*arrays_RD: Array) -> Array:
        zero_there = [y_RD.at[last].set(0) for y_RD in arrays_RD]
        return sums_of_tokens(jnp.minimum(rows.row_NK, last), *zero_there, mode="promise_in_bounds")

    with jax.named_scope(USUAL_LOAD):
        return lax.cond(
            rows.sizes_E.sum() < usual, lambda: run(few, sums), lambda: run(rows, partial(sums_of_tokens, rows.row_NK))
        )
