"""The ragged exchange in two levels: equal to a loop over experts, each token once to each host, results once back."""

import dataclasses
from collections import Counter
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.stand_ins import ChipMesh
from test_moe import (
    AMAXES,
    AUXILIARY,
    EXPERTS,
    HIDDEN_CUT,
    ROUTERS,
    ROWS,
    SEQ,
    SEQ_CUT,
    arrays,
    as_documented,
    check,
    check_on_mesh,
    declared,
    mixture,
    naive_ids,
    on_mesh,
    promised,
    sent,
    with_gradients,
)

from configs.base import get_config
from parallax.analysis.traced.trace import abstract_mesh
from parallax.config.sections import LayoutConfig
from parallax.config.settings import read_settings
from parallax.errors import ConfigError
from parallax.model.checks import check_exchange
from parallax.model.experts import ragged
from parallax.model.experts.exchange import EXCHANGES, SENT_AGAIN
from parallax.model.experts.moe import MoE
from parallax.model.experts.router import Router
from parallax.model.mlp import GatedMLP
from parallax.sharding.mesh import hosts_along
from parallax.step.resolve import for_inference

FORMS = ["ragged", SENT_AGAIN]


@pytest.mark.fast(2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("mesh", "hosts", "how"),
    [
        (dict(ep=4), 2, dict(router="shared")),
        (dict(ep=4), 4, dict(router="one expert")),
        (dict(ep=4), 2, dict(router="all experts", chunk_tokens=1)),
        (dict(ep=4), 2, dict(router="three, not normalised")),
        (dict(ep=4), 2, dict(router="biases", chunk_tokens=8)),
        (dict(ep=2), 2, dict(router="sigmoid")),
        (dict(ep=4, tp=2), 2, dict(router="sigmoid, groups", residual=SEQ_CUT)),
        (dict(ep=4, cp=2), 2, {}),
        (dict(dp=2, ep=2, tp=2), 2, dict(chunk_tokens=8)),
        (dict(replica=2, ep=2), 2, {}),
    ],
    ids=str,
)
def test_it_is_a_loop_over_experts(mesh, hosts, how, form):
    check_on_mesh(mesh, exchange=form, exchange_hosts=hosts, **how)


def as_accelerators(monkeypatch, *, all_to_all=as_documented, sent=3):
    """Send as accelerators do, in two rounds and further ones, of each rank at most `sent` units before these; what is
    not written is NaN."""
    monkeypatch.setattr(ragged, "platform_traced", lambda: "gpu")
    monkeypatch.setattr(ragged, "LEAST_UNITS", 1)
    monkeypatch.setattr(ragged, "usual_sent", lambda *_: sent)
    monkeypatch.setattr(lax, "ragged_all_to_all", all_to_all)
    monkeypatch.setattr(lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("mesh", "hosts", "to"),
    [(dict(ep=4), 2, (5, 2)), (dict(ep=4, tp=2), 2, (0,)), (dict(ep=4), 4, ()), (dict(dp=2, ep=2, tp=2), 2, (6, 7))],
    ids=str,
)
@pytest.mark.fast(2)
def test_what_accelerators_send_gives_the_same(mesh, hosts, to, form, monkeypatch):
    """All tokens choose these experts: hosts get all tokens or none."""

    def passes(**how):
        layer = mixture(model=ROUTERS["shared"], exchange=form, **how)
        layouts, params = declared(layer)
        params["router"]["bias"][[*to]] = 100
        return with_gradients(on_mesh(layer, layouts, mesh), params, *arrays())

    expected = passes()
    as_accelerators(monkeypatch)
    check(passes(exchange_hosts=hosts), expected)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["int8", "float8"])
def test_maxima_of_products_in_8_bits_do_not_read_what_nobody_sent(form, monkeypatch):
    def passes(**how):
        layer = mixture(matmul_of_experts=form, exchange="ragged", **how)
        layouts, params = declared(layer)
        params["experts"] |= {name: np.float32(amax) for name, amax in AMAXES.items()}
        return with_gradients(on_mesh(layer, layouts, dict(ep=4)), params, *arrays())

    def without_maxima(y, gradients, dx):
        kernels = {name: leaf for name, leaf in gradients["experts"].items() if not name.endswith("_amax")}
        return y, gradients | {"experts": kernels}, dx

    expected = passes()
    as_accelerators(monkeypatch)
    found = passes(exchange_hosts=2)
    assert all(np.isfinite(leaf).all() for leaf in found[1]["experts"].values())
    check(without_maxima(*found), without_maxima(*expected))  # maxima are of other tokens, and added up here


# ---- what is sent


@pytest.mark.parametrize("hosts", [2, 4])
@pytest.mark.fast(1)
def test_a_token_is_sent_once_to_each_other_host_of_its_experts(hosts, monkeypatch):
    """And once comes back: rows of ragged exchanges between ranks on different hosts, counted as they are sent."""
    ranks, calls = 4, []
    layer = mixture(model=ROUTERS["three, not normalised"], exchange="ragged", exchange_hosts=hosts)
    layouts, params = declared(layer)
    of_host = ranks // hosts

    def recorded(x, output, begins, sizes, *slices, axis_name, axis_index_groups):
        groups, rows = axis_index_groups or [[*range(ranks)]], x.size // len(x) // x.shape[-1]  # of a unit
        of_rank = sizes.reshape(len(groups[0]), -1).sum(axis=1)
        record = lambda me, sizes: calls.append((groups, int(me), np.asarray(sizes) * rows))  # noqa: E731
        jax.debug.callback(record, lax.axis_index(axis_name), of_rank)
        among = dict(axis_name=axis_name, axis_index_groups=axis_index_groups)
        return as_documented(x, output, begins, sizes, *slices, **among)

    as_accelerators(monkeypatch, all_to_all=recorded)
    x, _ = arrays()
    jax.block_until_ready(jax.jit(on_mesh(layer, layouts, dict(ep=ranks)))(params, x))
    jax.effects_barrier()
    rows_sent = Counter()
    for groups, me, sizes in calls:
        for rank, size in zip(next(group for group in groups if me in group), sizes.tolist()):
            rows_sent[me // of_host != rank // of_host] += size
    ids = naive_ids(params, x, layer.model)  # [ROWS, SEQ, K]; a rank has a row
    hosts_of_experts, own = ids // (EXPERTS // hosts), np.arange(ROWS) // of_host
    others = sum(len({*token} - {own[row]}) for row in range(ROWS) for token in hosts_of_experts[row])
    assert rows_sent[True] == 2 * others and others < (hosts - 1) * ROWS * SEQ
    assert others < sum((hosts_of_experts[row] != own[row]).sum() for row in range(ROWS))  # what one level sends
    assert rows_sent[False] > 0


@pytest.mark.fast(1)
@pytest.mark.parametrize("router", ["softmax", "shared"])
def test_it_sends_what_its_parts_say(router):
    layer = mixture(HIDDEN_CUT, model=ROUTERS[router], exchange="ragged", exchange_hosts=2, **AUXILIARY)
    parts = [promised(MoE), promised(EXCHANGES["ragged"], "several hosts")]
    parts += [promised(Router, **{"there is a balance loss": True})]
    parts += [promised(GatedMLP, "column_row")] if layer.model.shared_experts else []
    said = tuple(sum(counters, Counter()) for counters in zip(*parts))
    assert sent(layer, {"pp": 1, "dp": 1, "cp": 1, "ep": 4, "tp": 2}, simulated=False) == said


# ---- what is refused


def mesh_on(hosts, platform="gpu", **sizes):
    """A mesh of stand-ins for devices of another platform, each on the host of its number."""
    devices = [
        SimpleNamespace(platform=platform, device_kind="H100", process_index=host, local_hardware_id=None)
        for host in hosts
    ]
    mesh = np.empty(len(devices), object)
    mesh[:] = devices
    axes = {"pp": 1, "dp": 1} | sizes | {"tp": 1}
    return ChipMesh(mesh.reshape(tuple(axes.values())), tuple(axes))


def check_hosts(mesh, hosts, exchange="ragged"):
    ranks, platform = mesh.shape.get("ep", 1), mesh.devices.flat[0].platform if isinstance(mesh, ChipMesh) else ""
    known = hosts_along(mesh, "ep") if platform == "gpu" else None
    check_exchange(LayoutConfig(exchange=exchange, exchange_hosts=hosts), ranks, platform, known)


def refusal(mesh, hosts, exchange="ragged"):
    with pytest.raises(ConfigError) as refused:
        check_hosts(mesh, hosts, exchange)
    return str(refused.value)


def test_other_exchanges_and_numbers_of_hosts_are_refused():
    mesh = abstract_mesh({"pp": 1, "dp": 1, "ep": 8, "tp": 1})
    assert "layout.exchange='auto' does not ask for that; use exchange='ragged', or" in refusal(mesh, 2, "auto")
    assert "exchange_hosts=3 does not divide mesh.ep=8; use the number of hosts" in refusal(mesh, 3)
    for hosts, sizes in ((2, {"ep": 8}), (3, {"ep": 1}), (3, {})):
        check_hosts(abstract_mesh({"pp": 1} | sizes), hosts)


def test_inference_has_hosts_of_its_own():
    asked = read_settings(get_config(), layout={"exchange": "ragged", "exchange_hosts": 2})
    assert for_inference(asked).layout == dataclasses.replace(asked.layout, exchange_hosts=1)


def test_hosts_on_which_the_ranks_are_not_are_refused():
    four_by_two, turned = [0] * 4 + [1] * 4, [0, 1] * 4
    check_hosts(mesh_on(four_by_two, ep=8), 2)
    check_hosts(mesh_on([0, 0, 1, 1, 2, 2, 3, 3], ep=8), 4)
    assert "the mesh.ep=8 ranks are on 2 hosts; use exchange_hosts=2." in refusal(mesh_on(four_by_two, ep=8), 4)
    assert "the mesh.ep=4 ranks are on 1 host; use exchange_hosts=1." in refusal(mesh_on([0] * 4, ep=4), 2)
    assert "ranks are not in equal parts on hosts, one after the other; use exchange_hosts=1." in refusal(
        mesh_on(turned, ep=8), 2
    )
    for exchange in ("ragged", "auto"):  # nor is another exchange advised, with which it would be refused again
        assert "use exchange_hosts=1 on TPUs." in refusal(mesh_on(four_by_two, "tpu", ep=8), 2, exchange)
