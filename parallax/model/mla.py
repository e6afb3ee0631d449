"""Multi-head latent attention (DeepSeek-V2, section 2.1), heads cut over `tp`.

Symbols of the paper: c_KV latent, W_DKV down, W_UK up_k, W_UV up_v, W_KR k_rope, W_DQ down_q, W_UQ and W_QR q.
"""

from collections.abc import Mapping

import flax.linen as nn
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from parallax.model.attention import attend, attend_over_context, sow_intermediates, update_kv_cache
from parallax.model.context import Context
from parallax.model.dense import Dense
from parallax.model.families import Family
from parallax.model.norm import RMSNorm
from parallax.model.rope import rotate
from parallax.sharding.activations import SEQ, activation
from parallax.sharding.collectives import all_gather, reshard
from parallax.sharding.einsum import einsum
from parallax.sharding.zigzag import reshard_in_order

UP_WHOLE = "d_latent heads/tp d_head"  # an up-projection's kernel, as decoding needs it


class MLA(nn.Module):
    """Keys and values from one low-rank latent a token; positions from a rotated part that all heads share.

    Training expands the latent to heads. Decoding caches `d_latent + d_rope` numbers a token and never expands:
    W_UK is absorbed into the queries, W_UV into the output.

    Where context ranks gather keys, they gather the latent, which is smaller, and expand all tokens. In the other
    forms it sends over `cp` what `attend_over_context` does.

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

    def setup(self):
        self.queries = self._query_layers()
        self.down = self._dense("d_model", "d_latent/tp")
        self.k_rope = self._dense("d_model", "d_rope")
        self.norm = RMSNorm(activation("d_latent/tp"), self.sizes, self.norm_eps)
        heads, seq = activation("heads/tp d_head"), self._seq_of_keys
        up = self.family.into("d_latent", "heads/tp d_head"), self.family.input("d_latent", seq=seq)
        up = (*up, activation("heads/tp d_head", seq=seq))
        self.up_k = Up(*up, self.sizes, self.dtype, at_rest="d_latent")
        self.up_v = Up(*up, self.sizes, self.dtype, at_rest="d_latent")
        kernel = self.family.back("heads/tp d_head")
        self.out = Dense(kernel, heads, self.residual, self.sizes, self.dtype, scale=self.out_scale)

    def __call__(self, x: Array, context: Context) -> Array:
        q, latent, k_rope = self._project(x, context)
        of_tokens, of_keys = (self.family.input("d_latent", seq=seq) for seq in (SEQ, self._seq_of_keys))
        latent = reshard_in_order(f"{of_tokens} -> {of_keys}", latent)
        of_tokens, of_keys = (activation("d_rope", seq=seq) for seq in (SEQ, self._seq_of_keys))
        k_rope = reshard_in_order(f"{of_tokens} -> {of_keys}", k_rope)
        k, v = (checkpoint_name(up(latent), "attention") for up in (self.up_k, self.up_v))
        shared = jnp.broadcast_to(k_rope[:, :, None], (*k.shape[:3], k_rope.shape[-1]))
        k = jnp.concatenate([k, shared], axis=-1)
        sow_intermediates(self, context, q, k, scale=self._scale, cache={"latent": latent, "k_rope": k_rope})
        how = dict(keys=self._seq_of_keys, scale=self._scale, kernel=self.kernel)
        return self.out(attend_over_context(self.family.context, q, k, v, context, **how))

    def decode(self, x: Array, context: Context, cache: dict) -> tuple[Array, dict]:
        """Attend from new tokens inside the latent space; returns the longer cache too."""
        q, latent, k_rope = self._project(x, context)
        latent = all_gather(f"{self.family.input('d_latent')} -> {activation('d_latent')}", latent)
        cache = {
            "latent": update_kv_cache(cache["latent"], latent, context),
            "k_rope": update_kv_cache(cache["k_rope"], k_rope, context),
        }
        q_head, q_rope = jnp.split(q, [self.sizes["d_head"]], axis=-1)
        absorbed = self.up_k.absorb_query(q_head)
        q = jnp.concatenate([absorbed, q_rope], axis=-1)
        k = jnp.concatenate([cache["latent"], cache["k_rope"]], axis=-1)[:, :, None]
        seen = attend(q, k, cache["latent"][:, :, None], context, scale=self._scale, kernel=self.kernel)
        return self.out(self.up_v.expand(seen)), cache

    def cache_layouts(self) -> dict[str, str]:
        """The layouts of what one layer caches; the same on every `tp` rank."""
        return {name: activation(dim, seq="kv_seq") for name, dim in (("latent", "d_latent"), ("k_rope", "d_rope"))}

    @property
    def _seq_of_keys(self) -> str:
        """How cp cuts seq of what heads are expanded from: where keys are gathered, the latent is, which is smaller."""
        form = self.family.context
        return form.keys if form.queries == SEQ else SEQ

    @property
    def _scale(self) -> float:
        return self.temperature * self.sizes["d_qk"] ** -0.5

    def _query_layers(self) -> list[nn.Module]:
        if not self.sizes["d_latent_q"]:
            return [self._dense("d_model", "heads/tp d_qk")]
        narrow = activation("d_latent_q/tp")
        return [
            self._dense("d_model", "d_latent_q/tp"),
            RMSNorm(narrow, self.sizes, self.norm_eps),
            Reshard(narrow, self.family.input("d_latent_q")),
            self._dense("d_latent_q", "heads/tp d_qk"),
        ]

    def _dense(self, dim: str, out: str) -> Dense:
        kernel, x = self.family.into(dim, out), self.family.input(dim)
        bias = self.bias and "heads" in out
        return Dense(kernel, x, activation(out), self.sizes, self.dtype, bias, at_rest=dim)

    def _project(self, x: Array, context: Context) -> tuple[Array, Array, Array]:
        """Queries with their last d_rope entries rotated, the normed latent, the rotated key part."""
        x = reshard(f"{self.residual} -> {self.family.input('d_model')}", x)
        q = x
        for layer in self.queries:
            q = checkpoint_name(layer(q), "attention") if isinstance(layer, Dense) else layer(q)
        q_head, q_rope = jnp.split(q, [self.sizes["d_head"]], axis=-1)
        q = checkpoint_name(jnp.concatenate([q_head, rotate(q_rope, context.rope)], axis=-1), "attention")
        latent = self.norm(checkpoint_name(self.down(x), "attention"))
        latent = reshard(f"{activation('d_latent/tp')} -> {self.family.input('d_latent')}", latent)
        k_rope = rotate(checkpoint_name(self.k_rope(x), "attention")[:, :, None], context.rope)[:, :, 0]
        return q, latent, k_rope


class Reshard(nn.Module):
    """A collective as a layer of a chain.

    Communication:
        forward   all_gather of x over tp if only `before` is cut over it
        backward  the transposes
    """

    before: str
    after: str

    def __call__(self, x: Array) -> Array:
        return reshard(f"{self.before} -> {self.after}", x)


class Up(Dense):
    """From the latent to heads, and the two products that let decoding stay in the latent space.

    Absorbed, each rank needs its own heads' whole columns of the kernel.

    Communication:
        forward   as Dense
        backward  as Dense
    Communication, absorbed:
        forward   all_to_all of the kernel over tp if it is cut over d_latent
        backward  the transposes
    """

    def absorb_query(self, q: Array) -> Array:
        """Queries of the heads turned into queries of the latent, [B, S, H, R]."""
        heads, latents = activation("heads/tp d_head"), activation("heads/tp d_latent")
        return einsum(f"{heads}, {UP_WHOLE} -> {latents}", q, self._own_heads())

    def expand(self, seen: Array) -> Array:
        """What each head saw of the latents, [B, S, H, R], turned into its values, [B, S, H, K]."""
        heads, latents = activation("heads/tp d_head"), activation("heads/tp d_latent")
        return einsum(f"{latents}, {UP_WHOLE} -> {heads}", seen, self._own_heads())

    def _own_heads(self) -> Array:
        return reshard(f"{self.weight} -> {UP_WHOLE}", self.kernel.astype(self.dtype))
