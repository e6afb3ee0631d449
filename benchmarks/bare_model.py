"""A transformer and its training step in bare JAX for one device, with which benchmarks/bare.py compares Parallax.

`PLAIN` is the straightforward form. `BEST` is the fastest form known on CPUs: one product for queries, keys and values,
one for gate and up, heads before tokens in attention, and fewer arrays stored for the backward pass. Both have the
model, the loss and the update of a Parallax config with GQA and AdamW; a setting that is not read here, such as
`model.qkv_bias`, shows as a different loss.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax


class Form(NamedTuple):
    """How the same mathematics is written."""

    fuse: Callable[[dict], dict]  # weights of all layers by name -> as `attention` and `mlp` read them
    norm: Callable[[Array, Array, float], Array]
    attention: Callable[..., Array]  # (x_BSD, weights, angles_BSP, mask_BST) -> [B, S, D]
    mlp: Callable[[Array, dict], Array]


class State(NamedTuple):
    """The state between steps."""

    step: Array
    params: Any
    mean: Any  # of the gradients
    square: Any  # mean of their squares


def init_state(form: Form, theirs: dict) -> State:
    """The state before the first step, with a copy of the parameters of a Parallax model."""
    blocks, head = theirs["blocks"], theirs["head"]
    attention, mlp = ({name: part["kernel"] for name, part in blocks[of].items()} for of in ("attention", "mlp"))
    norms = {name: blocks[name]["scale"] for name in ("attention_norm", "mlp_norm")}
    params = {"table": theirs["embedding"]["table"], "blocks": form.fuse(norms | attention | mlp)}
    params |= {"head_norm": head["norm"]["scale"]} | ({"head": head["table"]} if "table" in head else {})
    params = jax.tree.map(jnp.copy, params)  # a step donates them
    mean, square = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
    return State(jnp.int32(0), params, mean, square)


def make_train_step(form: Form, settings: Any) -> Callable[[State, dict], tuple[State, dict]]:
    """`(state, batch) -> (state, metrics)`, jitted; the state is donated."""
    return jax.jit(partial(train_step, form, settings), donate_argnums=0)


def train_step(form: Form, settings: Any, state: State, batch: dict) -> tuple[State, dict]:
    """Gradients summed over microbatches, then one update."""
    tokens = (batch["labels"] >= 0).sum()
    loss_and_grads = jax.value_and_grad(lambda params, piece: loss_sum(form, settings, params, piece) / tokens)

    def add(total, piece):
        return jax.tree.map(jnp.add, total, loss_and_grads(state.params, piece)), None

    pieces = {name: x.reshape(settings.pipeline.microbatches, -1, x.shape[-1]) for name, x in batch.items()}
    zero = jnp.float32(0), jax.tree.map(jnp.zeros_like, state.params)
    (loss, grads), _ = lax.scan(add, zero, pieces)
    return adamw(settings.optimizer, settings.train.steps, state, grads), {"loss": loss}


# ---- model


def loss_sum(form: Form, settings: Any, params: dict, batch: dict) -> Array:
    """Cross-entropy, added over all tokens that have a label."""
    model, labels_BS = settings.model, batch["labels"]
    segments_BS, causal_ST = batch["segments"], jnp.tri(labels_BS.shape[1], dtype=bool)
    mask_BST = causal_ST[None] & (segments_BS[:, :, None] == segments_BS[:, None, :])
    frequencies_P = model.rope_theta ** (-jnp.arange(0, model.d_head, 2) / model.d_head)
    angles_BSP = batch["positions"][..., None] * frequencies_P[None, None]

    def block(x_BSD: Array, w: dict) -> tuple[Array, None]:
        normed = form.norm(x_BSD, w["attention_norm"], model.norm_eps)
        x_BSD += form.attention(normed, w, angles_BSP, mask_BST)
        return x_BSD + form.mlp(form.norm(x_BSD, w["mlp_norm"], model.norm_eps), w), None

    block = jax.checkpoint(block) if settings.pipeline.remat == "layer" else block
    x_BSD = params["table"].astype(model.dtype)[batch["tokens"]]
    x_BSD, _ = lax.scan(block, x_BSD, params["blocks"])
    x_BSD = rms_norm(x_BSD, params["head_norm"], model.norm_eps)
    head_VD = params.get("head", params["table"]).astype(model.dtype)
    logits_BSV = jnp.einsum("BSD,VD->BSV", x_BSD, head_VD, preferred_element_type=jnp.float32)
    label_logits_BS = jnp.take_along_axis(logits_BSV, jnp.maximum(labels_BS, 0)[..., None], axis=-1)[..., 0]
    losses_BS = jax.nn.logsumexp(logits_BSV, axis=-1) - label_logits_BS
    return jnp.where(labels_BS >= 0, losses_BS, 0).sum()


def rms_norm(x_BSD: Array, scale_D: Array, eps: float) -> Array:
    wide = x_BSD.astype(jnp.float32)
    inverse_BS1 = lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + eps)
    return (wide * inverse_BS1 * scale_D[None, None]).astype(x_BSD.dtype)


def rotate(x: Array, angles: Array) -> Array:
    """RoPE of the pairs (i, i + K/2) of the last dim."""
    left, right = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)


def product(pattern: str, x: Array, w: Array) -> Array:
    """An einsum in the dtype of the activations."""
    return jnp.einsum(pattern, x, w.astype(x.dtype))


# ---- plain


def plain_attention(x_BSD: Array, w: dict, angles_BSP: Array, mask_BST: Array) -> Array:
    q_BSHK, k_BTGK, v_BTGK = (product("BSD,DHK->BSHK", x_BSD, w[name]) for name in "qkv")
    q_BSHK, k_BTGK = (rotate(heads, angles_BSP[:, :, None]) for heads in (q_BSHK, k_BTGK))
    group = q_BSHK.shape[2] // k_BTGK.shape[2]
    k_BTHK, v_BTHK = (jnp.repeat(heads, group, axis=2) for heads in (k_BTGK, v_BTGK))
    scores_BHST = jnp.einsum("BSHK,BTHK->BHST", q_BSHK, k_BTHK, preferred_element_type=jnp.float32)
    scores_BHST *= q_BSHK.shape[-1] ** -0.5
    weights_BHST = jax.nn.softmax(jnp.where(mask_BST[:, None], scores_BHST, -jnp.inf))
    out_BSHK = jnp.einsum("BHST,BTHK->BSHK", weights_BHST.astype(x_BSD.dtype), v_BTHK)
    return product("BSHK,HKD->BSD", out_BSHK, w["out"])


def plain_mlp(x_BSD: Array, w: dict) -> Array:
    gate_BSF, up_BSF = (product("BSD,DF->BSF", x_BSD, w[name]) for name in ("gate", "up"))
    return product("BSF,FD->BSD", jax.nn.silu(gate_BSF) * up_BSF, w["down"])


PLAIN = Form(lambda weights: weights, rms_norm, plain_attention, plain_mlp)


# ---- best known


def fused(w: dict) -> dict:
    """Queries, keys and values in one product; gate and up in one."""
    rest = {name: array for name, array in w.items() if name not in ("q", "k", "v", "gate", "up")}
    qkv_LDHK = jnp.concatenate([w["q"], w["k"], w["v"]], axis=2)
    return rest | {"qkv": qkv_LDHK, "gate_up": jnp.concatenate([w["gate"], w["up"]], axis=-1)}


def best_attention(x_BSD: Array, w: dict, angles_BSP: Array, mask_BST: Array) -> Array:
    (batch, seq, _), (_, heads, width) = x_BSD.shape, w["qkv"].shape
    groups = (heads - w["out"].shape[0]) // 2
    # Rows of tokens times a matrix: a product that itself moves heads before tokens is slower.
    heads_BSHK = product("BSD,DN->BSN", x_BSD, w["qkv"].reshape(-1, heads * width)).reshape(batch, seq, heads, width)
    q_BHSK, k_BGTK, v_BGTK = jnp.split(heads_BSHK.swapaxes(1, 2), [heads - 2 * groups, heads - groups], axis=1)
    q_BHSK, k_BGTK = (jax.checkpoint(rotate)(heads, angles_BSP[:, None]) for heads in (q_BHSK, k_BGTK))
    q_BGRSK = (q_BHSK * width**-0.5).reshape(batch, groups, -1, seq, width)
    scores = jnp.einsum("BGRSK,BGTK->BGRST", q_BGRSK, k_BGTK, preferred_element_type=jnp.float32)
    weights = softmax(jnp.where(mask_BST[:, None, None], scores, -jnp.inf)).astype(x_BSD.dtype)
    out_BHSK = jnp.einsum("BGRST,BGTK->BGRSK", weights, v_BGTK).reshape(batch, -1, seq, width)
    return product("BHSK,HKD->BSD", out_BHSK, w["out"])


@jax.custom_vjp
def softmax(scores: Array) -> Array:
    """As jax.nn.softmax; the backward pass reads the result alone."""
    return jax.nn.softmax(scores)


softmax.defvjp(
    lambda scores: (jax.nn.softmax(scores),) * 2,
    lambda weights, grad: (weights * (grad - (weights * grad).sum(axis=-1, keepdims=True)),),
)


def best_mlp(x_BSD: Array, w: dict) -> Array:
    gate_BSF, up_BSF = jnp.split(product("BSD,DF->BSF", x_BSD, w["gate_up"]), 2, axis=-1)
    return product("BSF,FD->BSD", swiglu(gate_BSF, up_BSF), w["down"])


@jax.checkpoint  # stores gate and up alone
def swiglu(gate: Array, up: Array) -> Array:
    return jax.nn.silu(gate) * up


BEST = Form(fused, jax.checkpoint(rms_norm, static_argnums=2), best_attention, best_mlp)


# ---- update


def adamw(optimizer: Any, steps: int, state: State, grads: Any) -> State:
    """Clip the whole gradient, then AdamW, whose decay leaves norms out."""
    o, count = optimizer, state.step + 1
    norm = jnp.sqrt(sum((grad**2).sum() for grad in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda grad: jnp.where(norm < o.clip_norm, grad, grad / norm * o.clip_norm), grads)
    mean = jax.tree.map(lambda m, g: o.b1 * m + (1 - o.b1) * g, state.mean, grads)
    square = jax.tree.map(lambda v, g: o.b2 * v + (1 - o.b2) * g**2, state.square, grads)
    rate = learning_rate(o, steps, state.step)

    def update(path, param, m, v):
        direction = m / (1 - o.b1**count) / (jnp.sqrt(v / (1 - o.b2**count)) + o.eps)
        decay = 0 if path[-1].key.endswith("norm") else o.weight_decay
        return param - rate * (direction + decay * param)

    params = jax.tree_util.tree_map_with_path(update, state.params, mean, square)
    return State(count, params, mean, square)


def learning_rate(optimizer: Any, steps: int, step: Array) -> Array:
    """Linear warm-up, then a cosine."""
    o, top = optimizer, max(optimizer.warmup_steps - 1, 0)
    done = (step - top) / (steps - 1 - top)
    falling = o.final_ratio + (1 - o.final_ratio) * (1 + jnp.cos(jnp.pi * done)) / 2
    return o.learning_rate * jnp.where(step < top, (step + 1) / max(o.warmup_steps, 1), falling)
