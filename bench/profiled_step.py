# SPDX-License-Identifier: Apache-2.0
"""Profile steps of ResNet-50 by torch's profiler, and keep what a GPU did in one of them as a small record.

The record has, for each way to train, the kernels of one step of rank 0: class, stream, begin and duration. A class is
a part of the step, or what commrt or NCCL did. `docs/site/step_picture.py` draws it.
"""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from gpu_ranks import CPU, Tell
from torch.profiler import ProfilerActivity, profile, record_function
from training_models import WORKLOADS
from training_steps import DDP, WARM_STEPS, WAYS, Built, Worlds, about, built, detach, grouped

__all__ = ["Profile", "profiled", "read_trace", "write"]

Event = dict[str, Any]
"""An event of a Chrome trace; times are in us."""
PROFILED = (DDP, "direct, by calls", "direct, by graphs")
STEPS = 3
STEP = "training step"
PHASES = "forward", "backward", "optimizer"
BY_NAME = {"pack_kernel": "pack", "unpack_kernel": "unpack", "signal_wait_kernel": "wait", "reduce_kernel": "reduce"}
CLASSES = (*PHASES, *BY_NAME.values(), "nccl", "copy", "other")
RANGES = "commrt::bucket", "commrt::graph", "commrt::wait"
"""What is kept of the host's ranges."""
COMMRT = {*BY_NAME.values(), "nccl"}


class Profile(NamedTuple):
    """What a GPU did in one step; times are in us from the step's first kernel."""

    us: float
    """Until the first kernel of the next step."""
    kernels: list[tuple[int, int, float, float]]
    """(class, stream, begin, duration); classes count in `CLASSES`, streams from 0 by their first kernel."""
    host: list[tuple[str, float, float]]
    """(name, begin, duration) of commrt's ranges on the host in that time."""

    def sums_us(self) -> dict[str, float]:
        """Return the total duration of each class."""
        sums: Counter[str] = Counter()
        for kind, _, _, duration in self.kernels:
            sums[CLASSES[kind]] += duration
        return {kind: round(total, 1) for kind, total in sums.items()}


def profiled(_: Tell) -> dict[str, Any]:
    """Profile ResNet-50 on rank 0, in each way of `PROFILED`; return the record."""
    found = {}
    with grouped() as device:
        workload, worlds = WORKLOADS["resnet50"](device), Worlds(device)
        for way in PROFILED:
            one = built(way, WAYS[way], workload, worlds)
            for _step in range(WARM_STEPS):
                one.step()
            one.settle()
            dist.barrier()
            trace = traced(one, listens=dist.get_rank() == 0)
            detach(one)
            step = read_trace(trace)
            found[way] = {**step._asdict(), "sums_us": step.sums_us()}
        told = about(device, workload)
        worlds.close()
    return {"about": told, "classes": CLASSES, "profiles": found}


def traced(one: Built, *, listens: bool) -> list[Event]:
    """Take `STEPS` steps; return their trace if this rank `listens`."""

    def steps() -> None:
        for _ in range(STEPS):
            with record_function(STEP):
                one.workload.step(one.forward, one.optimizer, ranged)
        one.settle()

    if not listens:
        steps()
        return []
    on_gpu = one.workload.inputs.device != CPU
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]
    with profile(activities=activities, experimental_config=all_threads()) as profiler:
        steps()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events: list[Event] = json.loads(path.read_text())["traceEvents"]
    return events


def ranged(name: str) -> AbstractContextManager[object]:
    """Return a range for torch's profiler."""
    return record_function(name)


def all_threads() -> Any:
    """Return what makes the profiler watch the communication thread too."""
    from torch.profiler import _ExperimentalConfig  # noqa: PLC0415  # not in every torch

    return _ExperimentalConfig(profile_all_threads=True)


def read_trace(events: Sequence[Event]) -> Profile:
    """Return the last step but one of a trace; empty if no GPU worked."""
    phases = Phases(events)
    kernels = sorted((e for e in events if e.get("cat", "").startswith(("kernel", "gpu_mem"))), key=lambda e: e["ts"])
    training = [kernel for kernel in kernels if phases.of(kernel) == "forward"]
    begins = [next((k["ts"] for k in training if phases.launch_of(k) >= begin), None) for begin in phases.steps]
    if len(begins) < 2 or None in begins[-2:]:
        return Profile(0.0, [], [])
    begin, end = begins[-2:]
    shown = [kernel for kernel in kernels if begin <= kernel["ts"] < end]
    host = [
        (event["name"].removeprefix("commrt::"), round(event["ts"] - begin, 1), round(event["dur"], 1))
        for event in events
        if event.get("name", "").startswith(RANGES) and begin <= event["ts"] < end
    ]
    return Profile(round(end - begin, 1), list(classified(shown, phases, begin)), host)


class Phases:
    """When the host was in which part of a step, and when it launched what."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._launched, self._begins, steps = dict[int, float](), list[tuple[float, float, str]](), set[float]()
        for event in events:
            category, name = event.get("cat", ""), event.get("name", "")
            correlation = event.get("args", {}).get("correlation")
            if category in ("cuda_runtime", "cuda_driver") and correlation is not None:
                self._launched[correlation] = event["ts"]
            elif category == "user_annotation" and name in PHASES:
                self._begins.append((event["ts"], event["ts"] + event["dur"], name))
            elif category == "user_annotation" and name == STEP:
                steps.add(event["ts"])
        self._begins.sort()
        self.steps = sorted(steps)
        """When the host began each step."""

    def launch_of(self, kernel: Event) -> float:
        """Return when `kernel` was launched, as far as known, else when it began."""
        return self._launched.get(kernel.get("args", {}).get("correlation"), kernel["ts"])

    def of(self, kernel: Event) -> str:
        """Return the part of a step that launched `kernel`, or an empty string."""
        at = self.launch_of(kernel)
        place = bisect_right(self._begins, (at, float("inf"), "")) - 1
        return self._begins[place][2] if place >= 0 and at < self._begins[place][1] else ""


def classified(kernels: Sequence[Event], phases: Phases, begin: float) -> Iterator[tuple[int, int, float, float]]:
    """Yield the rows of `kernels`. What is not named goes by its stream: a copy beside commrt's, else a part."""
    streams = [kernel["args"].get("stream", 0) for kernel in kernels]
    numbers = {stream: number for number, stream in enumerate(dict.fromkeys(streams))}
    exchanging = {stream for kernel, stream in zip(kernels, streams, strict=True) if named(kernel) in COMMRT}
    for kernel, stream in zip(kernels, streams, strict=True):
        part = "copy" if stream in exchanging and numbers[stream] else phases.of(kernel) or "other"
        kind = CLASSES.index(named(kernel) or part)
        yield kind, numbers[stream], round(kernel["ts"] - begin, 1), round(kernel["dur"], 1)


def named(kernel: Event) -> str:
    """Return the class that the name of a kernel tells, or an empty string."""
    name = kernel["name"]
    return "nccl" if name.startswith("nccl") else BY_NAME.get(name, "")


def write(path: Path | None, record: dict[str, Any]) -> None:
    """Write the record, if there is a place for it."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, separators=(",", ":")) + "\n")
