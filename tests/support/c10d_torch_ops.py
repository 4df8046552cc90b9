# SPDX-License-Identifier: Apache-2.0
"""torch's ops of collectives, called in a group of 2 ranks; each collective under observers."""

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode


def row(numel=4):
    return torch.arange(numel, dtype=torch.float32) + 10 * dist.get_rank()


def rows():
    return [row(), row() + 100]


def empty(count=2):
    return [torch.zeros(4) for _ in range(count)]


def named():
    """The group in both forms in which torch gives it to an op: by its name, and itself."""
    return dist.group.WORLD.group_name, dist.group.WORLD


def functional():
    """{op: what it returns when it is waited for}, of those that the compiler makes of collectives."""
    ops, group, size = torch.ops._c10d_functional, dist.group.WORLD.group_name, dist.get_world_size()
    peer = 1 - dist.get_rank()
    calls = {
        "all_gather_into_tensor": lambda op: op(row(), size, group),
        "all_gather_into_tensor_coalesced": lambda op: op([row(), row(2)], size, group),
        "all_gather_into_tensor_out": lambda op: [op(row(), size, one, out=torch.zeros(8)) for one in named()],
        "all_reduce": lambda op: op(row(), "sum", group),
        "all_reduce_": lambda op: op(row(), "max", group),
        "all_reduce_coalesced": lambda op: op([row(), row(2)], "max", group),
        "all_to_all_single": lambda op: op(row(), [2, 2], [2, 2], group),
        "batch_p2p_ops": lambda op: op(["isend", "irecv"], [peer, peer], [0, 0], [row(), torch.zeros(4)], group),
        "broadcast": lambda op: op(row(), 1, group),
        "reduce_scatter_tensor": lambda op: op(row(), "max", size, group),
        "reduce_scatter_tensor_coalesced": lambda op: op([row(), row(2)], "max", size, group),
        "isend": lambda op: op(row(), 1, 0, group) if peer else ops.irecv(torch.zeros(4), 0, 0, group),
        "irecv": lambda op: op(torch.zeros(4), 1, 0, group) if peer else ops.isend(row(), 0, 0, group),
    }
    found = {}
    for name, call in calls.items():
        returned = call(getattr(ops, name))
        listed = returned if isinstance(returned, list) else [returned]
        found[name] = [ops.wait_tensor(each).tolist() for each in listed]
    return found


def of_c10d():
    """What the op of an all_reduce leaves in its tensor, and whether that of a barrier returns."""
    group, tensor = dist.group.WORLD.boxed(), row()
    _, work = torch.ops.c10d.allreduce_([tensor], group, torch.classes.c10d.ReduceOp(), None)
    dist.Work.unbox(work).wait()
    return tensor.tolist(), dist.Work.unbox(torch.ops.c10d.barrier(torch.zeros(1), group, [])).wait()


def collectives():
    """Every collective of torch.distributed, on small tensors: {name: call}."""
    peer, group = 1 - dist.get_rank(), dist.group.WORLD
    exchange = [dist.P2POp(dist.isend, row(), peer), dist.P2POp(dist.irecv, torch.zeros(4), peer)]
    gathered = empty() if dist.get_rank() == 1 else None
    return {
        "all_reduce": lambda: dist.all_reduce(row()),
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
