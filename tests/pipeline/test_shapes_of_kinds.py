"""Kinds of layers with other heads, latents and widths of experts: the plain model's gradients on every mesh, a cache of
their own shape, and what a plan says of each."""

import numpy as np
import pytest
from support.cached_logits import decoded_logits
from support.plain_model import plain_logits
from support.tiny_model import HIDDEN_CUT, SEQ_CUT, build, make_batch, params_of
from test_choices import EXPERTS, check

from parallax.inference.decode import Prompts

GQA = dict(attention="gqa", layers=4, layers_of="(near far)*2", qkv_bias=True, out_bias=True)
GQA |= dict(
    kinds="near=(sliding_window=3, rope_theta=100.0, kv_heads=2, d_head=4) "
    "far=(heads=16, d_head=16, rope_fraction=0.5, d_ff=96)"
)
MLA = dict(attention="mla", layers=4, layers_of="(near far)*2")
MLA |= dict(kinds="near=(sliding_window=3, d_latent=8, d_rope=8) far=(heads=16, d_head=4, d_latent_q=8)")
MIXTURES = dict(attention="gqa", layers=5, layers_of="near moe dense far moe", shared_experts=1, tied=False) | EXPERTS
MIXTURES |= dict(kinds="near=(base='moe', sliding_window=3, heads=16) far=(base='moe', d_expert=32, kv_heads=8)")
MODELS = {"gqa": GQA, "mla": MLA, "mixtures": MIXTURES}
# Axes pp, dp, tp, replica, cp, ep.
AXES = {
    "pp": dict(mesh=(2, 1, 1), schedule="zero_bubble", remat="attention", layers=5, layers_of="near far*2 near*2"),
    "tp": dict(mesh=(1, 1, 4), embedding="all_to_all", remat="none"),
    "more ranks than kv_heads": dict(mesh=(1, 1, 8), tensor_parallel="scatter"),
    "dp": dict(mesh=(1, 2, 2), policy="lean", tensor_parallel="scatter", residual=HIDDEN_CUT),
    "ring": dict(mesh=(1, 1, 2, 1, 2), context="ring"),
    "ulysses": dict(mesh=(1, 1, 2, 1, 2), context="ulysses", tied=True),
    "all_gather": dict(mesh=(2, 1, 1, 1, 2), context="all_gather", schedule="one_f_one_b", remat="stage"),
    "contiguous": dict(mesh=(1, 1, 2, 1, 2), context="all_gather", order="contiguous"),
    "ep": dict(mesh=(2, 1, 2, 1, 1, 2), schedule="dualpipe_v"),
}


def test_layers_of_other_heads_give_the_plain_models_gradients():
    check(GQA | dict(layers=2, layers_of="near far"), mesh=(2, 2, 2), schedule="one_f_one_b", residual=SEQ_CUT)
