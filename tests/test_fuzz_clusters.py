# SPDX-License-Identifier: Apache-2.0
"""Whatever is in a cluster's file: a cluster, or one sentence."""

from __future__ import annotations

from math import inf, isfinite
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from cases import for_each
from fuzzing import FILES, VALUES, cases, met
from hypothesis import example, given
from hypothesis import strategies as st

from commrt.algorithms.ring import Ring
from commrt.errors import UsageError
from commrt.pricing.cluster import Between, Cluster, Link, Racks
from commrt.pricing.price import Pricing
from commrt.tools.planning.bounds import all_reduce_bound_s
from commrt.tools.planning.timeline import efficiency_at

KEYS = [
    "name", "about", "gpus_per_node", "nodes", "within", "between", "racks", "reduce_gbytes_per_s",
    "pack_gbytes_per_s", "code_gbytes_per_s", "compute", "kernel_efficiency", "4", "latency_us", "gbytes_per_s",
    "nics", "nics_per_rank", "oversubscription", "unknown", "self", "class",
]  # fmt: skip
LITERALS = st.sampled_from(
    [
        "1", "0", "-1", "2", "4", "1.5", "nan", "inf", "-inf", "1e308", "5e-324", "9" * 30, "9" * 5000, "1_000",
        "0x10", "true", '"4"', '""', "[]", "[1, 2]", "{}", "{ nodes = 1 }", "{ latency_us = 1, gbytes_per_s = 1 }",
        "1979-05-27", "07:32:00", '"""\na\n"""', '"\\u0000"', "'a'",
    ]
)  # fmt: skip
PAIRS = st.builds("{} = {}".format, st.sampled_from(KEYS) | st.text(max_size=4), LITERALS)
TABLES = st.builds("[{}]".format, st.sampled_from([*KEYS, "within.deeper", "[within]", "compute.resnet50"]))
DOCUMENTS = st.lists(PAIRS | TABLES, max_size=12).map("\n".join)
WHOLE = {
    "about": "'two machines'", "gpus_per_node": "4", "nodes": "2", "reduce_gbytes_per_s": "200",
    "pack_gbytes_per_s": "90", "within.latency_us": "5", "within.gbytes_per_s": "10.5", "between.latency_us": "50",
    "between.gbytes_per_s": "1", "between.nics": "2", "racks.nodes": "1", "racks.oversubscription": "3",
    "compute.resnet50": "300", "kernel_efficiency.4": "0.8",
}  # fmt: skip


def changed(changes):
    return "\n".join(f"{key} = {value}" for key, value in (WHOLE | changes).items())


CHANGES = st.dictionaries(
    st.sampled_from([*WHOLE, "name", "compute.x", "compute", "kernel_efficiency.x", "kernel_efficiency"]),
    LITERALS,
    max_size=2,
)


def priced(text):
    """What is accepted can be written, read again, and priced."""
    cluster = Cluster.parsed(text, "odd")
    assert Cluster.parsed(cluster.text(), cluster.name) == cluster
    if cluster.ranks() < 4:
        return
    seconds = Pricing(Ring().schedule(0, 4), cluster).price(1e6).seconds
    assert 0 <= all_reduce_bound_s(cluster, 4, 1e6) <= seconds * (1 + 1e-9)
    assert isfinite(seconds)
    assert 0 < efficiency_at(cluster, 3) <= 1


@cases(100)
@given(DOCUMENTS | CHANGES.map(changed))
@example(changed({"about": "9" * 5000}))
@example("about = " + "[" * 5000)
@example(changed({"compute.'a model'": "3"}))
@example(changed({"about": "'😀 \\u007f'"}))
@example(changed({"about": '"\\u007f"'}))
@example(changed({"within.latency_us": "1e308"}))
@example(changed({"within.gbytes_per_s": "5e-324"}))
@example(changed({"racks.oversubscription": "1e308"}))
@example(changed({"name": "3"}))
@example(changed({"compute.resnet50": "'fast'"}))
@example(changed({"kernel_efficiency.'4 '": "0.5"}))
@example(changed({"kernel_efficiency." + "9" * 5000: "0.5"}))
def test_a_document_is_a_cluster_or_is_refused_in_words(text):
    met(priced, text)


@cases(50)
@given(FILES)
@example(b"\xff\xfe")
@example(b"name = 1\x00")
def test_a_file_of_any_bytes_is_a_cluster_or_is_refused_in_words(content):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "odd.toml"
        path.write_bytes(content)
        met(Cluster.named, str(path))


@for_each("name", ["", ".", "/", "\0", "\0.toml", ".toml", "a/../b.toml", "a" * 5000 + ".toml", "é.toml"])
def test_a_name_that_is_no_file_is_refused_in_words(name):
    with pytest.raises(UsageError, match=r"there are abci|cannot be read"):
        Cluster.named(name)


def test_a_folder_is_refused_in_words(tmp_path):
    folder = tmp_path / "desk.toml"
    folder.mkdir()
    with pytest.raises(UsageError, match=r"desk\.toml cannot be read"):
        Cluster.named(str(folder))


@cases(60)
@given(st.sampled_from([Link, Between, Racks]), st.lists(VALUES, min_size=2, max_size=4))
def test_the_parts_take_what_they_can_use_and_refuse_the_rest(kind, values):
    met(lambda: kind(*values[: 2 if kind is not Between else 4]))


@cases(60)
@given(st.lists(VALUES, min_size=7, max_size=7))
@example([2, None, None, None, None, {"resnet50": "fast"}, "desk"])
@example([2, None, 5, None, None, {}, "desk"])
@example([2, None, None, None, None, 3, "desk"])
@example([2, None, None, None, None, {}, 7])
def test_a_cluster_takes_what_it_can_use_and_refuses_the_rest(values):
    gpus, nodes, racks, reduce_speed, pack_speed, compute, name = values

    def make():
        return Cluster(
            name, "", gpus, Link(1, 1), Between(1, 1), nodes, racks, reduce_speed, pack_speed, compute
        ).text()

    met(make)
    assert Cluster("desk", "", 1, Link(1, 1), Between(1, 1)).ranks() == inf
