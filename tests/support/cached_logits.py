"""Logits of cached decoding, for tests: what the decoder otherwise only chooses from."""

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jax.sharding import PartitionSpec as P

from parallax.inference.decode import LOGITS_LAYOUT, Decoder, Prompts
from parallax.sharding.activations import ROWS
from parallax.sharding.collectives import after
from parallax.sharding.layout import Layout


def decoded_logits(model, params, prompts, *, prefill, chunk=1):
    """Logits [B, S, vocab] in float32, -inf for padding: the first `prefill` tokens at once, then `chunk` at a time."""
    decoder = Decoder(model.config, model.plan.rows, model.mesh)

    def local(params, prompts):
        weights, (ids_BS, empty_B) = decoder.weights(params), prompts

        def advance(caches, ids_BS, cursor):
            x, caches = decoder.advance(weights, caches, Prompts(ids_BS, empty_B), cursor)
            return decoder.on_every_stage(lambda: decoder.head(weights, x)), caches

        def step(carry, ids_BC):
            logits_BCV, caches = advance(carry[0], ids_BC, carry[1])
            return (caches, carry[1] + chunk), logits_BCV

        first_BSV, caches = advance(decoder.caches(*ids_BS.shape), ids_BS[:, :prefill], 0)
        chunks = rearrange(ids_BS[:, prefill:], "B (n C) -> n B C", C=chunk)
        _, rest = lax.scan(step, (caches, jnp.int32(prefill)), after(chunks, first_BSV))
        return jnp.concatenate([first_BSV, rearrange(rest, "n B C V -> B (n C) V")], axis=1)

    def spec(layout) -> P:
        return layout.spec(decoder.mesh)

    rows = spec(Layout.parse(ROWS))
    in_specs = (jax.tree.map(spec, decoder.layouts), Prompts(rows, rows))
    mapped = jax.shard_map(local, mesh=decoder.mesh, in_specs=in_specs, out_specs=spec(LOGITS_LAYOUT), check_vma=True)
    return jax.jit(mapped)(params, prompts)
