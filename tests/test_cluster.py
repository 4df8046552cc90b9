# SPDX-License-Identifier: Apache-2.0
"""Clusters that ship with the package or were probed, and what is said of files that describe none."""

import os
import re
from dataclasses import replace
from importlib.metadata import version

import pytest
from cases import for_each
from commands import told
from forked_commands import command
from hypothesis import given
from hypothesis import strategies as st

from commrt import files
from commrt.errors import UsageError
from commrt.pricing.cluster import Cluster, builtin_clusters
from commrt.testing.ranks import run_ranks
from commrt.tools.commands.recorded_times import read_times
from commrt.tools.measuring import probing
from commrt.tools.measuring.probing import fit_line, probe, ranks_per_host, ring_shift
from commrt.tools.pictures.timelines import read_spans
from commrt.tools.planning.efficiency import efficiency_at
from commrt.tools.planning.workload import Workload

WHOLE = """
about = 'two "machines" under a desk'
nodes = 2
gpus_per_node = 4
reduce_gbytes_per_s = 200
code_gbytes_per_s = 1.5
message_us = 9.5
group_us = 0.7
[within]
latency_us = 5
gbytes_per_s = 10.5
bus_gbytes_per_s = 30
[between]
latency_us = 50
gbytes_per_s = 1
nics = 2
nics_per_rank = 2
[racks]
nodes = 1
oversubscription = 3.0
[kernel_efficiency]
64 = 1.0
4 = 0.8
"""


@for_each("name", builtin_clusters())
def test_every_shipped_cluster_says_where_its_figures_come_from(name):
    cluster = Cluster.named(name)
    assert cluster.name == name
    assert len(cluster.about) > 60


def test_a_file_of_ones_own_is_a_cluster(tmp_path):
    path = tmp_path / "desk.toml"
    path.write_text(WHOLE)
    cluster = Cluster.named(str(path))
    assert (cluster.name, cluster.nodes, cluster.within.gbytes_per_s) == ("desk", 2, 10.5)
    assert cluster.node_bytes_per_s == 2e9
    assert cluster.rack_bytes_per_s == pytest.approx(2e9 / 3)
    assert cluster.ranks() == 8
    assert (cluster.add_s(2e11), cluster.code_gbytes_per_s, cluster.pack_gbytes_per_s) == (1.0, 1.5, None)
    assert [*cluster.kernel_efficiency.items()] == [(4, 0.8), (64, 1.0)]
    assert Cluster.parsed(cluster.text(), "desk") == cluster


@for_each(
    ("old", "new", "says"),
    [
        ("nodes = 2", "nodes = ", "desk is no TOML document"),
        ("nodes = 2", "node = 2", "desk: 'node' is not known: there are name, about, gpus_per_node"),
        ("nodes = 2", "nodes = 0", "desk: nodes is 0: it must be a number of at least 1"),
        ("gpus_per_node = 4", "", "desk has no gpus_per_node: add it"),
        ("gpus_per_node = 4", "gpus_per_node = 2.5", "gpus_per_node is 2.5: it must be a whole number"),
        ("latency_us = 5\n", 'latency_us = "5"\n', "within: latency_us is '5': it must be a number of at least 0"),
        ("gbytes_per_s = 10.5", "gbytes_per_s = 0", "within: gbytes_per_s is 0: it must be a number of at least 1e-09"),
        ("gbytes_per_s = 10.5", "gbytes_per_s = inf", "within: gbytes_per_s is inf"),
        ("per_s = 1.5", "per_s = 0", "desk: code_gbytes_per_s is 0: it must be a number of at least 1e-09"),
        ("nics = 2\n", "", "a rank cannot use 2 cards of a node that has 1"),
        ("oversubscription = 3.0", "oversubscription = 0.5", "racks: oversubscription is 0.5"),
        ("4 = 0.8", "4 = 0", "kernel_efficiency of 4 samples is 0"),
        ("4 = 0.8", "4 = 1.01", "kernel_efficiency of 4 samples is 1.01: it must be a number above 0 and up to 1"),
        ("4 = 0.8", "4 = true", "kernel_efficiency of 4 samples is True"),
        ("4 = 0.8", "0 = 0.8", "kernel_efficiency has the key '0': give whole numbers of samples per rank, from 1 on"),
        ("[within]", "within = 5\n[w]", "desk: within must be a table of its own, not 5"),
    ],
)
def test_a_description_that_cannot_be_is_refused_in_words(old, new, says):
    assert old in WHOLE
    with pytest.raises(UsageError, match=says):
        Cluster.parsed(WHOLE.replace(old, new, 1), "desk")


def test_kernels_always_reach_full_speed_if_nothing_is_said_of_them_but_not_without_samples():
    assert efficiency_at(Cluster.named("abci"), 1) == 1.0
    with pytest.raises(UsageError, match="0 samples per rank: give at least 1"):
        efficiency_at(Cluster.parsed(WHOLE, "desk"), 0)


@for_each(
    ("part", "value", "says"),
    [
        ("racks", 5, "racks is 5: it must be a Racks"),
        ("gpus_per_node", None, "gpus_per_node is None: it must be a number"),
        ("compute", {"resnet50": "fast"}, "compute of resnet50 is 'fast': it must be a number"),
        ("kernel_efficiency", {"4": 0.8, 4: 0.9}, "kernel_efficiency of 4 samples is given twice"),
    ],
)
def test_a_part_that_cannot_be_is_refused_in_words(part, value, says):
    with pytest.raises(UsageError, match=says):
        replace(Cluster.parsed(WHOLE, "desk"), **{part: value})


def test_a_step_of_few_samples_computes_at_the_speed_of_its_kernels(tmp_path):
    (tmp_path / "desk.toml").write_text(f"{WHOLE}[compute]\nresnet50 = 100\n")
    for batch, rate in ((4, 80), (64, 100)):
        line = f"simulate step ring --ranks 8 --model resnet50 --batch {batch} --cluster"
        record = told(line, tmp_path / "desk.toml")
        assert record["images_per_second"] == pytest.approx(8 * rate * record["exchanges"][1]["efficiency"])


@for_each(
    ("name", "why"),
    [
        ("none.toml", "No such file"),
        ("bytes.toml", "codec can't decode"),
        ("fifo.toml", "no regular file"),  # without a writer
        ("zero.toml", "no regular file"),
        ("large.toml", "larger than 1,000 bytes"),
    ],
)
@for_each("read", [Cluster.named, Workload.read, read_times, read_spans])
def test_a_file_that_cannot_be_read_is_refused_in_words(name, why, read, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_NBYTES", 1000)
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x80")
    (tmp_path / "large.toml").write_bytes(b" " * 1001)
    if not (tmp_path / "zero.toml").exists():
        os.mkfifo(tmp_path / "fifo.toml")
        (tmp_path / "zero.toml").symlink_to("/dev/zero")
    with pytest.raises(UsageError, match=f"cannot be read: .*{why}"):
        read(f"{tmp_path}/{name}")


# ``commrt probe``: who gives to whom, and that what was measured is a cluster to plan with.


@for_each("hosts", ["aab", "abab", "abba", "aabbb"])
def test_ranks_that_do_not_fill_one_host_after_the_other_are_told_how_they_lie(hosts):
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


@pytest.mark.slow
def test_probe_writes_a_file_to_simulate_with(tmp_path):
    path = tmp_path / "here.toml"
    done = command("probe", "--workers", "2", "--out", path)
    assert done.returncode == 0, done.stderr
    assert "GB/s inside a host" in done.stdout
    cluster = Cluster.named(str(path))
    assert cluster.gpus_per_node == 2
    assert re.search(
        rf"On 20..-..-.. \(UTC\), from \S+, with commrt \S+ and torch {re.escape(version('torch'))}", cluster.about
    )
    assert len(f"{cluster.within.latency_us:g}".replace(".", "").strip("0")) <= 3
