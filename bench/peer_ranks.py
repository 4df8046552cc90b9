# SPDX-License-Identifier: Apache-2.0
"""The work of each process of `test_peers`: exchanges through the memory of GPUs that ranks of one host map.

Every function is ``body(tell, ...)`` of `commrt.testing.processes`; what it measures is interleaved.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from time import perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist
from gpu_ranks import CPU, START_S, Tell, opened, place, waited
from interleaved import Times
from torch import Tensor

import commrt
from commrt.algorithms.catalogue import by_name
from commrt.errors import CommrtError
from commrt.kernels.dispatch import adding, copying, packing
from commrt.kernels.layout import layout_of
from commrt.kernels.packing import Parts
from commrt.program import program
from commrt.runtime.executor import BoundProgram, bind
from commrt.runtime.reading import bind_reading
from commrt.runtime.world import World
from commrt.transport.protocol import Tag

__all__ = ["kernels", "race", "repeat_by_graphs", "rounds", "struck"]

TORCH = "torch.distributed.all_reduce"
MIB = 1 << 20


class Row:
    """A buffer in peers' memory, and an all-reduce of it."""

    def __init__(self, world: World, numel: int, dtype: torch.dtype, device: torch.device, name: str) -> None:
        self.world, self.name = world, name
        self.buffer = self._on_comm_thread(lambda: world.transport.allocate_shared(numel, dtype, device))
        self.window = next(iter(self._on_comm_thread(lambda: world.transport.share([self.buffer]))), None)
        if self.window is None:
            raise RuntimeError(f"no windows here, only {world.transport.kind}: nothing was measured")
        self.calls = self._bound(reads=True)

    def _on_comm_thread(self, work: Callable[[], Any]) -> Any:
        return self.world.comm_thread.submit(work).result()

    def _bound(self, *, reads: bool) -> BoundProgram:
        world = self.world
        mine = program(by_name(self.name).schedule(0, world.size), world.rank)
        if reads:
            return self._on_comm_thread(lambda: bind_reading(mine, self.buffer, self.window, world.transport))
        return self._on_comm_thread(lambda: bind(mine, self.buffer, world.transport, streams=world.comm_thread.streams))

    def by_calls(self, times: int = 1) -> None:
        """Exchange, one call after the other."""
        self._on_comm_thread(lambda: [self.calls.run(Tag(number, 0)) for number in range(times)])

    def by_nccl(self) -> Callable[[int], None]:
        """Return a function that exchanges through NCCL."""
        bound = self._bound(reads=False)
        return lambda times: self._on_comm_thread(lambda: [bound.run(Tag(number, 0)) for number in range(times)])

    def captured(self, *, reads: bool = True) -> Callable[[int], None]:
        """Return a function that exchanges by a graph."""
        bound = self.calls if reads else self._bound(reads=False)
        self._on_comm_thread(lambda: bound.run(Tag(0, 0)))  # peers connect
        transport = self.world.transport
        replay = self._on_comm_thread(lambda: transport.capture(lambda: bound.run(Tag(-1, 0)), bound.group))
        if replay is None:
            raise RuntimeError("the device made no graph")
        return lambda times: self._on_comm_thread(lambda: [replay(Tag(number, 0)) for number in range(times)])


def race(_: Tell, nbytes: Sequence[int], names: Sequence[str], rounds: int, times: int, *, nccl: bool) -> list[Times]:
    """Return, for each size, the seconds of interleaved all-reduces of fp32; raise if a sum is wrong.

    Each sample is the mean of `times` in a row.
    """
    device = place()
    dist.init_process_group("gloo" if device == CPU else "nccl", timeout=timedelta(seconds=START_S))
    with opened(device) as world:
        found = [_raced(world, size // 4, device, names, rounds, times, nccl) for size in nbytes]
        dist.barrier()
    dist.destroy_process_group()
    return found


def _raced(
    world: World, numel: int, device: torch.device, names: Sequence[str], rounds: int, times: int, nccl: bool
) -> Times:
    theirs = torch.empty(numel, device=device)
    ways: dict[str, tuple[Tensor, Callable[[int], object]]] = {
        TORCH: (theirs, lambda count: [dist.all_reduce(theirs) for _ in range(count)])
    }
    for name in names:
        row = Row(world, numel, torch.float32, device, name)
        ways[f"{name}, peers' memory, by calls"] = row.buffer, row.by_calls
        ways[f"{name}, peers' memory, by graph"] = row.buffer, row.captured()
        if nccl:
            ways[f"{name}, NCCL's send and receive, by calls"] = row.buffer, row.by_nccl()
            ways[f"{name}, NCCL's send and receive, by graph"] = row.buffer, row.captured(reads=False)
    seconds: Times = {way: [] for way in ways}
    for turn in range(-2, rounds):
        for way, (buffer, run) in ways.items():
            taken = _timed(run, buffer, world, times)
            seconds[way] += [taken] * (turn >= 0)
    return seconds


def _timed(run: Callable[[int], object], buffer: Tensor, world: World, times: int) -> float:
    buffer.fill_((1.0 + world.rank) / 2**20)
    dist.barrier()
    waited(buffer.device)
    begin_s = perf_counter()
    run(times)
    seconds = (waited(buffer.device) - begin_s) / times
    want = world.size * (world.size + 1) / 2 * world.size ** (times - 1) / 2**20
    if not bool(((buffer - want).abs() <= 1e-5 * want).all()):
        raise RuntimeError(f"an all-reduce ended with {buffer[0].item()} and not {want}: nothing was measured")
    return seconds


def rounds(_: Tell, name: str, numel: int, count: int, seed: int) -> tuple[int, str]:
    """Exchange `count` times with random delays, by calls and by a graph; check every word, on the device.

    Returns the rounds done, and what was wrong.
    """
    device = place()
    with opened(device) as world:
        row = Row(world, numel, torch.int32, device, name)
        graph = row.captured()
        random = torch.Generator().manual_seed(100 * seed + world.rank)
        wrong = torch.zeros((), dtype=torch.int64, device=device)
        index = torch.arange(numel, dtype=torch.int32, device=device)
        total = world.size * (world.size + 1) // 2
        stream = torch.cuda.Stream(device) if device != CPU else None
        for number in range(count):
            row.buffer.copy_((index + number) * (world.rank + 1))
            delay = torch.rand((), generator=random).item()
            if delay < 0.02:
                sleep(delay / 100)
            elif delay < 0.1 and stream is not None:
                torch.cuda._sleep(int(delay * 1e5))  # holds up the stream
            (row.by_calls if number % 3 else graph)(1)
            wrong += (row.buffer != (index + number) * total).sum()
        waited(device)
        return count, f"{int(wrong)} words are wrong" if int(wrong) else ""


def repeat_by_graphs(_: Tell, steps: int) -> tuple[bool, list[str], list[float]]:
    """Train with graphs and without; return whether the bits are equal, why not graphs, and the host's seconds."""
    device = place()
    ended, why, host_s = [], [""], []
    for graphs in (True, False):
        with opened(device) as world:
            torch.manual_seed(0)
            layers = (torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 256), torch.nn.Linear(256, 10))
            model = torch.nn.Sequential(*layers).to(device)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            replica = commrt.attach(model, optimizer, commrt.Direct(), world=world, bucket_cap_mb=0.1, graphs=graphs)
            total = torch.ones(1000, device=device)
            for step in range(steps):
                generator = torch.Generator().manual_seed(1000 * step + world.rank)
                x = torch.randn(16, 64, generator=generator).to(device)
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                if step % 50 == 3:
                    world.all_reduce(total, "mean")
                host_s += [span.end_s - span.begin_s for span in replica.last.spans] if graphs and step > 9 else []
            if graphs:
                why = sorted(set(replica.why_not_graphs().values()))
            replica.detach()
            ended.append([param.detach().cpu() for param in model.parameters()])
    return all(map(torch.equal, *ended)), why, sorted(host_s)


def kernels(_: Tell, numel: int, repeats: int) -> dict[str, list[float]]:
    """Return GB/s, bytes read and written, of a copy and of kernels on peers' memory, while all others wait."""
    device, rates = place(), dict[str, list[float]]()
    dist.init_process_group("nccl", timeout=timedelta(seconds=START_S))
    with opened(device) as world:
        for dtype in (torch.float32, torch.bfloat16):
            row = Row(world, numel, dtype, device, "direct")
            own, theirs = row.buffer, [row.window.peers[peer] for peer in sorted(row.window.peers)]
            here = torch.empty_like(own), torch.empty_like(own)
            size = own.nbytes
            work = {
                "copy of own memory": (copying(*here), 2 * size),
                "copy from a peer": (copying(here[0], theirs[0]), 2 * size),
                f"add {len(theirs)} of own memory": (
                    adding(here[0], [here[0], *([here[1]] * len(theirs))]),
                    (2 + len(theirs)) * size,
                ),
                f"add {len(theirs)} from peers": (adding(here[0], [here[0], *theirs]), (2 + len(theirs)) * size),
            }
            work |= _unpacking(own, theirs[0])
            for turn in range(world.size):
                dist.barrier()
                waited(device)
                if turn == world.rank == 0:
                    for _ in range(repeats):
                        for what, (run, moved) in work.items():
                            rates.setdefault(f"{what}, {dtype}", []).append(moved / 1e9 / _gpu_s(run))
            dist.barrier()
            waited(device)
    dist.destroy_process_group()
    return rates


def _unpacking(wire: Tensor, theirs: Tensor) -> dict[str, tuple[Callable[[], None], int]]:
    """Return what unpacks large fp32 tensors from this rank's wire, and from a peer's; and the bytes that it moves."""
    layout = layout_of([wire.numel() // 8 - 4096] * 8)
    tensors = [torch.empty(count, device=wire.device) for count in layout.counts]
    packed = packing(wire[: layout.numel], layout, tensors)
    begin = layout.offsets[0]
    parts = Parts([(theirs[begin : layout.numel], begin, layout.numel)])
    moved = sum(layout.counts) * (4 + wire.itemsize)
    return {
        "unpack from own memory": (lambda: packed.unpack(tensors, 0), moved),
        "unpack from a peer": (lambda: packed.unpack(tensors, 0, parts=parts), moved),
    }


def _gpu_s(run: Callable[[], None], times: int = 10) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    begin.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / times


def struck(tell: Tell, timeout_s: float, phase: str, way: str) -> dict[str, Any]:
    """Let the last rank be struck in an exchange; the others return their error, and exchange without it.

    `phase` is where it is struck: between exchanges, or while its own kernel waits for the others.
    """
    device, rank, size = place(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    told: dict[str, Any] = {}
    with suppress(CommrtError), opened(device) as world:
        row = Row(world, 1 << 22, torch.float32, device, "direct")
        run = row.captured() if way == "by graph" else row.by_calls
        for _ in range(3):
            run(1)
        waited(device)
        world.transport.timeout_s = timeout_s
        told["free before"] = free_mib(device)
        if rank == size - 1:
            if phase == "in a wait":
                run(1)
            tell("strike me")
            while True:
                signal.pause()
        sleep(1.0)
        begin_s = perf_counter()
        try:
            while True:
                run(1)
                world.wait()
        except CommrtError as error:
            told |= {"seconds": perf_counter() - begin_s, "error": f"{type(error).__name__}: {error}"}
        del row, run
    told["free after"] = free_mib(device)
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    os.environ |= {"WORLD_SIZE": str(size - 1), "MASTER_PORT": os.environ["SECOND_PORT"]}
    with opened(device) as world:
        row = Row(world, 1 << 16, torch.float32, device, "direct")
        row.buffer.fill_(1.0 + rank)
        row.by_calls()
        told["sum without it"] = row.buffer[-1].item() == size * (size - 1) / 2
    return told


def free_mib(device: torch.device) -> int:
    """Return the free memory of `device` in MiB."""
    waited(device)
    return torch.cuda.mem_get_info(device)[0] >> 20 if device != CPU else 0
