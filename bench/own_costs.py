# SPDX-License-Identifier: Apache-2.0
"""Measure how commrt's own costs grow with the number of tensors and of bytes: ``python bench/own_costs.py``.

Time: two processes attach and step models with more and more parameters of 64 elements, with commrt and alone.
Memory: what four processes hold besides a model and its gradients, divided by the gradients' bytes (proportional set
size).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch
from records import Record, append, provenance
from torch import nn

import commrt
from commrt.buckets.digest import Digest
from commrt.testing.processes import run_processes

TENSORS = (1_000, 10_000, 100_000)
ELEMENTS = 64
STEPS, TURNS = 10, 7
Gradients = Literal["own", "views"]
HELD: tuple[tuple[str, torch.dtype | None, Gradients], ...] = (
    ("fp32", None, "own"),
    ("fp32, views", None, "views"),
    ("bf16", torch.bfloat16, "own"),
)
MODEL_NUMELS, MODEL_PARTS = (6_389_440, 25_557_120, 102_228_160), 160


class Parts(nn.Module):
    """A model of `count` parameters of `numel` elements."""

    def __init__(self, count: int, numel: int) -> None:
        super().__init__()
        self.params = nn.ParameterList([nn.Parameter(torch.zeros(numel)) for _ in range(count)])

    def forward(self) -> torch.Tensor:
        """Return a sum, so that all gradients are ones."""
        return torch.stack([param.sum() for param in self.params]).sum()


def attach_and_step(_: Callable[[Any], None], count: int) -> dict[str, float]:
    """Return the seconds of `attach`, and of a backward pass with it and without, on one of two ranks."""
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
    """Return the least seconds of some backward passes."""
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


def memory(_: Callable[[Any], None], numel: int, wire: torch.dtype | None, gradients: Gradients) -> float:
    """Return the bytes that commrt takes on one of four ranks, over the bytes of gradients."""
    torch.set_num_threads(1)
    with commrt.init(120.0, start_timeout_s=120.0) as world:
        model = Parts(MODEL_PARTS, numel // MODEL_PARTS)
        model().backward()
        world.agree("before")
        before = proportional_nbytes()
        world.agree("seen")
        commrt.attach(model, algorithm=commrt.Ring(), wire=wire, gradients=gradients)
        for _ in range(3):
            model.zero_grad(set_to_none=False)
            model().backward()
        world.agree("after")
        after = proportional_nbytes()
        world.agree("seen again")
    return (after - before) / (4 * numel)


def proportional_nbytes() -> int:
    """Return the proportional set size of this process, without memory that was freed."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def of_processes(ranks: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return the result of each process; raise if one failed."""
    outcomes = run_processes(ranks, work, *arguments, limit_s=300)
    if broken := [str(outcome.error) for outcome in outcomes if outcome.value is None]:
        raise RuntimeError(broken[0])
    return [outcome.value for outcome in outcomes]


def stepping() -> Iterator[Record]:
    """Yield times by number of tensors, of the slower rank."""
    for count in TENSORS:
        each = of_processes(2, attach_and_step, count)
        found = {key: max(one[key] for one in each) for key in each[0]}
        found["us_per_tensor"] = 1e6 * (found["backward_s"] - found["backward_alone_s"]) / count
        yield {"suite": "own costs", "case": f"{count:,} tensors", "variant": "ring", **found, **provenance()}


def holding() -> Iterator[Record]:
    """Yield memory by size of the model and by wire."""
    for numel in MODEL_NUMELS:
        for name, wire, gradients in HELD:
            parts = of_processes(4, memory, numel, wire, gradients)
            found = {"of_gradients": sum(parts) / len(parts), "most_of_gradients": max(parts)}
            case = f"memory, {numel / 1e6:.1f} million parameters"
            yield {"suite": "own costs", "case": case, "variant": f"ring, {name}", **found, **provenance()}


def watched_and_not(_: Callable[[Any], None], numel: int) -> dict[str, float]:
    """Return the seconds of a backward pass with a watch and without, in turns, on one of two ranks; and a digest's."""
    torch.set_num_threads(1)
    times: dict[bool, list[float]] = {False: [], True: []}
    with commrt.init(120.0, start_timeout_s=120.0) as world:
        models = {watch: Parts(MODEL_PARTS, numel // MODEL_PARTS) for watch in times}
        for watch, model in models.items():
            commrt.attach(model, algorithm=commrt.Ring(), watch=watch)
        for _ in range(TURNS):
            for watch, model in models.items():
                times[watch].append(backward_s(model))
        digest = Digest([*models[True].parameters()])
        digest.now()
        begin_s = perf_counter()
        digest.now()
        digest_s = perf_counter() - begin_s
        world.agree("measured")
    ratios = sorted(one / other for one, other in zip(times[True], times[False], strict=True))
    return {
        "backward_s": min(times[False]),
        "watched_to_not": ratios[TURNS // 2],
        "least": ratios[0],
        "most": ratios[-1],
        "digest_s": digest_s,
    }


def watching() -> Iterator[Record]:
    """Yield what ``watch=True`` costs a backward pass that hardly computes, of the slower rank."""
    for numel in MODEL_NUMELS[:2]:
        each = of_processes(2, watched_and_not, numel)
        found = {key: max(one[key] for one in each) for key in each[0]}
        case = f"watch, {numel / 1e6:.1f} million parameters"
        yield {"suite": "own costs", "case": case, "variant": "ring", **found, **provenance()}


SUITES = {"stepping": stepping, "memory": holding, "watch": watching}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=SUITES, action="append", help="run only this suite; may be repeated")
    parser.add_argument("--records", type=Path, help="append records to this file, as JSON lines")
    options = parser.parse_args()
    for name in options.only or SUITES:
        for found in SUITES[name]():
            figures = {key: value for key, value in found.items() if isinstance(value, float)}
            said = ", ".join(f"{key} {value:.4g}" for key, value in figures.items())
            print(f"{found['case']:<24} {found['variant']:<18} {said}", flush=True)
            append(options.records, [found])


if __name__ == "__main__":
    main()
