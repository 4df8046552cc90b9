# SPDX-License-Identifier: Apache-2.0
"""Which schedule the backend of torch.distributed takes: by price, by name, and always the same."""

import json
from dataclasses import replace

import pytest

from commrt.algorithms import ring
from commrt.algorithms.catalogue import COLLECTIVES, candidates
from commrt.errors import UsageError
from commrt.pricing.cluster import Cluster, Link
from commrt.pricing.forced import parse_forced
from commrt.pricing.price import Pricing
from commrt.pricing.selection import Selection, choices
from commrt.pricing.slices import slice_nbytes, slots_of
from commrt.tools.commands import plan_collective

HOST = Cluster.named("host")
ETHERNET = Cluster.named("ethernet-10g")


def names(cluster, collective, ranks, nbytes):
    return [choice.name for choice in choices(cluster, collective, range(ranks), nbytes)]


def test_all_schedules_are_priced_and_the_cheapest_comes_first():
    for collective in COLLECTIVES:
        found = choices(HOST, collective, range(8), 1e6)
        seconds = [round(choice.price.seconds, 9) for choice in found]
        assert sorted(choice.name for choice in found) == sorted(candidates(collective, 8))
        assert seconds == sorted(seconds), collective


def test_long_broadcasts_over_a_network_are_pipelined_and_a_few_ranks_that_share_memory_send_directly():
    assert names(ETHERNET, "broadcast", 16, 1e8)[0] == "chain"
    assert names(ETHERNET, "broadcast", 16, 8)[0] in {"direct", "tree"}
    assert names(HOST, "all_gather", 4, 1e6)[0] == "direct"
    assert names(HOST, "all_gather", 64, 8)[0] != "direct"


def test_a_choice_is_made_once_for_a_size_class(monkeypatch):
    selection = Selection(HOST, range(4))
    first = selection.choose("all_reduce", 0, 1000)
    monkeypatch.setattr(Pricing, "price", None)
    assert selection.choose("all_reduce", 0, 1024) is first
    with pytest.raises(TypeError):
        selection.choose("all_reduce", 0, 1025)


def test_a_forced_schedule_is_taken_whatever_it_costs():
    selection = Selection(HOST, range(4), parse_forced("all_reduce=ring, broadcast=tree"))
    assert selection.choose("all_reduce", 0, 8) is ring.all_reduce(4)


def test_what_cannot_be_forced_is_refused_with_what_can():
    with pytest.raises(UsageError, match=r"all_reduce=star.*one of .*ring, .*halving_doubling"):
        parse_forced("all_reduce=star")
    with pytest.raises(UsageError, match=r"sum=ring.*one of .*broadcast"):
        parse_forced("sum=ring")
    with pytest.raises(UsageError, match=r"'doubling' of all_gather does not take 6 ranks: choose one of .*ring"):
        Selection(HOST, range(6), {"all_gather": "doubling"})


@pytest.mark.parametrize("cluster", ["host", "ethernet-10g"])
def test_plan_names_the_schedule_that_the_backend_takes(cluster, capsys):
    selection, slots = Selection(Cluster.named(cluster), range(6)), {}
    for number, collective in enumerate(sorted(COLLECTIVES.keys() - {"barrier", "all_to_all"})):
        for nbytes in (8, 200_000, 300_000_000) if number % 2 else (3_000, 5_000_000):
            plan_collective.collective(collective, nbytes, 6, cluster, as_json=True)
            slots[collective] = slots_of(collective, 6)
            piece = nbytes if slots[collective] == 1 else nbytes // 6
            taken = selection.choose(collective, 0, min(piece, slice_nbytes(collective, 6, "cpu")))
            named = json.loads(capsys.readouterr().out)["best"]
            assert candidates(collective, 6)[named] == taken, (collective, nbytes)
    assert {*slots.values()} == {1, 6}


def test_a_group_is_priced_where_its_ranks_lie():
    two_per_node = replace(HOST, gpus_per_node=2)
    near, far = (choices(two_per_node, "broadcast", ranks, 1e6)[0].price.seconds for ranks in ([2, 3], [1, 2]))
    assert far > 2 * near


def test_all_ranks_of_a_node_share_its_bus():
    shared = replace(HOST, message_us=0, reduce_gbytes_per_s=None, within=Link(0, 100.0, 10.0))
    price = Pricing(ring.all_gather(4), shared).price(4e9)
    assert price.seconds == pytest.approx(3 * 4e9 / 10e9)


def test_further_messages_of_a_rank_take_time():
    slow = replace(HOST, message_us=7, within=Link(50, 10.0))
    direct = candidates("all_gather", 5)["direct"]  # four sent and four received, two of which are free
    assert Pricing(direct, slow).price(0).seconds == pytest.approx((50 + 6 * 7) * 1e-6)


def test_a_cluster_that_is_too_small_for_the_group_is_refused():
    with pytest.raises(UsageError, match="has 8 GPUs"):
        Selection(replace(HOST, gpus_per_node=4, nodes=2), [0, 8])
