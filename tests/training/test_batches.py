"""Every process reads the rows of its own devices, wherever the mesh has put these, and no others."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from parallax.training.batches import own_rows, put_on

SHAPE = (16, 4)


class OneHost:
    """A sharding over dp as one host of several sees it: the host of each dp rank is given, two devices for each."""

    def __init__(self, hosts, host):
        self.ranks = [rank for rank, name in enumerate(hosts) if name == host]
        self.rows = SHAPE[0] // len(hosts)

    def addressable_devices_indices_map(self, shape):
        cut = {rank: (slice(rank * self.rows, (rank + 1) * self.rows), slice(None)) for rank in self.ranks}
        return {f"{rank}/{tp}": cut[rank] for rank in reversed(self.ranks) for tp in range(2)}


@pytest.mark.parametrize("hosts", [[0] * 8, [0, 0, 1, 1, 1, 1, 0, 2], [0, 1] * 4, [2, 1, 0, 0, 1, 2, 2, 0]], ids=str)
def test_hosts_own_disjoint_rows_with_gaps_where_their_ranks_have_them(hosts):
    owned = {host: own_rows(OneHost(hosts, host), SHAPE).tolist() for host in set(hosts)}
    assert owned == {h: [row for row in range(16) if hosts[row // 2] == h] for h in set(hosts)}


@pytest.mark.parametrize("host", [0, 1, 2])
def test_each_device_gets_its_rows_out_of_those_that_its_host_has_read(host, monkeypatch):
    sharding, whole = OneHost([0, 0, 1, 1, 1, 1, 0, 2], host), np.arange(64).reshape(SHAPE)

    def check(shape, sharding, piece):
        cuts = sharding.addressable_devices_indices_map(shape).values()
        return all(np.array_equal(piece(cut), whole[cut]) for cut in cuts)

    monkeypatch.setattr(jax, "make_array_from_callback", check)
    assert put_on(sharding, SHAPE)({"tokens": whole[own_rows(sharding, SHAPE)]}) == {"tokens": True}


def test_devices_in_any_order_hold_the_batch():
    devices = np.random.default_rng(0).permutation(jax.devices()).reshape(2, 4)
    sharding = NamedSharding(Mesh(devices, ("tp", "dp")), P("dp", None))
    assert own_rows(sharding, SHAPE).tolist() == list(range(16))
    batch = {"tokens": np.arange(64, dtype=np.int32).reshape(SHAPE)}
    put = put_on(sharding, SHAPE)(batch)["tokens"]
    assert put.sharding == sharding and np.array_equal(put, batch["tokens"])
