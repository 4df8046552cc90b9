# SPDX-License-Identifier: Apache-2.0
"""The backend of torch.distributed: groups, works, messages, DTensors, ops; DDP, FSDP2 and HSDP train with it."""

import c10d_groups
import c10d_torch_ops
import c10d_training
import pytest
from rank_pool import Pool

pytestmark = pytest.mark.processes

BODIES = [*c10d_training.TENSORS, *c10d_groups.BODIES]


@pytest.fixture(scope="module")
def found():
    with Pool(4) as pool:
        over_gloo = pool.answers(c10d_training.hooked, backend="gloo")
        return over_gloo | pool.answers(*c10d_training.TRAINED, *BODIES)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_on_each_of_4_ranks(found, body):
    for got, expected in found[body.__name__]:
        assert got == expected


@pytest.mark.parametrize("way", [*c10d_training.TRAINED, c10d_training.hooked], ids=lambda way: way.__name__)
def test_a_model_ends_with_the_parameters_of_one_process_on_whole_batches(found, way):
    assert max(found[way.__name__]) < 1e-6


# torch's ops of collectives, and what torch's modes and profiler see of the backend's.

ALIKE = [
    c10d_torch_ops.functional,
    c10d_torch_ops.of_c10d,
    c10d_torch_ops.dispatched,
    c10d_torch_ops.summed_under_a_mode,
    c10d_torch_ops.of_fake_tensors,
]
NAMES = "all_reduce broadcast reduce all_gather gather scatter reduce_scatter all_to_all barrier send recv"
CALLS = {f"commrt::{name}" for name in NAMES.split()}
SIZES = {"all_reduce": "[[4]]", "all_gather": "[[4]]", "reduce_scatter_tensor": "[[4]]", "barrier": "[]"}


@pytest.fixture(scope="module")
def of_two():
    with Pool(2) as pool:
        bodies = *ALIKE, c10d_torch_ops.profiled
        return {backend: pool.answers(*bodies, backend=backend) for backend in ("gloo", "commrt")}


@pytest.mark.parametrize("body", ALIKE, ids=lambda body: body.__name__)
def test_results_and_what_modes_of_torch_see_are_those_over_gloo(of_two, body):
    assert not any(isinstance(each, str) for each in of_two["gloo"][body.__name__])  # an error
    assert of_two["commrt"][body.__name__] == of_two["gloo"][body.__name__]


def test_the_profiler_shows_each_collective_as_over_gloo(of_two):
    pairs = zip(of_two["gloo"]["profiled"][0].items(), of_two["commrt"]["profiled"][0].values(), strict=True)
    for (collective, over_gloo), over_commrt in pairs:
        ops = [event for event in over_gloo if event[0].startswith("c10d::")]
        assert [event for event in over_commrt if event[0].startswith("c10d::")] == ops, collective
        calls = [name for name, _ in over_commrt if name in CALLS]
        assert len(calls) == len(ops), collective


def test_the_profiler_shows_the_sizes_that_a_collective_was_given(of_two):
    events = of_two["commrt"]["profiled"][1]
    names = {collective: f"commrt::{collective.removesuffix('_tensor')}" for collective in SIZES}
    shown = {each: [sizes for event, sizes in events[each] if event == names[each]] for each in SIZES}
    assert shown == {each: [sizes] for each, sizes in SIZES.items()}
