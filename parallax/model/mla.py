"""Multi-head latent attention (DeepSeek-V2, section 2.1), with heads sharded over `tp`.

Symbols of the paper: c_KV latent, W_DKV down, W_UK up_k, W_UV up_v, W_KR k_rope, W_DQ down_q, W_UQ and W_QR q.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout as MemoryLayout
from jax.experimental.layout import with_layout_constraint

from parallax.config.sections import ATTENTION, COMPUTE, FIXED, ModelConfig
from parallax.model.attention import (
    LargestLogits,
    Sinks,
    as_it_is,
    attend,
    attend_over_context,
    attend_to_cache,
    no_sinks,
    sow_intermediates,
    through_cache,
)
from parallax.model.context import Context
from parallax.model.dense import Dense
from parallax.model.families import Family
from parallax.model.halo import reshard_seen
from parallax.model.lora import LoRA
from parallax.model.norm import RMSNorm
from parallax.model.products import INPUT, WEIGHT, Operand, ProductInput, kernel_operand, product_of, token_operand
from parallax.model.rope import rotate
from parallax.sharding.activations import SEQ, activation
from parallax.sharding.collectives import all_gather, reshard
from parallax.sharding.einsum import einsum
from parallax.sharding.layout import Layout
from parallax.sharding.platform import platform_traced

HEADS_BEFORE_SEQ = MemoryLayout(major_to_minor=(0, 2, 1, 3))  # memory layout of an array [B, S, H, J]
BY_HEADS, BY_LATENTS = activation("heads/tp d_head"), activation("heads/tp d_latent")
UP_WHOLE = "d_latent heads/tp d_head"  # an up-projection's kernel, as decoding needs it


class MLA(nn.Module):
    """Keys and values from one low-rank latent per token; positions from a rotated part that all heads share.

    Training expands the latent to heads. Decoding caches `d_latent + d_rope` numbers per token and never expands:
    W_UK is absorbed into the queries, W_UV into the output.

    If context ranks gather keys, they gather the latent, which is smaller, and expand all tokens; with a window, those
    that some query sees, see `reshard_seen`. In the other forms it sends over `cp` what `attend_over_context` sends.
    In the family streams it sends the same as in column_row.

    Communication, column_row:
        forward   all_gather of x and the latent over tp; all_gather of the queries' latent over tp if d_latent_q > 0;
                  all_reduce of the latent's squares over tp;
                  all_reduce of the queries' latent's squares over tp if d_latent_q > 0;
                  reduce_scatter of the result over tp
        backward  the transposes; all_reduce of what the latent's norm needs over tp;
                  all_reduce of what the queries' latent's norm needs over tp if d_latent_q > 0
    Communication, scatter:
        forward   all_to_all of x over tp if it is cut over seq; reduce_scatter of q, the latent, k, v and the result
                  over tp; reduce_scatter of the queries' latent over tp if d_latent_q > 0;
                  all_reduce of the rotated key and the latent's squares over tp;
                  all_reduce of the queries' latent's squares over tp if d_latent_q > 0
        backward  the transposes; all_reduce of the rotated key's gradient and what the latent's norm needs over tp;
                  all_reduce of what the queries' latent's norm needs over tp if d_latent_q > 0
    Communication, all_gather:
        forward   all_gather of the latent and the rotated key over cp
        backward  all_to_all of the latent's gradient and the rotated key's gradient over cp
    """

    residual: str
    family: Family
    sizes: Mapping[str, int]
    dtype: str
    kernel: str
    norm_eps: float
    bias: bool
    temperature: float
    out_scale: float
    matmul: str = "compute"
    matmul_residuals: str = "compute"  # of products that read latents; that of rotated keys saves x
    dense: Callable[..., Dense] | None = None  # makes its other projections than `Up`, if they are not Dense
    up: Callable[..., LoRA] | None = None  # makes its up-projections, if they are not `Up` as it is
    score_cap: float = 0.0
    sinks: bool = False
    out_bias: bool = False  # of the output projection
    clips: bool = False  # take the largest logits, by which heads are clipped

    def setup(self):
        self.queries = self._query_layers()
        self.down = self._dense("d_model", "d_latent/tp")
        # Too small to gain from 8 bits. Each tp rank has only its own heads' gradient, which has another scale.
        self.k_rope = self._dense("d_model", "d_rope", matmul="compute")
        self.norm = RMSNorm(activation("d_latent/tp"), self.sizes, self.norm_eps, ATTENTION)
        heads, seq = activation("heads/tp d_head"), self._seq_of_keys
        up = self.family.into("d_latent", "heads/tp d_head"), self.family.input("d_latent", seq=seq)
        up = (*up, activation("heads/tp d_head", seq=seq))
        settings = dict(sizes=self.sizes, dtype=self.dtype, matmul=self.matmul, part=ATTENTION)
        of_latent = partial(self.up or Up, *up, **settings, at_rest="d_latent", matmul_residuals=self.matmul_residuals)
        self.up_k = of_latent()
        self.up_v = of_latent()
        kernel = self.family.back("heads/tp d_head")
        self.sink_logits = Sinks(self.sizes) if self.sinks else no_sinks
        self.largest_logits = LargestLogits(self.sizes) if self.clips else as_it_is
        settings |= dict(bias=self.out_bias, scale=self.out_scale)
        self.out = (self.dense or Dense)(kernel, heads, self.residual, **settings)

    def __call__(self, x: Array, context: Context) -> Array:
        q, latent, k_rope = self._project(x, context)
        layouts = partial(self.family.input, "d_latent"), partial(activation, "d_rope")
        moves = [f"{layout(seq=SEQ)} -> {layout(seq=self._seq_of_keys)}" for layout in layouts]
        k, v = reshard_seen([*zip(moves, (latent, k_rope))], context.mask, self._expanded)
        form, mask, scores = self.family.context, context.mask, self._scores
        sow_intermediates(self, mask, q, k, cache={"latent": latent, "k_rope": k_rope}, **scores)
        shared = dict(keys=self._seq_of_keys, kernel=self.kernel, observe=self.largest_logits)
        seen = attend_over_context(form, q, k, v, mask, **shared, **scores)
        return self.out(seen)

    def decode(self, x: Array, context: Context, cache: dict) -> tuple[Array, dict]:
        """Attend from new tokens in the latent space; also returns the cache with them. See GQA.decode."""
        q, latent, k_rope = self._project(x, context)
        latent = all_gather(f"{self.family.input('d_latent')} -> {activation('d_latent')}", latent)
        new, mask, cache = through_cache(cache, {"latent": latent, "k_rope": k_rope}, context.mask)
        q_head, q_rope = jnp.split(q, [self.sizes["d_head"]], axis=-1)
        q_latent, latent = self.up_k.absorb_query(q_head), self.up_k.as_rounded(new["latent"])
        if mask.cursor is None:
            q = jnp.concatenate([q_latent, q_rope], axis=-1)
            k = jnp.concatenate([latent, new["k_rope"]], axis=-1)[:, :, None]
            seen = attend(q, k, latent[:, :, None], mask, kernel=self.kernel, **self._scores)
        else:
            latent, k_rope = latent[:, None], new["k_rope"][:, None]
            seen = attend_to_cache([(q_latent, latent), (q_rope, k_rope)], latent, mask, **self._scores)
        return self.out(self.up_v.expand(seen)), cache

    def cache_layouts(self) -> dict[str, str]:
        """Layouts of the entries that one layer caches; they are the same on every `tp` rank."""
        return {name: activation(dim, seq="kv_seq") for name, dim in (("latent", "d_latent"), ("k_rope", "d_rope"))}

    @property
    def _seq_of_keys(self) -> str:
        """How cp shards seq of the latent before it is expanded: if the form gathers keys, the latent is gathered."""
        form = self.family.context
        return form.keys if form.queries == SEQ else SEQ

    @property
    def _scale(self) -> float:
        return self.temperature * self.sizes["d_qk"] ** -0.5

    @property
    def _scores(self) -> dict[str, Any]:
        """What becomes of scores; their scale is the factor that is left for them after `_rotated`."""
        scale = 1.0 if joins_by_adding() else self._scale
        return dict(scale=scale, cap=self.score_cap, sinks=self.sink_logits())

    def _query_layers(self) -> list[nn.Module]:
        if not self.sizes["d_latent_q"]:
            return [self._dense("d_model", "heads/tp d_qk")]
        narrow = activation("d_latent_q/tp")
        return [
            self._dense("d_model", "d_latent_q/tp"),
            RMSNorm(narrow, self.sizes, self.norm_eps, ATTENTION),
            Reshard(narrow, self.family.input("d_latent_q")),
            self._dense("d_latent_q", "heads/tp d_qk", matmul_residuals=self.matmul_residuals),
        ]

    def _dense(self, dim: str, out: str, **changes: str) -> Dense:
        kernel, x = self.family.into(dim, out), self.family.input(dim)
        bias = self.bias and "heads" in out
        settings = dict(at_rest=dim, matmul=self.matmul, part=ATTENTION) | changes
        return (self.dense or Dense)(kernel, x, activation(out), self.sizes, self.dtype, bias, **settings)

    def _project(self, x: Array, context: Context) -> tuple[Array, Array, Array]:
        """Queries with their last d_rope entries rotated, the normed latent, the rotated key part."""
        x = reshard(f"{self.residual} -> {self.family.input('d_model')}", x)
        q = of_tokens = self.queries[0].input(x, shared=True)
        for layer in self.queries:
            part = "q" if layer is self.queries[-1] else "latent"
            q = checkpoint_name(layer(q), part) if isinstance(layer, Dense) else layer(q)
        q = checkpoint_name(context.tempered(self._rotated(q, context)), "q")
        latent = self.norm(checkpoint_name(self.down(of_tokens), "latent"))
        latent = reshard(f"{activation('d_latent/tp')} -> {self.family.input('d_latent')}", latent)
        k_rope = rotate(checkpoint_name(self.k_rope(x), "latent")[:, :, None], context.rope)[:, :, 0]
        return q, latent, k_rope

    def _rotated(self, q: Array, context: Context) -> Array:
        head = self.sizes["d_head"]
        if joins_by_adding():
            # The memory layout that the kernel reads; otherwise the product has seq last and is copied. The kernel also
            # needs scaled queries, and scaling here costs nothing.
            q = with_layout_constraint(q, HEADS_BEFORE_SEQ)
            return rotate(q, context.rope, scale=self._scale)
        q_head, q_rope = jnp.split(q, [head], axis=-1)
        return jnp.concatenate([q_head, rotate(q_rope, context.rope)], axis=-1)

    def _expanded(self, latent: Array, k_rope: Array, *, places: Array | None) -> tuple[Array, Array]:
        """Keys and values of the heads, of tokens at these places of their rows."""
        latents = self.up_k.input(latent, shared=True)
        return self._keys(latents, k_rope, places), checkpoint_name(self.up_v(latents, places=places), "kv")

    def _keys(self, latent: Array | ProductInput, k_rope: Array, places: Array | None) -> Array:
        """Keys of the heads, each followed by the part that all heads share."""
        head, width = self.sizes["d_head"], k_rope.shape[-1]
        if joins_by_adding():
            # In another memory layout it would be copied before the sum, and again where it is read from a slot.
            k = with_layout_constraint(self.up_k(latent, zeros_after=width, places=places), HEADS_BEFORE_SEQ)
            k = checkpoint_name(k, "kv")
            return k + jnp.pad(k_rope[:, :, None], ((0, 0), (0, 0), (0, 0), (head, 0)))
        k = checkpoint_name(self.up_k(latent, places=places), "kv")
        return jnp.concatenate([k, jnp.broadcast_to(k_rope[:, :, None], (*k.shape[:3], width))], axis=-1)


def joins_by_adding() -> bool:
    """Whether the program being traced is for TPUs. There, parts of a head that are computed separately are best padded
    with zeros and added: that is fused with the products, while slices and concatenations are copies."""
    return platform_traced() == "tpu"


class Reshard(nn.Module):
    """A collective as a layer.

    Communication:
        forward   all_gather of x over tp if only `before` is cut over it
        backward  the transposes
    """

    before: str
    after: str

    def __call__(self, x: Array) -> Array:
        return reshard(f"{self.before} -> {self.after}", x)


def up_of(model: ModelConfig, order: str) -> Callable[..., LoRA]:
    """What makes a model's up-projections."""
    return partial(Up, model=model, order=order, stored=model.stored_base)


class Up(LoRA):
    """Projects the latent to heads, with two further products that keep decoding in the latent space.

    In these products each rank needs the whole columns of its own heads, to which an adapter is added; with 8-bit
    products it reads rounded latents there. In the projection itself an adapter sends what LoRA says.

    Communication:
        forward   as Dense
        backward  as Dense
    Communication, absorbed:
        forward   all_to_all of the kernel over tp if it is cut over d_latent;
                  all_gather of lora_a over tp if there is one, cut over d_latent
        backward  the transposes
    """

    def absorb_query(self, q: Array) -> Array:
        """Queries of the heads projected to queries of the latent, [B, S, H, R]."""
        return einsum(f"{BY_HEADS}, {UP_WHOLE} -> {BY_LATENTS}", q, self._own_heads())

    def expand(self, seen: Array) -> Array:
        """Attention outputs in the latent space, [B, S, H, R], projected to values, [B, S, H, K]."""
        return einsum(f"{BY_LATENTS}, {UP_WHOLE} -> {BY_HEADS}", seen, self._own_heads())

    def as_rounded(self, latent: Array, operand: int = INPUT) -> Array:
        """A latent, or a kernel, rounded as an 8-bit product would round it, in the compute dtype."""
        product = product_of(self.matmul) if self.matmul != COMPUTE else None
        if product is None or not product.operand:
            return latent
        weight = Layout.parse(self.weight)
        if product.known:
            amax = product.amax(self.amax)[operand]
            rounded = Operand.of(latent, product.operand, amax, fixed=product.scales == FIXED)
        elif operand == WEIGHT:
            rounded = kernel_operand(product, latent, weight, ["d_latent"])
        else:
            layout = Layout.parse(activation("d_latent", seq="kv_seq"))
            rounded = token_operand(product, latent, product.operand, layout, weight)
        return rounded.unrounded(latent.dtype).values

    def _own_heads(self) -> Array:
        kernel = self.as_rounded(self.kernel.astype(self.dtype), WEIGHT)
        if self.stored:
            kernel = (kernel.astype(jnp.float32) * self.unit[None]).astype(self.dtype)
        return self.with_adapter(reshard(f"{self.weight} -> {UP_WHOLE}", kernel), UP_WHOLE)
