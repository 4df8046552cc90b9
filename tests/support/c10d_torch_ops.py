# SPDX-License-Identifier: Apache-2.0
"""Each op of torch's namespaces for collectives, called in a group of 2 ranks; each collective under observers."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch._C._profiler import _ExperimentalConfig
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

NAMESPACES = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::", "_dtensor::")


def known():
    """The names of all ops that torch has in these namespaces."""
    return sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith(NAMESPACES))


def row(numel=4):
    return torch.arange(numel, dtype=torch.float32) + 10 * dist.get_rank()


def rows():
    """One row for each rank."""
    return [row(), row() + 100]


def empty(count=2):
    return [torch.zeros(4) for _ in range(count)]


def at_root(tensors):
    return [tensors] if dist.get_rank() == 1 else []


def named():
    """The group in both forms in which torch gives it to an op: by its name, and itself."""
    return dist.group.WORLD.group_name, dist.group.WORLD


def functional(name):
    """What the op `name` returns when it is waited for."""
    ops, group, size = torch.ops._c10d_functional, dist.group.WORLD.group_name, dist.get_world_size()
    peer = 1 - dist.get_rank()
    calls = {
        "all_gather_into_tensor": lambda op: op(row(), size, group),
        "all_gather_into_tensor_coalesced": lambda op: op([row(), row(2)], size, group),
        "all_gather_into_tensor_out": lambda op: [op(row(), size, one, out=torch.zeros(8)) for one in named()],
        "all_reduce": lambda op: op(row(), "sum", group),
        "all_reduce_": lambda op: op(row(), "max", group),
        "all_reduce_coalesced": lambda op: op([row(), row(2)], "max", group),
        "all_reduce_coalesced_": lambda op: op([row(), row(2)], "max", group),
        "all_to_all_single": lambda op: op(row(), [2, 2], [2, 2], group),
        "batch_p2p_ops": lambda op: op(["isend", "irecv"], [peer, peer], [0, 0], [row(), torch.zeros(4)], group),
        "broadcast": lambda op: op(row(), 1, group),
        "broadcast_": lambda op: op(row(), 1, group),
        "reduce_scatter_tensor": lambda op: op(row(), "max", size, group),
        "reduce_scatter_tensor_coalesced": lambda op: op([row(), row(2)], "max", size, group),
        "reduce_scatter_tensor_out": lambda op: op(row(), "sum", size, group, out=torch.zeros(2)),
        "wait_tensor": lambda op: op(row()),
        "_wrap_tensor_autograd": lambda op: op(row()),
        "isend": lambda op: op(row(), 1, 0, group) if peer else ops.irecv(torch.zeros(4), 0, 0, group),
        "irecv": lambda op: op(torch.zeros(4), 1, 0, group) if peer else ops.isend(row(), 0, 0, group),
    }
    returned = calls[name](getattr(ops, name))
    waited = [ops.wait_tensor(each) for each in (returned if isinstance(returned, list) else [returned])]
    return [each.tolist() for each in waited]


def autograd(name):
    """What the op `name` of the differentiable ones returns."""
    op, group = getattr(torch.ops._c10d_functional_autograd, name), dist.group.WORLD.group_name
    calls = {
        "all_gather_into_tensor": lambda: op(row(), 2, group),
        "all_to_all_single": lambda: op(row(), [2, 2], [2, 2], group),
        "reduce_scatter_tensor": lambda: op(row(), "sum", 2, group),
    }
    return torch.ops._c10d_functional.wait_tensor(calls[name]()).tolist()


def dtensor(name):
    group = dist.group.WORLD.group_name
    calls = {"shard_dim_alltoall": lambda op: op(row(8).view(2, 4), 0, 1, group)}
    if name == "mesh_get_process_group":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return [torch.ops._dtensor.mesh_get_process_group(mesh, 0).group_name]
    return torch.ops._c10d_functional.wait_tensor(calls[name](getattr(torch.ops._dtensor, name))).tolist()


def direct(name):
    """What is in the tensors of the op `name` of c10d when its work is done."""
    group, add, peer = dist.group.WORLD.boxed(), torch.classes.c10d.ReduceOp(), 1 - dist.get_rank()
    one, out, both, wide = [row()], empty(1), empty(), torch.zeros(8)
    token, put = torch.zeros(1), rows()
    recv = torch.ops.c10d.recv_
    calls = {
        "_allgather_base_": lambda op: op(wide, row(), group),
        "_reduce_scatter_base_": lambda op: op(out[0], row(8), group, add),
        "allgather_": lambda op: op([both], one, group),
        "allgather_coalesced_": lambda op: op([both[:1], both[1:]], one, group),
        "allgather_into_tensor_coalesced_": lambda op: op([wide], one, group),
        "allreduce_": lambda op: op(one, group, add, None),
        "allreduce_coalesced_": lambda op: op(one, group, add),
        "alltoall_": lambda op: op(both, put, group),
        "alltoall_base_": lambda op: op(wide, row(8), group, [], []),
        "barrier": lambda op: op(token, group, []),
        "broadcast_": lambda op: op(one, group, 1, 0),
        "check_for_nan": lambda op: op(token),
        "gather_": lambda op: op(at_root(both), one, group, 1),
        "monitored_barrier_": lambda op: op(token, group, [], 60_000, False),
        "recv_": lambda op: op(out, group, peer, 0) if peer else torch.ops.c10d.send(one, group, peer, 0),
        "recv_any_source_": lambda op: op(out, group, 0) if peer else torch.ops.c10d.send(one, group, peer, 0),
        "reduce_": lambda op: op(one, group, add, 1, 0),
        "reduce_scatter_": lambda op: op(out, [put], group, add),
        "reduce_scatter_tensor_coalesced_": lambda op: op(out, [row(8)], group, add),
        "scatter_": lambda op: op(out, at_root(put), group, 1),
        "send": lambda op: op(one, group, peer, 0) if peer else recv(out, group, peer, 0),
    }
    returned = calls[name](getattr(torch.ops.c10d, name))
    work = returned[-1] if isinstance(returned, tuple) else returned
    if work is not None:
        dist.Work.unbox(work).wait()
    if name == "reduce_" and dist.get_rank() == 0:
        return None  # whatever is left there
    return [each.tolist() for each in (*one, *out, *both, wide)]


CALLS = {
    "c10d::": direct,
    "_c10d_functional::": functional,
    "_c10d_functional_autograd::": autograd,
    "_dtensor::": dtensor,
}


def called():
    """{op: what it did, or its error}, of every op that torch has."""
    found = {}
    for name in known():
        space, op = name.split("::")
        try:
            found[name] = CALLS[f"{space}::"](op)
        except Exception as error:  # an unknown op is one of the things to find
            found[name] = f"{type(error).__name__}: {error}"
        dist.barrier()
    return found


def greatest():
    """What a reduce to rank 1, and a reduce_scatter, make of the greatest elements."""
    reduced, part = row(), torch.zeros(4)
    dist.reduce(reduced, 1, dist.ReduceOp.MAX)
    dist.reduce_scatter(part, rows(), dist.ReduceOp.MAX)
    return (reduced.tolist() if dist.get_rank() == 1 else None), part.tolist()


# Observed calls -------------------------------------------------------------------------------------------------------


def collectives():
    """Every collective of torch.distributed, on small tensors: {name: call}."""
    peer, group = 1 - dist.get_rank(), dist.group.WORLD
    exchange = [dist.P2POp(dist.isend, row(), peer), dist.P2POp(dist.irecv, torch.zeros(4), peer)]
    gathered = empty() if dist.get_rank() == 1 else None
    return {
        "all_reduce": lambda: dist.all_reduce(row()),
        "all_reduce, async": lambda: dist.all_reduce(row(), async_op=True).wait(),
        "broadcast": lambda: dist.broadcast(row(), 1),
        "reduce": lambda: dist.reduce(row(), 1),
        "all_gather": lambda: dist.all_gather(empty(), row()),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.zeros(8), row()),
        "gather": lambda: dist.gather(row(), gathered, 1),
        "scatter": lambda: dist.scatter(torch.zeros(4), rows() if peer == 0 else None, 1),
        "reduce_scatter": lambda: dist.reduce_scatter(torch.zeros(4), rows()),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.zeros(2), row()),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.zeros(4), row()),
        "barrier": dist.barrier,
        "monitored_barrier": group.monitored_barrier,
        "send": lambda: dist.send(row(), 1) if peer else dist.recv(torch.zeros(4), 0),
        "batch": lambda: [work.wait() for work in dist.batch_isend_irecv(exchange)],
        "all_gather_object": lambda: dist.all_gather_object([None, None], {"rank": peer}),
        "functional": lambda: torch.ops._c10d_functional.wait_tensor(
            torch.ops._c10d_functional.all_reduce(row(), "sum", group.group_name)
        ),
    }


class Ops(TorchDispatchMode):
    """Keeps the names of torch's ops of collectives; computes with tensors itself, as modes may."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func).startswith(("c10d", "_c10d")):
            self.names.append(str(func))
            assert float(torch.ones(2).sum()) == 2
        return func(*args, **kwargs or {})


def dispatched():
    """{collective: the ops that two modes, one in the other, see}."""
    found = {}
    for name, call in collectives().items():
        with Ops() as outer, Ops() as inner:
            call()
        found[name] = [outer.names, inner.names]
    return found


def summed_under_a_mode():
    """The sum that an observed all_reduce writes, of dense and of sparse tensors; and what it raises."""
    dense, sparse = row(), row().to_sparse()
    with Ops():
        dist.all_reduce(dense)
        dist.all_reduce(sparse)
        try:
            dist.all_reduce(row(), op=None)
        except Exception as error:
            said = type(error).__name__
    return dense.tolist(), sparse.to_dense().tolist(), said


def other_group_in_a_mode():
    """Under a mode that itself sums over a group of Gloo: the sums of both groups."""
    gloo = dist.new_group(backend="gloo")
    inner = []

    class Sums(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if str(func).startswith("c10d") and not inner:
                inner.append(row())
                dist.all_reduce(inner[0], group=gloo)
            return func(*args, **kwargs or {})

    tensor = row()
    with Sums():
        dist.all_reduce(tensor)
    return tensor.tolist(), inner[0].tolist()


def of_fake_tensors():
    """The shape that an all_reduce of fake tensors leaves, and that nothing was sent."""
    from torch._subclasses import FakeTensorMode  # noqa: PLC0415

    with FakeTensorMode():
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        gathered = torch.empty(6)
        dist.all_gather_into_tensor(gathered, tensor)
    return list(tensor.shape), list(gathered.shape), type(tensor).__name__


def profiled():
    """{collective: (event, its tensors' sizes)} in torch's profiler, in order of names."""
    found = {}
    for name, call in collectives().items():
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
            call()
        events = [event for event in seen.events() if event.name.startswith(("c10d::", "gloo:", "commrt::"))]
        found[name] = sorted((event.name, str(event.input_shapes)) for event in events)
    return found


def profiled_threads():
    """The events of commrt on other threads than this one, in a profile of all threads."""
    config = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as seen:
        dist.all_reduce(row(), async_op=True).wait()
    calls = {event.thread for event in seen.events() if event.name == "commrt::all_reduce"}
    found = (event.name for event in seen.events() if event.thread not in calls)
    return [name for name in found if name.startswith("commrt::all_reduce")]
