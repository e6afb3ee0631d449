"""LoRA: a product of low rank beside a frozen one (Hu et al. 2022, section 4.1).

Symbols of the paper: r rank, A `lora_a`, B `lora_b`, W_0 kernel.
"""

import fnmatch
import math
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
from jax import Array

from parallax.config.sections import ADAPTER, EXPERT_ADAPTER, ModelConfig
from parallax.errors import ConfigError, nearest, quoted
from parallax.model.context import Context
from parallax.model.dense import Dense, padded, unrounded
from parallax.model.dropout import Dropout
from parallax.model.products import KERNEL, ProductInput
from parallax.sharding.collectives import reshard
from parallax.sharding.einsum import einsum
from parallax.sharding.layout import Layout, named_leaves, with_parents
from parallax.sharding.parameter import parameter, specs_of
from parallax.sharding.zigzag import ZIGZAG

LORA_A, LORA_B = "lora_a", "lora_b"  # names of parameters
RANK = "rank"  # the dim that the second of them contracts
ADAPTER_NOISE = "noise"  # a collection beside parameters: see `noise_of`
_ROWS, _KEY = "rows", "key"  # its variables


class LoRA(Dense):
    """`x @ kernel + alpha / rank * (x @ lora_a) @ lora_b` if its model adapts this module; otherwise a Dense.

    With `model.lora_dropout` the adapter reads x with some entries dropped, others in each product and layer. lora_b
    begins at 0, so training begins where the kernel is. Both matrices are sharded as the kernel's dims that they
    have, and no data axis shards them: they are small.

    Communication:
        forward   as Dense;
                  all_reduce of x @ lora_a over tp if a contracted dim is cut over tp and seq of `y` is not;
                  reduce_scatter of x @ lora_a over tp if a contracted dim and seq of `y` are cut over tp
        backward  the transposes;
                  all_reduce of the gradient of x @ lora_a over tp if a contracted dim and columns are cut over tp
    """

    model: ModelConfig | None = None
    order: str = ZIGZAG  # of the tokens on context ranks

    def setup(self):
        super().setup()
        self.is_adapted = adapts(self.model, self.path)
        if not self.is_adapted:
            return
        sizes, what = {**self.sizes, RANK: self.model.lora_rank}, dict(role="weight", part=ADAPTER, adapts=KERNEL)
        first, zeros = first_matrix(math.prod(self.sizes[name] for name in self.inputs.split())), nn.initializers.zeros
        self.lora_a = parameter(self, LORA_A, self.into(RANK), sizes, first, inputs=self.inputs, **what)
        self.lora_b = parameter(self, LORA_B, self.back(RANK), sizes, zeros, inputs=RANK, **what)
        site = zlib.crc32("/".join(self.path).encode()) >> 1  # it becomes an int32
        self.drop = Dropout(self.x, self.sizes, self.model.lora_dropout, site, order=self.order)

    def __call__(self, x: Array | ProductInput, *, zeros_after: int = 0, places: Array | None = None) -> Array:
        """As Dense. Tokens are at these `places` of their rows, by default those that the layout of x says."""
        y = self.product(x, zeros_after)
        return y + self._added(self._dropped(unrounded(x), places), zeros_after) if self.is_adapted else y

    def with_adapter(self, kernel: Array, layout: str) -> Array:
        """A kernel plus what its adapter stands for; `layout` has its dims, of which inputs are whole."""
        if not self.is_adapted:
            return kernel
        into, back = self.into(RANK), self.back(RANK)
        inputs = " ".join(Layout.parse(into).names)
        a = reshard(f"{into} -> {inputs}", self.lora_a.astype(self.dtype))
        return kernel + self._factor * einsum(f"{inputs}, {back} -> {layout}", a, self.lora_b.astype(self.dtype))

    def _dropped(self, x: Array, places: Array | None) -> Array:
        layer = self.scope.root
        if not layer.has_variable(ADAPTER_NOISE, _KEY):
            return x
        rows, key = (layer.get_variable(ADAPTER_NOISE, name) for name in (_ROWS, _KEY))
        return self.drop(x, rows, key, places)

    def _added(self, x: Array, zeros_after: int) -> Array:
        sums, whole = self.partial_sums(RANK), self.between(RANK)
        narrow = einsum(f"{self.x}, {self.into(RANK)} -> {sums}", x, self.lora_a.astype(self.dtype))
        narrow = reshard(f"{sums} -> {whole}", narrow)
        added = einsum(f"{whole}, {self.back(RANK)} -> {self.y}", narrow, self.lora_b.astype(self.dtype))
        return padded(added * self._factor, zeros_after)

    @property
    def _factor(self) -> float:
        return self.model.lora_alpha / self.model.lora_rank


def noise_of(context: Context) -> dict[str, Any]:
    """Collections for the call of a layer, with which its adapters drop entries; none if nothing is dropped."""
    return {} if context.key is None else {ADAPTER_NOISE: {_ROWS: context.rows_B, _KEY: context.key}}


def lora_of(model: ModelConfig, order: str) -> Callable[..., Dense] | None:
    """What makes a model's projections in place of Dense; None for Dense itself."""
    return partial(LoRA, model=model, order=order, stored=model.stored_base) if model.lora_rank else None


def adapts(model: ModelConfig | None, path: Sequence[str]) -> bool:
    """Whether the product of a layer's module has an adapter.

    >>> model = ModelConfig(lora_rank=4, lora_on="attention/[qv] mlp")
    >>> [adapts(model, path) for path in (("attention", "q"), ("attention", "out"), ("mlp", "shared", "up"))]
    [True, False, True]
    """
    return bool(model and model.lora_rank) and _is_named("/".join(path), model.lora_on)


def first_matrix(fan_in: int) -> Callable:
    """The initial values of lora_a, with the standard deviation of those of PEFT."""
    return nn.initializers.normal((3 * fan_in) ** -0.5)


def check_adapted(declared: Any, model: ModelConfig) -> None:
    """Raise ConfigError if a word of model.lora_on adapts no product, or dropout cannot be of one that it adapts;
    `declared` are the model's parameters."""
    specs, words = named_leaves(specs_of(declared)), model.lora_on if model.lora_rank else ""
    in_layers = {name.removeprefix(f"{spec.stack}/"): spec for name, spec in specs.items() if spec.stack}
    adapted = [_adapted_by(name, spec.adapts) for name, spec in in_layers.items() if spec.adapts]
    for word in words.split():
        if not any(_is_named(module, word) for module in adapted):
            known = dict.fromkeys(above for name in in_layers for above in with_parents(name)[:-1])
            raise ConfigError(
                f"model.lora_on={quoted(words)}: no product in {quoted(word)} may have an adapter; "
                f"{nearest(word, known)}"
            )
    if model.lora_dropout and any(spec.part == EXPERT_ADAPTER for spec in specs.values()):
        raise ConfigError(
            f"model.lora_dropout={model.lora_dropout} with model.lora_on={quoted(words)}, which has experts: their "
            "adapters have no dropout, as in PEFT; use lora_dropout=0.0, or lora_on='attention mlp/shared', say."
        )


def _adapted_by(name: str, kernel: str) -> str:
    """The path of the product that an adapter's parameter is of; of a module with one kernel it is the module's."""
    module = name.rpartition("/")[0]
    return module if kernel == KERNEL else f"{module}/{kernel}"


def _is_named(path: str, words: str) -> bool:
    return any(fnmatch.fnmatchcase(above, word) for above in with_parents(path) for word in words.split())
