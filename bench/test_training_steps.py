# SPDX-License-Identifier: Apache-2.0
"""Time training steps of several ranks that share a GPU: a plain loop, DDP, FSDP2 and commrt; profile one of them.

Times mean something only where the kernels of several processes can run at the same time, as under MPS. Without a GPU
the models are tiny and the ranks run on the CPU, which shows that this file runs.
"""

from __future__ import annotations

from importlib.util import find_spec

import profiled_step
import pytest
import training_steps
from gpu_timer import HAS_GPU
from interleaved import record
from test_ranks import run_processes, values
from training_steps import DDP, FEW, FSDP, NCCL, PLAIN, TORUS, WAYS, Raced

from commrt.testing.processes import Outcome

NEEDS_VISION = pytest.mark.skipif(find_spec("torchvision") is None, reason="torchvision is not installed")
LIMIT_S, BUDGET_S = 100.0, 70.0
ROUNDS = 7 if HAS_GPU else 1
MOST_CTAS = "4"
"""Thread blocks of NCCL on two ranks: more than `gpu_ranks.place` takes, which has to suit eight."""

LEFT_OUT = {
    "resnet50": {FSDP},  # which shards no parameters that are channels last
    "gpt": {
        way for way, how in WAYS.items() if how.algorithm == TORUS and (how.medium == NCCL or "wire" in how.options)
    },
}
"""The ways of a GPT on two ranks fit a GPU of 80 GB."""


def measured(outcomes: list[Outcome]) -> Raced:
    """Return what the ranks measured, each time the slowest rank's; after a hang, what rank 0 told before."""
    raced, told = [outcome.value for outcome in outcomes], outcomes[0].messages
    if not all(raced):
        ends = [outcome.error or "hung, or not done in time" for outcome in outcomes]
        assert told, ends
        told[-1].errors["all"] = f"after {list(told[-1].facts)[-1:]} the ranks ended: {ends}"
        return told[-1]
    times = {
        way: [max(turn) for turn in zip(*(one.times[way] for one in raced), strict=True)] for way in raced[0].times
    }
    errors = {f"{way}, rank {rank}": text for rank, one in enumerate(raced) for way, text in one.errors.items()}
    return Raced(raced[0].about, times, raced[0].facts, errors)


def note(found: Raced, record_property) -> None:
    """Record all figures."""
    record_property("about", found.about)
    peer = DDP if DDP in found.times else next(iter(found.times), DDP)
    for way in found.times:
        of_plain = record(found.times, way, PLAIN)["ratio"] if PLAIN in found.times else None
        figures = record(found.times, way, peer) | {"of the plain loop": of_plain}
        record_property(way, figures | found.facts.get(way, {}))
    for way, error in found.errors.items():
        record_property(f"error: {way}", error)


@pytest.mark.parametrize("name", [pytest.param("resnet50", marks=NEEDS_VISION), "gpt"])
def test_steps_of_two_ranks(name, record_property, monkeypatch):
    monkeypatch.setenv("NCCL_MAX_CTAS", MOST_CTAS)
    ways = {way: how for way, how in (WAYS if HAS_GPU or name == "gpt" else FEW).items() if way not in LEFT_OUT[name]}
    found = measured(run_processes(2, training_steps.race, name, ways, BUDGET_S, ROUNDS, limit_s=LIMIT_S))
    note(found, record_property)
    assert found.errors == {}


@NEEDS_VISION
@pytest.mark.parametrize("ranks", [4, 8] if HAS_GPU else [2])
def test_steps_of_several_ranks(ranks, record_property):
    found = measured(run_processes(ranks, training_steps.race, "resnet50", FEW, BUDGET_S, 3, limit_s=LIMIT_S))
    note(found, record_property)
    assert found.errors == {}


@NEEDS_VISION
def test_profile_of_a_step(request, record_property, monkeypatch):
    monkeypatch.setenv("NCCL_MAX_CTAS", MOST_CTAS)
    outcomes = run_processes(2, profiled_step.profiled, limit_s=LIMIT_S)
    found, _ = values(outcomes)
    profiled_step.write(request.config.getoption("--step-profile"), found)
    for way, profile in found["profiles"].items():
        record_property(f"{way}: us of each class", profile["sums_us"])
        assert profile["kernels"] or not HAS_GPU
