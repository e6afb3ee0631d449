"""Every process reads the rows and columns of its own devices, wherever the mesh has put these, and no others."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from parallax.step.batches import own_part, put_on

SHAPE = (16, 4)


class OneHost:
    """A sharding over dp and cp as one host of several sees it: the host of each rank is given, each with two."""

    def __init__(self, hosts, host, cp=1):
        self.ranks = [divmod(rank, cp) for rank, name in enumerate(hosts) if name == host]
        self.rows, self.columns = SHAPE[0] * cp // len(hosts), SHAPE[1] // cp

    def addressable_devices_indices_map(self, shape):
        def cut(index, size, whole):
            return slice(index * size, (index + 1) * size) if size < whole else slice(None)

        index = {(dp, cp): (cut(dp, self.rows, SHAPE[0]), cut(cp, self.columns, SHAPE[1])) for dp, cp in self.ranks}
        return {f"{rank}/{tp}": index[rank] for rank in reversed(self.ranks) for tp in range(2)}


@pytest.mark.parametrize("hosts", [[0] * 8, [0, 0, 1, 1, 1, 1, 0, 2], [0, 1] * 4, [2, 1, 0, 0, 1, 2, 2, 0]], ids=str)
def test_hosts_own_disjoint_rows_with_gaps_where_their_ranks_have_them(hosts):
    owned = {host: own_part(OneHost(hosts, host), SHAPE)[0].tolist() for host in set(hosts)}
    assert owned == {h: [row for row in range(16) if hosts[row // 2] == h] for h in set(hosts)}


@pytest.mark.parametrize(
    ("hosts", "columns"),
    [([0, 0, 1, 1] * 2, [range(0, 2), range(2, 4)]), ([0] * 4 + [1] * 4, [range(0, 4)] * 2), ([0, 1, 1, 2] * 2, None)],
    ids=str,
)
def test_hosts_own_columns_from_their_first_to_their_last(hosts, columns):
    owned = {host: own_part(OneHost(hosts, host, cp=4), SHAPE)[1] for host in sorted(set(hosts))}
    assert [*owned.values()] == (columns or [range(0, 1), range(1, 3), range(3, 4)])


@pytest.mark.parametrize("cp", [1, 4])
@pytest.mark.parametrize("host", [0, 1, 2])
def test_each_device_gets_its_piece_out_of_what_its_host_has_read(host, cp, monkeypatch):
    sharding, whole = OneHost([0, 0, 1, 1, 1, 1, 0, 2], host, cp), np.arange(64).reshape(SHAPE)
    rows, columns = own_part(sharding, SHAPE)

    def check(shape, sharding, piece):
        cuts = sharding.addressable_devices_indices_map(shape).values()
        return all(np.array_equal(piece(cut), whole[cut]) for cut in cuts)

    monkeypatch.setattr(jax, "make_array_from_callback", check)
    assert put_on(sharding, SHAPE)({"tokens": whole[rows][:, columns.start : columns.stop]}) == {"tokens": True}


def test_devices_in_any_order_hold_the_batch():
    devices = np.random.default_rng(0).permutation(jax.devices()).reshape(2, 4)
    sharding = NamedSharding(Mesh(devices, ("tp", "dp")), P("dp", None))
    rows, columns = own_part(sharding, SHAPE)
    assert rows.tolist() == list(range(16)) and columns == range(4)
    batch = {"tokens": np.arange(64, dtype=np.int32).reshape(SHAPE)}
    put = put_on(sharding, SHAPE)(batch)["tokens"]
    assert put.sharding == sharding and np.array_equal(put, batch["tokens"])
