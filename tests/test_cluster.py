# SPDX-License-Identifier: Apache-2.0
"""Clusters that ship with the package, and what is said of files that describe none."""

from __future__ import annotations

import pytest

from commrt.cost.cluster import Cluster, builtin_clusters
from commrt.errors import UsageError

WHOLE = """
about = "two machines under a desk"
nodes = 2
gpus_per_node = 4
reduce_gbytes_per_s = 200
code_gbytes_per_s = 1.5
[within]
latency_us = 5
gbytes_per_s = 10.5
[between]
latency_us = 50
gbytes_per_s = 1
nics = 2
[racks]
nodes = 1
oversubscription = 3.0
"""


@pytest.mark.parametrize("name", builtin_clusters())
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
    assert cluster.code_s(3e9) == cluster.add_s(3e9, coded=True) == 2.0
    assert (cluster.add_s(2e11), cluster.pack_s(1e9)) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("nodes = 2", "nodes = ", "desk is no TOML document"),
        ("nodes = 2", "node = 2", "desk: 'node' is not known: there are name, about, gpus_per_node"),
        ("nodes = 2", "nodes = 0", "desk: nodes is 0: it must be a number of at least 1"),
        ("gpus_per_node = 4", "", "desk: .*missing 1 required .*gpus_per_node"),
        ("gpus_per_node = 4", "gpus_per_node = 2.5", "gpus_per_node is 2.5: it must be a whole number"),
        ("latency_us = 5\n", 'latency_us = "5"\n', "within: latency_us is '5': it must be a number of at least 0"),
        ("gbytes_per_s = 10.5", "gbytes_per_s = 0", "within: gbytes_per_s is 0: it must be a number of at least 1e-09"),
        ("gbytes_per_s = 10.5", "gbytes_per_s = inf", "within: gbytes_per_s is inf"),
        ("gbytes_per_s = 10.5", "bandwidth = 10.5", "desk: within: 'bandwidth' is not known: there are latency_us"),
        ("per_s = 1.5", "per_s = 0", "desk: code_gbytes_per_s is 0: it must be a number of at least 1e-09"),
        ("nics = 2", "nics_per_rank = 2", "a rank cannot use 2 cards of a node that has 1"),
        ("oversubscription = 3.0", "oversubscription = 0.5", "racks: oversubscription is 0.5"),
        ("[racks]\nnodes = 1\noversubscription = 3.0", "[racks]", "desk: racks: .*missing 1 required"),
    ],
)
def test_a_description_that_cannot_be_is_refused_in_words(old, new, says):
    assert old in WHOLE
    with pytest.raises(UsageError, match=says):
        Cluster.parsed(WHOLE.replace(old, new, 1), "desk")


def test_a_part_that_is_no_table_is_refused_in_words():
    with pytest.raises(UsageError, match="desk: within must be a table of its own, not 5"):
        Cluster.parsed("within = 5\n" + WHOLE.replace("[within]", "[w]"), "desk")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere", "no cluster is called 'nowhere': there are abci, "),
        ("/nowhere.toml", "/nowhere.toml cannot be read"),
    ],
)
def test_a_cluster_that_is_not_there_is_refused_in_words(name, says):
    with pytest.raises(UsageError, match=says):
        Cluster.named(name)
