"""What the model's loss is, written plainly: no mesh, no executor, no chunks, no sorted tokens; and its gradient by
jax.grad."""

import contextlib
import copy
import functools
import zlib
from typing import NamedTuple
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from parallax.config.sections import CLAMPED, LossConfig, ModelConfig
from parallax.model import attention
from parallax.model.batch import IGNORED
from parallax.model.context import Context, tables_of_layers
from parallax.model.dropout import Dropout
from parallax.model.embedding import EMBEDDINGS
from parallax.model.families import FAMILIES
from parallax.model.lora import noise_of
from parallax.model.mlp import GatedMLP
from parallax.model.transformer import Block, Parts
from parallax.sharding.activations import ROWS, activation
from parallax.sharding.layers_on_ranks import Arrangement

MARGIN = 3e-6  # of the closest choice in a batch; float32 rounds scores by some 1e-7, and what is clamped by up to 6e-7


class Notes(NamedTuple):
    """What a layer has besides its output; of a dense one nothing."""

    losses: jax.Array | float  # of a mixture, with their coefficients
    load_E: jax.Array  # how many tokens each expert got
    margin: jax.Array | float  # of the closest choice: of an expert by score, of a clamp by distance to its limit


class PlainMixture(nn.Module):
    """Every expert computes all tokens, and most results count nothing. A token that may not choose a group's experts
    has -inf for their scores."""

    model: ModelConfig
    loss: LossConfig

    def __call__(self, x, row_weight):
        del row_weight
        m, params = self.model, self.variables["params"]
        shift = params["router"]["shift"][None, None] if m.router_shift else 0
        logits_BSE = x @ params["router"]["kernel"] + shift
        scores_BSE = jax.nn.sigmoid(logits_BSE) if m.router_score == "sigmoid" else jax.nn.softmax(logits_BSE)
        chosen_BSE, margin = plain_choice(m, scores_BSE + params["router"]["bias"].reshape(1, 1, -1))
        weights_BSE = scores_BSE * chosen_BSE
        if m.router_normalized:
            weights_BSE /= weights_BSE.sum(axis=-1, keepdims=True)
        limit = m.expert_limit if m.expert_activation == "clamped" else None
        held = dict(params["experts"]) | {"down_bias": params.get("down_bias")}

        def with_expert(y, expert):
            weight_BS1 = jnp.take(weights_BSE, expert, axis=-1)[..., None]
            result, margin_BS = self.of_expert(held, x, expert, limit)
            return y + weight_BS1 * result, jnp.where(weight_BS1[..., 0] > 0, margin_BS, jnp.inf).min()

        # A loop, of which one expert is compiled and not each.
        y, margins_E = jax.lax.scan(with_expert, jnp.zeros_like(x), jnp.arange(m.experts))
        y, margin = m.router_scale * y, jnp.minimum(margin, margins_E.min())
        if m.shared_experts:
            gate = jax.nn.sigmoid(x @ params["shared_gate"]) if m.shared_gate else 1
            products = [functools.partial(self.shared_product, name) for name in ("gate", "up", "down")]
            limit = m.activation_limit if m.activation == "clamped" else None
            result, margin_BS = plain_mlp(x, products, limit, PLAIN_ACTIVATIONS.get(m.activation))
            y, margin = y + gate * result, jnp.minimum(margin, margin_BS.min())
        share_BE = chosen_BSE.mean(axis=1) / m.experts_per_token
        mean_BE = (scores_BSE / scores_BSE.sum(axis=-1, keepdims=True)).mean(axis=1)
        balance = (m.experts * share_BE * mean_BE).sum(axis=-1).mean()
        z = (jax.nn.logsumexp(logits_BSE, axis=-1) ** 2).mean()
        losses = self.loss.balance_coefficient * balance + self.loss.router_z_coefficient * z
        self.sow("notes", "mixture", Notes(losses, chosen_BSE.sum(axis=(0, 1)), margin))
        return y

    def of_expert(self, held, x, expert, limit):
        """What one expert makes of all tokens, and margins [B, S]."""

        def product(name, x):
            kernel = held[name][expert]
            if f"{name}_lora_a" in held:
                kernel += self.factor * held[f"{name}_lora_a"][expert] @ held[f"{name}_lora_b"][expert]
            return x @ kernel + (held[f"{name}_bias"][expert][None, None] if self.model.expert_bias else 0)

        return plain_mlp(x, [functools.partial(product, name) for name in ("gate", "up", "down")], limit)

    def shared_product(self, name, x):
        """A product of the shared experts; its adapter reads x with entries dropped."""
        path, held = f"mlp/shared/{name}", self.variables["params"]["shared"][name]
        y, noise = x @ held["kernel"], self.scope.root
        if "lora_a" not in held:
            return y
        if noise.has_variable("noise", "key"):
            site = zlib.crc32(path.encode()) >> 1
            drop = Dropout("batch seq d_model", {"d_model": x.shape[-1]}, self.model.lora_dropout, site, parent=None)
            x = drop.apply({}, x, *(noise.get_variable("noise", each) for each in ("rows", "key")))
        return y + self.factor * (x @ held["lora_a"]) @ held["lora_b"]

    @property
    def factor(self):
        return self.model.lora_alpha / self.model.lora_rank


def plain_choice(model, scores_BSE):
    """Which experts a token goes to, 1 or 0 for each, and by how much the closest choice was made."""
    margins, size = [jnp.inf], model.experts // model.router_groups
    if model.router_groups > 1:
        groups_BSGE = scores_BSE.reshape(*scores_BSE.shape[:2], -1, size)
        counting = 2 if model.router_score == "sigmoid" else 1
        worth_BSG = jnp.sort(groups_BSGE, axis=-1)[..., -counting:].sum(axis=-1)
        is_chosen_BSG, margin = best(worth_BSG, model.router_groups_chosen)
        scores_BSE = jnp.where(jnp.repeat(is_chosen_BSG, size, axis=-1) > 0, scores_BSE, -jnp.inf)
        margins.append(margin)
    chosen_BSE, margin = best(scores_BSE, model.experts_per_token)
    return chosen_BSE, jnp.stack([*margins, margin]).min()


def best(scores, count):
    """1 for the `count` best of the last dim, of equal ones the first; and their margin to the others."""
    order = jnp.argsort(-scores, axis=-1, stable=True)
    rank = jnp.argsort(order, axis=-1)
    best_first = jnp.take_along_axis(scores, order, axis=-1)
    margins = best_first[..., count - 1 : count] - best_first[..., count : count + 1]
    return (rank < count) * jnp.float32(1), margins.min(initial=jnp.inf)


PLAIN_ACTIVATIONS = {"silu": jax.nn.silu, "relu2": lambda x: jnp.maximum(x, 0) ** 2}
PLAIN_ACTIVATIONS |= {"gelu": functools.partial(jax.nn.gelu, approximate=False), "gelu_tanh": jax.nn.gelu}


def plain_mlp(x, products, limit=None, activation=jax.nn.silu):
    """The MLP of x [B, S, D], and how near each token's values come to a limit [B, S]."""
    gate, up, down = products
    gated, wide = gate(x), up(x)
    if limit:
        margin_BS = jnp.minimum(abs(gated - limit), abs(abs(wide) - limit)).min(axis=-1)
        gated, wide = jnp.minimum(gated, limit), jnp.clip(wide, -limit, limit)
        return down(gated * jax.nn.sigmoid(1.702 * gated) * (wide + 1)), margin_BS
    return down(activation(gated) * wide), jnp.full(x.shape[:2], jnp.inf)


def note_limits(call, args, kwargs, context):
    """Of what a dense layer clamps: how near a value comes to the limit."""
    result, mlp, name = call(*args, **kwargs), context.module.parent, context.module.name
    is_product = context.method_name == "__call__" and name in ("gate", "up")
    if is_product and isinstance(mlp, GatedMLP) and mlp.activation == CLAMPED:
        mlp.sow("notes", "margins", abs((result if name == "gate" else abs(result)) - mlp.limit).min())
    return result


class PlainBlock(Block):
    """A layer whose mixture is the plain one."""

    def _mixture(self):
        return PlainMixture(self._shaped, self.loss)


def plain_parts(model, loss=None):
    """The model's modules for one device; with no axis bound, the strings cut nothing."""
    family, form = FAMILIES["column_row"], EMBEDDINGS["vocab_parallel"]
    parts = Parts.build(model, activation("d_model/tp"), family, form, 1, ROWS, loss=loss or LossConfig())
    plain = {
        kind: PlainBlock(model, block.residual, block.family, block.kv, kind, block.loss)
        for kind, block in parts.blocks.items()
    }
    return parts._replace(blocks=plain)


def plain_attend(q, k, v, mask, *, scale, kernel, cap=0.0, sinks=None):
    """A softmax over whole rows of scores; a sink is one more score of each head."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = scale * jnp.einsum("BSHJ,BTHJ->BHST", q, k)
    scores = jnp.where(mask.dense(q.shape[1]), cap * jnp.tanh(scores / cap) if cap else scores, -jnp.inf)
    if sinks is not None:
        more = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, more], axis=-1)
    return jnp.einsum("BHST,BTHK->BSHK", jax.nn.softmax(scores, axis=-1)[..., : k.shape[1]], v)


def plain_logits(model, params, batch):
    """Logits of a batch [B, S] in float32."""
    return jax.jit(lambda params, batch: plain_forward(model, params, batch)[0])(params, batch)


def plain_forward(model, params, batch, loss=None, key=None):
    """(logits, the Notes of all layers). `key` is a step's, of dropout."""
    parts, rows = plain_parts(model, loss), jnp.arange(len(batch["tokens"]))
    tables = tables_of_layers(model, batch["positions"], batch["positions"].shape[1])
    context = Context.of_model(model, tables, rows, None, batch["segments"])
    x = parts.embedding.apply({"params": params["embedding"]}, batch["tokens"], rows, None)

    def layer(kind, weights, state, context, _):
        x, number = state
        if key is not None:
            context = context._replace(key=jax.random.fold_in(key, 1 + number))
        with nn.intercept_methods(note_limits):
            x, notes = parts.blocks[kind].apply({"params": weights} | noise_of(context), x, context, mutable="notes")
        of_mlp = notes.get("notes", {}).get("mlp", {})
        margins = jnp.stack([jnp.float32(jnp.inf), *of_mlp.get("margins", ())])
        none = Notes(jnp.float32(0), jnp.zeros(model.experts, jnp.float32), margins.min())
        return (x, number + 1), of_mlp["mixture"][0] if model.base_of(kind) == "moe" else none

    order = Arrangement((0,), model.layer_kinds)
    with mock.patch.object(attention, "attend", plain_attend):  # which knows no blocks, and has jax.grad's gradient
        places = order.kinds_in_places[:, 0], order.numbers[0]
        (x, _), notes = parts.scan(layer, (x, jnp.int32(0)), params["blocks"], context, None, *places)
    hidden = parts.head.apply({"params": params["head"]}, x)
    table = params["embedding" if model.tied else "head"]["table"]
    logits = model.logit_scale * jnp.einsum("BSD,VD->BSV", hidden, table, preferred_element_type=jnp.float32)
    return model.logit_cap * jnp.tanh(logits / model.logit_cap) if model.logit_cap else logits, notes


def plain_losses(model, params, batch, z_coefficient):
    """(cross-entropy, z-loss), each the mean over the labels that are not ignored."""
    return losses_of(plain_logits(model, params, batch), batch["labels"], z_coefficient)


def losses_of(logits, labels, z_coefficient):
    logsumexp = jax.nn.logsumexp(logits, axis=-1)
    label_logits = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    real = labels != IGNORED
    mean = lambda losses: jnp.sum(losses * real) / jnp.sum(real)  # noqa: E731
    return mean(logsumexp - label_logits), mean(z_coefficient * logsumexp**2)


def plain_losses_and_grad(model, params, batch, z_coefficient=0.0, loss=None, key=None):
    """Both losses, and the gradient of their sum and of the mixtures' losses, which `loss`, a LossConfig, weighs, in
    float64. As the gradient of a router's bias, the load of its experts.

    So that a tolerance holds one rounding, the tested one. With two rows a microbatch XLA multiplies in small loops
    that add in order, on one device as on eight: the gradient of MLA's `up_k`, what is left of a softmax's
    cancellation, is then 7e-6 from these, the plain model's in float32 4e-6, and the two up to 1.07e-5 apart.
    """

    def total(params, batch):
        logits, notes = plain_forward(exact, params, batch, loss, key)
        losses = losses_of(logits, batch["labels"], z_coefficient)
        return sum(losses) + notes.losses.sum(), (losses, notes.load_E)

    exact, params, batch = in_float64(model), jax.tree.map(np.float64, params), jax.tree.map(np.asarray, batch)
    with float64():
        (_, (losses, load)), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(params, batch)
        assert {leaf.dtype for leaf in jax.tree.leaves((losses, grads))} == {np.dtype("float64")}
        losses, load, grads = jax.tree.map(np.asarray, (losses, load, grads))
    is_moe = np.equal(model.layer_kinds, "moe")
    if is_moe.any():
        mixtures = grads["blocks"] if is_moe.all() else grads["blocks"]["moe"]
        assert not mixtures["mlp"]["router"]["bias"].any()
        mixtures["mlp"]["router"]["bias"] = load[is_moe]
    return losses, grads


def closest_choices(model, params, batches):
    """Of each batch the least of its notes' margins, in float64: by how much the closest choice was made."""
    exact, params = in_float64(model), jax.tree.map(np.float64, params)
    with float64():
        closest = jax.jit(lambda params, batch: plain_forward(exact, params, batch)[1].margin.min())
        for batch in batches:
            yield float(closest(params, batch))


def without_close_choices(model, params, batches):
    """The first batch in which no choice of experts, and no clamp, is so close that rounding could change it: there
    the gradient jumps."""
    for batch, margin in zip(batches, closest_choices(model, params, batches)):
        if margin > MARGIN:
            return batch
    raise AssertionError("each batch has a close choice")


def in_float64(model):
    """A model's config with a dtype that a config refuses."""
    exact = copy.copy(model)
    object.__setattr__(exact, "dtype", "float64")
    return exact


@contextlib.contextmanager
def float64():
    with jax.enable_x64(True), mock.patch.object(jnp, "float32", jnp.float64):  # layers and softmax name float32
        yield
