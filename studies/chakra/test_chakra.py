# SPDX-License-Identifier: Apache-2.0
"""Traces of schedules in Chakra's schema: messages match, nothing waits in a circle, and a replay does what it must."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from random import Random

import chakra_traces as chakra
import commands
import export
import numpy as np
import pytest
from cases import for_each
from chakra_traces import VALUES, Node, NodeType, Trace, traces
from hypothesis import given, settings
from hypothesis import strategies as st

from commrt.algorithms.catalogue import ALGORITHMS, COLLECTIVES, by_name, candidates
from commrt.algorithms.torus import Torus2D
from commrt.errors import ScheduleError, UsageError
from commrt.pricing.cluster import Between, Cluster, Link
from commrt.pricing.price import Pricing
from commrt.proof.replay import traffic
from commrt.schedule import ADD, COPY, Schedule, Step

SEND, RECV, COMP = NodeType.COMM_SEND_NODE, NodeType.COMM_RECV_NODE, NodeType.COMP_NODE
FLAT = Cluster("flat", "", 1, Link(10.0, 1.0), Between(10.0, 1.0), reduce_gbytes_per_s=1.0)
"""10 us, and 1 ns for each byte that is sent or added."""

# How the schema, mlcommons/chakra's schema/protobuf/et_def.proto, calls and numbers what a trace needs of it.
TYPES = {"COMP_NODE": 4, "COMM_SEND_NODE": 5, "COMM_RECV_NODE": 6}
METADATA_FIELDS = {"version", "attr"}
NODE_FIELDS = {"id", "name", "type", "data_deps", "duration_micros", "attr"}
VALUE_FIELDS = {"bool_val", "int32_val", "int64_val", "uint64_val", "string_val"}
# What its feeder reads of the attributes, and in which field.
READ = {
    "is_cpu_op": "bool_val",
    "num_ops": "int64_val",
    "tensor_size": "uint64_val",
    "comm_size": "int64_val",
    "comm_src": "int32_val",
    "comm_dst": "int32_val",
    "comm_tag": "int32_val",
}

ALL_REDUCES = st.one_of(
    st.builds(lambda name, ranks: by_name(name).schedule(0, ranks), st.sampled_from([*ALGORITHMS]), st.integers(1, 9)),
    st.sampled_from([each for ranks in (4, 6, 8) for each in candidates("all_reduce", ranks).values()]),
)
SCHEDULES = st.one_of(
    ALL_REDUCES,
    st.builds(lambda name: by_name(name).schedule(0, 8), st.sampled_from(["gossip", "local", "backup"])),
    st.sampled_from([each for name in COLLECTIVES for ranks in (3, 8) for each in candidates(name, ranks).values()]),
)
FEWER = settings(max_examples=30)
SIZES = st.integers(1, 200).map(lambda values: 4 * values)


invoke, refused = (partial(run, program=export.app) for run in (commands.invoke, commands.refused))


def nodes_of(found, kind):
    return [node for trace in found for node in trace.nodes if node.type == kind]


def keyed(nodes):
    names = ("comm_src", "comm_dst", "comm_tag", "comm_size", "buffer_offset")
    return Counter(tuple(node.attributes[name] for name in names) for node in nodes)


def replay(found, rng, run):
    """Run all nodes in a random order that respects dependencies; a send only with its receive, both at once.

    `run(rank, node, partner)` is called for compute nodes and for pairs. Fails if some node can never run.
    """
    left = {(trace.rank, node.id): node for trace in found for node in trace.nodes}
    done = set()
    while left:
        able = {
            (rank, number): node
            for (rank, number), node in left.items()
            if all((rank, dependency) in done for dependency in node.data_deps)
        }
        receives = {node.attributes["comm_tag"]: key for key, node in able.items() if node.type == RECV}
        partners = {key: receives.get(node.attributes["comm_tag"]) for key, node in able.items() if node.type == SEND}
        runs = [key for key, node in able.items() if node.type == COMP or partners.get(key) is not None]
        assert runs, f"deadlock: {len(left)} nodes are left"
        for key in rng.sample(runs, rng.randint(1, len(runs))):
            partner = partners.get(key)
            run(key[0], left.pop(key), None if partner is None else left.pop(partner))
            done |= {key, partner or key}


@FEWER
@given(SCHEDULES, SIZES)
def test_each_send_has_one_receive_of_equal_source_destination_tag_bytes_and_place(schedule, nbytes):
    found = list(traces(schedule, nbytes))
    sends, receives = keyed(nodes_of(found, SEND)), keyed(nodes_of(found, RECV))
    assert sends == receives
    assert set(sends.values()) <= {1}
    tags = [tag for _, _, tag, _, _ in sends]
    assert len(set(tags)) == len(tags)


@FEWER
@given(SCHEDULES, SIZES)
def test_ranks_send_and_receive_only_what_is_theirs(schedule, nbytes):
    for trace in traces(schedule, nbytes):
        assert all(node.attributes["comm_src"] == trace.rank for node in trace.nodes if node.type == SEND)
        assert all(node.attributes["comm_dst"] == trace.rank for node in trace.nodes if node.type == RECV)


@FEWER
@given(SCHEDULES, SIZES, st.randoms(use_true_random=False))
def test_nothing_waits_in_a_circle_even_if_a_send_waits_for_its_receive(schedule, nbytes, rng):
    found = list(traces(schedule, nbytes))
    assert all(dependency < node.id for trace in found for node in trace.nodes for dependency in node.data_deps)
    replay(found, rng, lambda *_: None)


@FEWER
@given(SCHEDULES)
def test_the_busiest_rank_sends_what_the_schedule_costs(schedule):
    nbytes = 4 * schedule.chunks * 3
    sent = [sum(node.attributes["comm_size"] for node in nodes_of([trace], SEND)) for trace in traces(schedule, nbytes)]
    assert max(sent) == traffic(schedule).bytes_per_rank * nbytes


@FEWER
@given(ALL_REDUCES, SIZES, st.integers(0, 9))
def test_a_replay_in_any_order_that_dependencies_allow_sums_over_all_ranks(schedule, nbytes, seed):
    found = list(traces(schedule, nbytes))
    buffers = np.random.default_rng(seed).integers(0, 100, (schedule.ranks, nbytes // 4))
    total, inbox = buffers.sum(axis=0), {}
    added = {node.attributes["comm_tag"] for node in nodes_of(found, COMP)}

    def place(rank, node, size):
        begin = node.attributes["buffer_offset"] // 4
        return buffers[rank, begin : begin + size // 4]

    def run(rank, node, partner):
        tag = node.attributes["comm_tag"]
        if partner is None:
            place(rank, node, node.attributes["tensor_size"])[:] += inbox.pop(tag)
            return
        data = place(rank, node, node.attributes["comm_size"]).copy()
        if tag in added:
            inbox[tag] = data
        else:
            place(partner.attributes["comm_dst"], partner, partner.attributes["comm_size"])[:] = data

    replay(found, Random(seed), run)
    assert not inbox
    assert (buffers == total).all()


@for_each(("name", "ranks"), [("ring", 5), ("ring", 8), ("halving_doubling", 8), ("torus2d", 9)])
def test_a_simulator_of_the_traces_on_a_flat_network_ends_when_the_price_says(name, ranks):
    schedule = by_name(name).schedule(0, ranks)
    nbytes, end_us = 4000 * schedule.chunks, {}
    found = list(traces(schedule, nbytes, FLAT))

    def ready(rank, node):
        return max((end_us[rank, dependency] for dependency in node.data_deps), default=0.0)

    def run(rank, node, partner):
        if partner is None:
            end_us[rank, node.id] = ready(rank, node) + node.duration_micros
            return
        peer = partner.attributes["comm_dst"]
        end = max(ready(rank, node), ready(peer, partner)) + 10 + node.attributes["comm_size"] / 1e3
        end_us[rank, node.id] = end_us[peer, partner.id] = end

    replay(found, Random(0), run)
    assert max(end_us.values()) == pytest.approx(1e6 * Pricing(schedule, FLAT).price(nbytes).seconds)


def test_additions_of_a_step_follow_all_its_sends_and_receives_in_order_of_sender():
    star = Schedule("star", 3, 1, lambda: iter([Step.of([2, 1, 0], [0, 0, 1], 0, 1, ADD)]))
    nodes = next(traces(star, 4)).nodes
    assert [(node.name, node.data_deps) for node in nodes] == [
        ("send 0->1 [0:1) of step 0", ()),
        ("recv 1->0 [0:1) of step 0", ()),
        ("recv 2->0 [0:1) of step 0", ()),
        ("add 1->0 [0:1) of step 0", (0, 1, 2)),
        ("add 2->0 [0:1) of step 0", (3,)),
    ]


def test_a_step_in_which_a_rank_is_idle_is_passed_over():
    steps = [Step.of(0, 1, 0, 1, COPY), Step.of(2, 3, 0, 1, COPY), Step.of(1, 0, 0, 1, COPY)]
    nodes = next(traces(Schedule("pause", 4, 1, lambda: iter(steps)), 4)).nodes
    assert [node.data_deps for node in nodes] == [(), (0,)]


def test_messages_without_bytes_and_to_oneself_are_left_out():
    steps = [Step.of([0, 0, 1], [1, 0, 0], [0, 1, 1], [1, 2, 2], COPY)]
    found = list(traces(Schedule("few", 2, 2, lambda: iter(steps)), 4))
    assert [node.name for trace in found for node in trace.nodes] == [
        "send 0->1 [0:1) of step 0",
        "recv 0->1 [0:1) of step 0",
    ]


def test_adding_takes_as_long_as_on_the_cluster_in_whole_microseconds():
    schedule = by_name("ring").schedule(0, 2)
    timed, free = (nodes_of(traces(schedule, 8_000_800, cluster), COMP) for cluster in (FLAT, None))
    assert [node.duration_micros for node in timed] == [4000, 4000]
    assert [node.duration_micros for node in free] == [0, 0]
    assert {node.attributes["num_ops"] for node in free} == {1_000_100}


def test_names_and_numbers_are_those_of_the_schema():
    assert {each.name: each.value for each in NodeType} == TYPES
    assert VALUES.items() >= READ.items()
    document = json.loads(next(traces(by_name("ring").schedule(0, 3), 24)).text())
    assert document.keys() == {"global_metadata", "nodes"}
    assert document["global_metadata"].keys() == METADATA_FIELDS
    assert all(node.keys() == NODE_FIELDS and node["type"] in TYPES for node in document["nodes"])
    attributes = [each for node in (document["global_metadata"], *document["nodes"]) for each in node["attr"]]
    assert all(each.keys() - {"name"} <= VALUE_FIELDS and len(each) == 2 for each in attributes)
    assert all(READ.get(each["name"]) in {None, *each} for each in attributes)


def test_a_trace_is_one_json_document_with_a_node_per_line():
    node = Node(0, "send", SEND, (), 0, {"comm_size": 8})
    text = Trace(0, {"ranks": 2}, (node, node)).text()
    assert json.loads(text)["nodes"] == [node.record()] * 2
    assert len(text.splitlines()) == 5


def test_what_cannot_be_traced_is_refused(monkeypatch):
    with pytest.raises(UsageError, match="a buffer of 0 bytes cannot be traced"):
        traces(by_name("ring").schedule(0, 2), 0)
    with pytest.raises(ScheduleError, match="names a rank outside"):
        traces(Schedule("wrong", 2, 1, lambda: iter([Step.of(0, 2, 0, 1, COPY)])), 4)
    monkeypatch.setattr(chakra, "MOST_MESSAGES", 10)
    with pytest.raises(UsageError, match="ring on 4 ranks has more than 10 messages: trace fewer"):
        traces(by_name("ring").schedule(0, 4), 4)


def test_export_writes_a_file_per_rank_and_says_where(tmp_path):
    folder = tmp_path / "new" / "traces"
    result = invoke("torus2d", "--ranks", 6, "--grid", "3x2", "--nbytes", "25e6", "--out", folder)
    assert result.exit_code == 0
    assert result.stdout == f"6 traces of 25,000,000 bytes: {folder}/torus2d.0.et.json to torus2d.5.et.json\n"
    assert sorted(file.name for file in folder.iterdir()) == [f"torus2d.{rank}.et.json" for rank in range(6)]
    written = (folder / "torus2d.4.et.json").read_text()
    schedule = Torus2D((3, 2)).schedule(0, 6)
    assert written == list(traces(schedule, 25_000_000))[4].text()


def test_export_takes_how_long_adding_takes_from_the_cluster(tmp_path):
    invoke("ring", "--ranks", 2, "--nbytes", "2e6", "--cluster", "host", "--out", tmp_path)
    nodes = json.loads((tmp_path / "ring.0.et.json").read_text())["nodes"]
    assert [node["duration_micros"] for node in nodes if node["type"] == "COMP_NODE"] == [100]


@for_each(
    ("args", "says"),
    [
        (["star", "--nbytes", 8], "no algorithm is called 'star'"),
        (["ring", "--nbytes", "1e18"], "--nbytes 1e+18: give a number from 0 to 1e+18"),
        (["ring", "--nbytes", 8, "--grid", "2x2"], "--grid is for torus2d, not for ring"),
        (["ring", "--nbytes", 8, "--ranks", 1000], "ring on 1000 ranks has more than 500,000 messages"),
        (["ring", "--nbytes", 8, "--cluster", "mars"], "no cluster is called 'mars'"),
    ],
)
def test_what_cannot_be_exported_is_refused_in_words_and_leaves_no_folder(tmp_path, args, says):
    assert says in refused(*args, "--out", tmp_path / "traces")
    assert not (tmp_path / "traces").exists()


@pytest.mark.parametrize("out", ["", "file/traces", "nul\0l"])
def test_a_folder_that_cannot_be_made_is_named(tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert "--out" in refused("ring", "--nbytes", 8, "--out", out)
