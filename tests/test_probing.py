# SPDX-License-Identifier: Apache-2.0
"""``commrt probe``: who gives to whom, and that what was measured is a cluster to plan with."""

from __future__ import annotations

import re

import pytest
import torch
from cases import for_each
from forked_commands import command
from hypothesis import given
from hypothesis import strategies as st

from commrt.errors import UsageError
from commrt.pricing.cluster import Cluster
from commrt.testing.ranks import run_ranks
from commrt.tools.measuring import probing
from commrt.tools.measuring.probing import fit_line, probe, ranks_per_host, ring_shift


@for_each("hosts", ["aab", "abab", "abba", "aabbb"])
def test_ranks_that_do_not_fill_one_host_after_the_other_are_told_how_they_lie(hosts):
    assert [ranks_per_host(list(layout)) for layout in ("aaaa", "aabb", "abc")] == [4, 2, 1]
    with pytest.raises(UsageError, match=r"ranks lie on hosts as \[0, "):
        ranks_per_host(list(hosts))


@for_each("circles", [[(0, 1)], [(0, 1, 2)], [(0, 2), (1, 3)], [(4, 1, 3, 2, 0)], [(0, 1, 2), (5, 4, 3)]])
def test_in_a_turn_each_rank_of_a_circle_sends_and_receives_once_and_not_the_same_chunk(circles):
    (step,) = ring_shift(circles, 6).steps()
    members = sorted(rank for circle in circles for rank in circle)
    assert sorted(step.src.tolist()) == sorted(step.dst.tolist()) == members
    sent, received = dict(zip(step.src, step.lo, strict=True)), dict(zip(step.dst, step.lo, strict=True))
    assert all(sent[rank] != received[rank] for rank in members)


@given(st.floats(1e-6, 1e-2), st.floats(1e6, 1e11))
def test_times_that_lie_on_a_line_are_that_line(latency_s, bytes_per_s):
    sizes = [1 << power for power in (10, 14, 18, 22)]
    found = fit_line(sizes, [latency_s + nbytes / bytes_per_s for nbytes in sizes])
    assert found.bytes_per_s == pytest.approx(bytes_per_s, rel=1e-4)
    assert found.latency_s == pytest.approx(latency_s, rel=1e-4, abs=1e-4 * sizes[0] / bytes_per_s)


@for_each("times_s", [[0.1, 1.0, 11.0], [1.0, 0.5, 0.1]])
def test_times_that_no_link_can_have_give_no_negative_latency_and_no_endless_rate(times_s):
    found = fit_line([1, 10, 100], times_s)
    assert found.latency_s >= 0
    assert found.bytes_per_s > 0


def test_what_is_measured_is_the_same_on_every_rank_and_can_be_planned_with(monkeypatch):
    monkeypatch.setattr(probing, "host_identity", lambda: "here")
    clusters = run_ranks(4, probe)
    assert clusters == clusters[:1] * 4
    assert (clusters[0].gpus_per_node, clusters[0].nodes) == (4, 1)
    again = Cluster.parsed(clusters[0].text(), "probed")
    assert again == clusters[0]
    assert 0.01 < again.code_gbytes_per_s < 1e4
    assert 0.01 < again.reduce_gbytes_per_s < 1e4


def test_hosts_of_their_own_are_joined_by_a_network(monkeypatch):
    monkeypatch.setattr(probing, "_hosts", lambda world: [f"host {rank}" for rank in range(world.size)])
    cluster = run_ranks(3, probe)[0]
    assert (cluster.gpus_per_node, cluster.nodes, cluster.between.nics) == (1, None, 1)


@pytest.mark.processes
def test_probe_writes_a_file_to_simulate_with(tmp_path):
    path = tmp_path / "here.toml"
    done = command("probe", "--workers", "2", "--out", path)
    assert done.returncode == 0, done.stderr
    assert "GB/s inside a host" in done.stdout
    cluster = Cluster.named(str(path))
    assert cluster.gpus_per_node == 2
    assert re.search(
        rf"On 20..-..-.. \(UTC\), from \S+, with commrt \S+ and torch {re.escape(torch.__version__)}", cluster.about
    )
    assert len(f"{cluster.within.latency_us:g}".replace(".", "").strip("0")) <= 3
