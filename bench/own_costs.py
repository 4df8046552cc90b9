# SPDX-License-Identifier: Apache-2.0
"""How what the runtime itself costs grows: ``python bench/own_costs.py``; with ranks, with tensors, with bytes.

Preparing: seconds to build a schedule, to prove it, to find and bind one rank's program, and to price it. Attaching and
stepping: two processes, models of more and more parameters of 64 elements, with ours and without. Memory: what four
processes have more than a model and its gradients, in parts of the gradients' bytes (proportional set size).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from null_transport import NullTransport
from records import Record, append, provenance
from torch import nn

import commrt
from commrt.algorithms.catalogue import ALGORITHMS
from commrt.cluster import Between, Cluster, Link
from commrt.collective import all_reduce
from commrt.executor import bind
from commrt.kernels.layout import GRANULE
from commrt.program import program
from commrt.proof import verify
from commrt.simulate import Pricing
from commrt.testing.processes import run_processes

RANKS = (64, 256, 1024, 4096)
MOST_PROVEN = 1024
TENSORS = (1_000, 10_000, 100_000)
ELEMENTS = 64
STEPS = 10
MODEL_NUMEL, MODEL_PARTS = 25_557_032, 160
FLAT = Cluster("flat", "", 1, Link(10.0, 10.0), Between(10.0, 10.0))


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, the best of three, and what came of it."""
    times_s = []
    for _ in range(3):
        begin_s = perf_counter()
        found = work()
        times_s.append(perf_counter() - begin_s)
    return min(times_s), found


def preparing() -> Iterator[Record]:
    """By algorithm and number of ranks."""
    for name, make in ALGORITHMS.items():
        for ranks in RANKS:
            schedule = make().schedule(0, ranks)
            found = {"build_s": timed(lambda schedule=schedule: sum(1 for _ in schedule.steps()))[0]}
            found["program_s"], mine = timed(lambda schedule=schedule: program(schedule, 0))
            buffer, transport = torch.zeros(mine.chunks * GRANULE), NullTransport(0, ranks)
            found["bind_s"], _ = timed(lambda mine=mine, b=buffer, t=transport: bind(mine, b, t))
            found["simulate_s"], _ = timed(lambda schedule=schedule: Pricing(schedule, FLAT).price(1e8))
            if ranks <= MOST_PROVEN:
                spec = all_reduce(ranks, schedule.chunks)
                found["verify_s"], proof = timed(lambda schedule=schedule, spec=spec: verify(schedule, spec))
                if not proof.ok:
                    raise RuntimeError(f"{schedule.name} is wrong: nothing was measured")
            yield {"suite": "own costs", "case": f"preparing, {ranks} ranks", "variant": name, **found, **provenance()}


class Parts(nn.Module):
    """As many parameters."""

    def __init__(self, count: int, numel: int) -> None:
        super().__init__()
        self.params = nn.ParameterList([nn.Parameter(torch.zeros(numel)) for _ in range(count)])

    def forward(self) -> torch.Tensor:
        """All gradients are ones."""
        return torch.stack([param.sum() for param in self.params]).sum()


def attach_and_step(_: Callable[[Any], None], count: int) -> dict[str, float]:
    """On one of two ranks: seconds of `attach`, and of a backward pass with it and without."""
    torch.set_num_threads(1)
    with commrt.init(120.0, start_timeout_s=120.0) as world:
        model = Parts(count, ELEMENTS)
        alone_s = backward_s(model)
        begin_s = perf_counter()
        commrt.attach(model, algorithm=commrt.Ring())
        attach_s = perf_counter() - begin_s
        with_ours_s = backward_s(model)
        if any((param.grad != 1).any() for param in model.params):
            raise RuntimeError("wrong averages: nothing was measured")
        world.agree("measured")
    return {"attach_s": attach_s, "backward_s": with_ours_s, "backward_alone_s": alone_s}


def backward_s(model: Parts) -> float:
    """The best of some."""
    times_s = []
    gc.disable()
    for _ in range(STEPS):
        model.zero_grad()
        loss = model()
        begin_s = perf_counter()
        loss.backward()
        times_s.append(perf_counter() - begin_s)
    gc.enable()
    return min(times_s)


def memory(_: Callable[[Any], None], wire: torch.dtype | None) -> float:
    """On one of four ranks: bytes that attaching and stepping took, over the bytes of gradients."""
    torch.set_num_threads(1)
    with commrt.init(120.0, start_timeout_s=120.0) as world:
        model = Parts(MODEL_PARTS, MODEL_NUMEL // MODEL_PARTS)
        model().backward()
        world.agree("before")
        before = proportional_nbytes()
        world.agree("seen")
        commrt.attach(model, algorithm=commrt.Ring(), wire=wire)
        for _ in range(3):
            model.zero_grad(set_to_none=False)
            model().backward()
        world.agree("after")
        after = proportional_nbytes()
        world.agree("seen again")
    return (after - before) / (4 * MODEL_NUMEL)


def proportional_nbytes() -> int:
    """What this process has of memory; its share of what it shares, without what was freed."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def of_processes(ranks: int, work: Callable[..., Any], argument: Any) -> list[Any]:
    """What each returns; raises what one raised."""
    outcomes = run_processes(ranks, work, argument, limit_s=300)
    if broken := [str(outcome.error) for outcome in outcomes if outcome.value is None]:
        raise RuntimeError(broken[0])
    return [outcome.value for outcome in outcomes]


def stepping() -> Iterator[Record]:
    """By number of tensors; the slower rank's."""
    for count in TENSORS:
        each = of_processes(2, attach_and_step, count)
        found = {key: max(one[key] for one in each) for key in each[0]}
        found["us_per_tensor"] = 1e6 * (found["backward_s"] - found["backward_alone_s"]) / count
        yield {"suite": "own costs", "case": f"{count:,} tensors", "variant": "ring", **found, **provenance()}


def holding() -> Iterator[Record]:
    """By wire."""
    for name, wire in (("fp32", None), ("bf16", torch.bfloat16)):
        parts = of_processes(4, memory, wire)
        found = {"of_gradients": sum(parts) / len(parts), "most_of_gradients": max(parts)}
        yield {"suite": "own costs", "case": "memory", "variant": f"ring, {name}", **found, **provenance()}


SUITES = {"preparing": preparing, "stepping": stepping, "memory": holding}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=SUITES, action="append", help="may be repeated; all of them otherwise")
    parser.add_argument("--records", type=Path, help="append them to this file, as JSON lines")
    options = parser.parse_args()
    for name in options.only or SUITES:
        for found in SUITES[name]():
            figures = {key: value for key, value in found.items() if isinstance(value, float)}
            said = ", ".join(f"{key} {value:.4g}" for key, value in figures.items())
            print(f"{found['case']:<24} {found['variant']:<18} {said}", flush=True)
            append(options.records, [found])


if __name__ == "__main__":
    main()
