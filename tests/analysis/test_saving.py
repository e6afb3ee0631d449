"""Whether a save ends before a preempted host does, by the bytes that the host writes."""

import pytest

from configs.tiny_gqa import get_config
from parallax.analysis.planned.saving import saved_bytes, saving_lines
from parallax.analysis.planned.topology import read_topology
from parallax.cli import plan
from parallax.config.settings import read_settings
from parallax.step.resolve import resolve


@pytest.fixture(scope="module")
def planned():
    """Settings of sixteen chips on four hosts, with everything but norms and counters cut over all of them."""
    config = get_config()
    config.mesh.update({"pp": 1, "dp": 16, "tp": 1})
    config.data.global_batch, config.checkpoint.deadline_secs = 16, 30
    topology = read_topology("v5p:2x2x4")
    return resolve(read_settings(config.to_dict()), topology.as_devices), topology


def test_a_host_writes_its_share_of_the_state(planned):
    whole, on_host = saved_bytes(*planned)
    assert whole / 4 < on_host < whole / 3


@pytest.mark.parametrize(
    ("step_secs", "rate_share", "said"),
    [
        (10.0, 2.0, "checkpoint.deadline_secs=30 needs 0 MB/s a host: it suffices"),
        (10.0, 0.5, "checkpoint.deadline_secs=30 is too short: it needs 0 MB/s a host, or set checkpoint.local, "),
        (10.0, 0.0, "checkpoint.deadline_secs=30 needs 0 MB/s a host; see --write-rate"),
        (31.0, 2.0, "checkpoint.deadline_secs=30 is too short: it needs a shorter step"),
    ],
)
def test_a_deadline_is_said_to_be_too_short(planned, step_secs, rate_share, said):
    needed = saved_bytes(*planned)[1] / 20 / 1e6  # in 30 s without the step
    assert [*saving_lines(*planned, step_secs, needed * rate_share)][-1].startswith(said)


@pytest.mark.parametrize("written", ["0", "-5", "fast", "1000MB/s", "nan", "inf", "1_000", "1e999"])
def test_a_rate_that_is_none_is_one_line(written, capsys):
    assert plan.main(["plan", "--config=configs/tiny_gqa.py", f"--write-rate={written}"]) == 2
    out, error = capsys.readouterr()
    assert not out and len(error.splitlines()) == 1, out + error
    assert f"--write-rate='{written}' is no rate; write how many MB/s" in error and "as --write-rate=1000" in error
