# SPDX-License-Identifier: Apache-2.0
"""Groups, works, callbacks and messages of torch.distributed, as each of 4 ranks uses them: what came, what should."""

import re
from datetime import timedelta
from inspect import isfunction, signature
from pathlib import Path

import torch
import torch.distributed as dist
from failing_ranks import raised
from torch._C import _distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

from commrt.c10d.methods import Methods

IN_C = hasattr(dist, "_reconfigure")
"""torch 2.14 and later have a group in C++ in front of the backend."""


def ones(size=3):
    return torch.full((size,), float(dist.get_rank() + 1))


def total(group=None):
    """What the sum of `ones` over a group should be."""
    return [float(sum(rank + 1 for rank in dist.get_process_group_ranks(group)))] * 3


def summed(tensor, group=None):
    dist.all_reduce(tensor, group=group)
    return tensor


def sums(*groups):
    return [summed(ones(), group).tolist() for group in groups], [total(group) for group in groups]


def a_mesh_and_its_flattened_group_add_up():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    return sums(*mesh.get_all_groups(), mesh._flatten("all").get_group())


def interleaved_groups_add_up_whatever_is_waited_for_first():
    groups = [dist.group.WORLD, *init_device_mesh("cpu", (2, 2)).get_all_groups()] * 4
    tensors = [ones() for _ in groups]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor, group in zip(tensors, groups, strict=True)]
    for number in torch.randperm(len(works), generator=torch.Generator().manual_seed(dist.get_rank())):
        works[number].wait()
    return [tensor.tolist() for tensor in tensors], [total(group) for group in groups]


def groups_of_some_of_one_and_with_two_backends_add_up():
    rank = dist.get_rank()
    of_some = dist.new_group([rank % 2, rank % 2 + 2], use_local_synchronization=True)
    alone = dist.new_group([rank], use_local_synchronization=True)
    return sums(of_some, alone, dist.new_group(backend="cpu:commrt,cuda:commrt"))


def a_group_keeps_the_order_in_which_its_ranks_were_named():
    group = dist.new_group([3, 1, 0], sort_ranks=False)
    if dist.get_rank() == 2:
        return group, dist.GroupMember.NON_GROUP_MEMBER
    outputs = [torch.zeros(1, dtype=torch.int64) for _ in range(3)]
    dist.all_gather(outputs, torch.tensor([dist.get_rank()]), group=group)
    dist.destroy_process_group(group)  # torch names groups by how many a rank has
    return torch.cat(outputs).tolist(), [3, 1, 0]


def a_destroyed_group_is_refused_and_others_go_on():
    group = dist.new_group(range(4))
    summed(ones(), group)
    dist.destroy_process_group(group)
    dist.barrier()
    is_refused = "is not initialized in the world group map" in raised(lambda: summed(ones(), group))
    return (is_refused, *sums(dist.new_group(range(4)), None)), (True, [total()] * 2, [total()] * 2)


def a_group_takes_the_files_and_threads_of_one_over_gloo_and_leaves_one_key():
    store, taken = dist.distributed_c10d._get_default_store(), []
    for backend in ("gloo", "commrt"):
        keys, before = {*store.list_keys()}, taken_by_process()
        dist.barrier()
        group = dist.new_group(range(4), backend=backend)
        taken.append([len(now - already) for now, already in zip(taken_by_process(), before, strict=True)])
        dist.barrier()  # else Gloo may still connect to a rank that has gone on
        dist.destroy_process_group(group)
        del group
        dist.barrier()
    return (taken[1], len({*store.list_keys()} - keys)), (taken[0], 1)


def taken_by_process(process="self"):
    """The sockets and pipes that it has opened, and its threads; some go at any time, as other groups end."""
    files = {each.resolve() for each in Path("/proc", process, "fd").iterdir()}
    return {each for each in files if ":" in each.name}, {*Path("/proc", process, "task").iterdir()}


def the_result_of_a_work_is_the_callers_tensor():
    if IN_C:
        return None, None
    tensor = ones()
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    (one,) = work.result()
    return (one.tolist(), one.data_ptr()), (total(), tensor.data_ptr())


def collectives_of_a_coalescing_manager_are_waited_for_as_one():
    tensors = [ones() for _ in range(3)]
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        for tensor in [*tensors, tensors[0]]:  # one call of four, in which a tensor is combined once
            dist.all_reduce(tensor)
    manager.wait()
    return [tensor.tolist() for tensor in tensors], [total()] * 3


def after_a_sum(more):
    """What `more` makes of a sum, in a callback."""
    work = dist.all_reduce(ones(), async_op=True)
    return work.get_future().then(lambda future: more(future.value()[0]))


def a_callback_uses_another_group():
    group = dist.new_group()
    return after_a_sum(lambda tensor: summed(tensor, group)).wait().tolist(), [40.0] * 3


def a_callback_sends_and_receives():
    rank, received = dist.get_rank(), torch.empty(3)

    def more(tensor):
        sending = dist.isend(tensor + rank, (rank + 1) % 4)
        dist.recv(received, (rank - 1) % 4)
        sending.wait()
        return received

    return after_a_sum(more).wait().tolist(), [10.0 + (rank - 1) % 4] * 3


def messages_are_received_by_tag_in_any_order():
    if dist.get_rank() == 0:
        for work in [dist.isend(torch.tensor([tag]), 1, tag=tag) for tag in range(4)]:
            work.wait()
            work.wait()  # ends at once, as that of a collective
    if dist.get_rank() != 1:
        return None, None
    received = {tag: torch.zeros(1, dtype=torch.int64) for tag in (2, 0, 3, 1)}
    for tag, tensor in received.items():
        dist.recv(tensor, 0, tag=tag)
    return [int(tensor) for tensor in received.values()], [*received]


def a_first_message_does_not_wait_for_its_receiver():
    group, rank, received = dist.new_group(), dist.get_rank(), torch.zeros(3)
    sending = dist.isend(torch.ones(3), 1, group=group) if rank == 0 else None
    dist.all_reduce(torch.ones(3), group=group)
    if sending is not None:
        sending.wait()
    if rank == 1:
        dist.recv(received, 0, group=group)
    return received.tolist(), [float(rank == 1)] * 3


def a_receive_from_any_rank_names_it():
    if IN_C:  # torch loses the source
        return raised(lambda: dist.recv(torch.zeros(3))).partition(":")[0], "UsageError"
    if dist.get_rank() > 0:
        dist.send(ones(), 0)
        return None, None
    received = torch.zeros(3)
    return {dist.recv(received): received.tolist() for _ in range(3)}, {rank: [rank + 1.0] * 3 for rank in (1, 2, 3)}


def torch_refuses_a_monitored_barrier_that_the_group_itself_makes():
    dist.group.WORLD.monitored_barrier(timedelta(seconds=30))
    refusal = "no error" if IN_C else "ValueError: monitored_barrier is only implemented for GLOO backend."
    return raised(dist.monitored_barrier), refusal


def a_group_answers_what_torch_asks_of_it():
    """In distributed_c10d, device_mesh, checkpoint, fsdp, _dynamo and _inductor; the rest is Gloo's answer."""
    cpu, group = torch.device("cpu"), dist.new_group(range(4))
    begun = group._get_sequence_number_for_group()
    summed(ones(), group)
    counted = group._get_sequence_number_for_group() - begun
    names = {dist.get_backend(group)} if IN_C else {group.name(), group._get_backend_name(), dist.get_backend(group)}
    refused = raised(lambda: group.split_group([[0, 1], [2, 3]]))
    answers = {
        "rank and size": (group.rank(), group.size()) == (dist.get_rank(), 4),
        "devices": cpu in group._device_types,
        "backend": isinstance(group._get_backend(cpu), Methods),
        "name": names == {"commrt"},
        "config": dist.get_backend_config(group).startswith("cpu:commrt"),
        "default device": dist.distributed_c10d._get_pg_default_device(group) == cpu,
        "sequence number": counted == 1,
        "store": isinstance(group.get_group_store(), dist.Store),
        "unboxed": dist.ProcessGroup.unbox(group.boxed()) is group,
        "resolved": dist.distributed_c10d._resolve_process_group(group.group_name) is group,
        "split": IN_C or "cannot be split: call torch.distributed.new_group" in refused,
        "of Gloo": IN_C or (group.supports_coalescing, group.supports_splitting, group._has_hooks()) == (False,) * 3,
    }
    return answers, dict.fromkeys(answers, True)


def forms_of(name):
    """The names of the arguments in each form of a method of torch's groups, as its documentation lists them."""
    lines = [line for line in (getattr(dist.ProcessGroup, name).__doc__ or "").splitlines() if f"{name}(self" in line]
    return [re.findall(r"(\w+): (?=[a-z_]+\.|typing|Sequence|List|Optional|object|[A-Z])", line)[1:] for line in lines]


def given_to(name, is_long):
    """New tensors for a method, as its long form or its short one has them, and those that hold its result."""
    mine, all_of_them, at_root = ones(), [ones() + piece for piece in range(4)], dist.get_rank() == 1
    empty, gathered = torch.zeros(3), [torch.zeros(3) for _ in range(4)]
    joined, wide = torch.zeros(12), torch.cat(all_of_them)
    if name in {"allreduce", "broadcast", "reduce"}:
        data, result = (mine,), [mine] if name != "reduce" or at_root else []
    elif name in {"allgather", "gather"}:
        result = gathered if name == "allgather" or at_root else []
        data = (result, mine)
    elif name == "scatter":
        data, result = (empty, all_of_them if at_root else []), [empty]
    elif name == "reduce_scatter":
        data, result = (empty, all_of_them), [empty]
    elif name == "alltoall":
        return (gathered, all_of_them), gathered
    elif name in {"all_to_all_single", "alltoall_base"}:
        return (joined, wide, [], []), [joined]
    elif name in {"all_gather_single", "_allgather_base"}:
        return (joined, mine), [joined]
    elif name in {"reduce_scatter_single", "_reduce_scatter_base"}:
        return (empty, wide), [empty]
    else:
        return (), []
    return tuple([each] if len(each) else [] for each in data) if is_long else data, result


OPTIONS = {
    **{name.title(): name for name in ("allreduce", "broadcast", "reduce", "gather", "scatter", "barrier")},
    "Allgather": "allgather all_gather_single _allgather_base",
    "ReduceScatter": "reduce_scatter reduce_scatter_single _reduce_scatter_base",
    "AllToAll": "alltoall all_to_all_single alltoall_base",
}
"""The methods that take options, by the first half of their name."""
METHODS = {name: kind for kind, names in OPTIONS.items() for name in names.split()}


def options_of(method):
    """Options that say what the short forms say, if the method has some."""
    options = getattr(c10d, f"{METHODS[method]}Options")()
    for field, value in {"reduceOp": dist.ReduceOp.MAX, "rootRank": 1, "timeout": timedelta(seconds=50)}.items():
        if hasattr(options, field):
            setattr(options, field, value)
    return options


SAID = {"op": dist.ReduceOp.MAX, "root": 1, "timeout": timedelta(seconds=50)}


def each_form_of_each_method_does_what_gloo_does():
    """Its arguments by place and by name."""
    found = []  # by commrt, and by Gloo
    for group in (dist.group.WORLD, dist.new_group(backend="gloo")):
        found.append(values := {})
        for name, names in [(each, names) for each in METHODS if hasattr(group, each) for names in forms_of(each)]:
            for by_name in (False, True):
                data, result = given_to(name, bool({"opts", "tensors"} & {*names}))
                said = [options_of(name)] if "opts" in names else [SAID[each] for each in names[len(data) :]]
                call = getattr(group, name)
                work = call(**dict(zip(names, [*data, *said], strict=True))) if by_name else call(*data, *said)
                work.wait()
                values[name, *names, by_name] = [tensor.tolist() for tensor in result]
    return found


def a_message_arrives_whose_work_was_dropped():
    rank, received = dist.get_rank(), torch.empty(5000)
    receiving = dist.irecv(received, (rank - 1) % 4)
    dist.isend(torch.full((5000,), float(rank)), (rank + 1) % 4)  # and nobody has its work
    receiving.wait()
    return received.unique().tolist(), [float((rank - 1) % 4)]


def a_message_arrives_whose_sender_destroys_the_group():
    group, rank, received = dist.new_group(), dist.get_rank(), torch.empty(5000)
    if rank == 0:
        kept = [dist.isend(torch.ones(5000), peer, group=group) for peer in (1, 2)]
        del kept[0]
        dist.destroy_process_group(group)
    if rank in {1, 2}:
        dist.recv(received, 0, group=group)
    return received.unique().tolist() if rank in {1, 2} else [1.0], [1.0]


def a_world_is_opened_again_after_its_end_on_the_same_store():
    dist.destroy_process_group()
    dist.init_process_group("commrt", timeout=timedelta(seconds=60))
    return sums(None, dist.new_group([0, 1, 2, 3]))


BODIES = [each for each in list(globals().values()) if isfunction(each) and not signature(each).parameters]
"""All functions of this module without parameters, in order."""
