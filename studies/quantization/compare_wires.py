# SPDX-License-Identifier: Apache-2.0
"""Measure what quantized wires do to sums and to learning: ``python studies/quantization/compare_wires.py``.

- `accuracy` trains a small CNN over each wire with the real runtime (see `quantized_training`). The column `simulation`
  is not measured by this script: an earlier simulation of the same set-up, with scales in fp32, had these accuracies.
  That simulation may have had other layers of the same number of parameters.
- `error` replays one sum over 4 to 64 ranks by several schedules (see `quantized_sums`).
- `bits` compares DQ-SGD's rule with fixed bits at equal bytes.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from time import perf_counter

import torch
from quantized_sums import print_errors
from quantized_training import LatestLoss, Wire, WireFor, trained

import commrt

sys.path.append(str(Path(__file__).parents[1] / "mnist"))  # as a program it finds only its own folder

from mnist_images import small_images
from small_cnn import STEPS, Outcome, columns

__all__ = ["Recorded", "mean_bits", "target_for"]

DECAY, DQ_BITS = 0.99, 3.7
FIXED_BITS = (3, 4)


@dataclass
class Recorded:
    """A rule of fixed bits that records the norms that it sees; all ranks see the same."""

    bits: int
    norms: dict[int, float] = field(default_factory=dict)

    def __call__(self, progress: commrt.quantization.Progress) -> float:
        """Return the steps of rounding of `bits`."""
        self.norms[progress.step] = progress.norm
        return float(2 ** (self.bits - 1) - 1)

    def wire(self) -> commrt.quantization.Adaptive:
        """Return a wire that always has these bits."""
        return commrt.quantization.Adaptive(self, least=self.bits, most=self.bits)


def dq_wire(target: float, steps: int = STEPS) -> commrt.quantization.Adaptive:
    """Return a wire of DQ-SGD's rule."""
    return commrt.quantization.Adaptive(commrt.quantization.dq(target, steps=steps, decay=DECAY))


def mean_bits(target: float, norms: Mapping[int, float], steps: int = STEPS) -> float:
    """Return the mean bits that DQ-SGD's rule has on recorded norms; steps without a norm have most bits."""
    wire = dq_wire(target, steps)
    seen = (commrt.quantization.Progress(step, norms[step]) if step in norms else None for step in range(steps))
    return mean(wire.quantizer(progress).bits for progress in seen)


def target_for(bits: float, norms: Mapping[int, float], steps: int = STEPS) -> float:
    """Return the target whose mean bits come closest to `bits` on recorded norms, by bisection."""
    low, high = 1e-6, 1e9
    for _ in range(80):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if mean_bits(middle, norms, steps) < bits else (low, middle)
    return min((low, high), key=lambda target: abs(mean_bits(target, norms, steps) - bits))


@dataclass(frozen=True)
class Case:
    """A wire of the table."""

    name: str
    wire_for: WireFor
    simulated: str
    """Accuracy that the simulation had, in percent; "-" for none."""


def fixed(name: str, make: Callable[[int], Wire], simulated: str) -> Case:
    """Return the case of a wire that depends on nothing but the seed."""
    return Case(name, lambda seed, _: make(seed), simulated)


def plain_cases() -> list[Case]:
    """Return the wires whose bits do not change."""
    return [
        fixed("fp32", lambda _: None, "96.9"),
        fixed("bf16", lambda _: torch.bfloat16, "97.0"),
        fixed("float8", lambda _: commrt.Float8(), "96.9"),
        fixed("int8", lambda _: commrt.Int8(), "96.6"),
        fixed("int4", lambda _: commrt.Int4(feedback=False), "96.7"),
        fixed("int4 stochastic", lambda seed: stochastic(4, seed), "97.1"),
        fixed("int4 + feedback", lambda _: commrt.Int4(), "96.9"),
        fixed("int3", lambda _: commrt.quantization.Quantizer(3), "96.9"),
        fixed("int3 + feedback", lambda _: commrt.quantization.Quantizer(3, feedback=True), "96.7"),
        fixed("int2", lambda _: commrt.Int2(feedback=False), "92.2"),
        fixed("int2 + feedback", lambda _: commrt.Int2(), "97.1"),
        fixed("int2 stochastic", lambda seed: stochastic(2, seed), "26"),
    ]


def stochastic(bits: int, seed: int) -> commrt.quantization.Quantizer:
    """Return a wire that rounds at random, without feedback."""
    return commrt.quantization.Quantizer(bits, rounding="stochastic", seed=seed)


def adaptive_cases(steps: int) -> list[Case]:
    """Return the wires whose bits change; trains once to find the target."""
    recorded = Recorded(4)
    trained(lambda *_: recorded.wire(), 0, steps)
    target = target_for(DQ_BITS, recorded.norms, steps)
    print(f"# dq: target {target:.5g}, decay {DECAY}: {DQ_BITS} bits on the norms of int4, seed 0", flush=True)
    return [
        fixed(f"dq, {DQ_BITS} bits", lambda _: dq_wire(target, steps), "97.1"),
        Case("adaquant, from 1 level", adaquant_wire, "96.9"),
    ]


def adaquant_wire(_: int, latest: LatestLoss) -> commrt.quantization.Adaptive:
    """Return a wire of AdaQuantFL's rule that begins with one step of rounding."""
    return commrt.quantization.Adaptive(commrt.quantization.adaquant(1.0, latest.wanted()))


def print_accuracies(seeds: Sequence[int], steps: int, named: str) -> None:
    """Print a row for each wire whose name contains `named`."""
    print(f"accuracy on 1,000 test images and loss on 4,000 training images, mean +- deviation of {len(seeds)} seeds")
    print("equal: all replicas were bitwise equal after the last step; the run would fail otherwise")
    head = f"{'wire':<24}{'accuracy %':>16}{'loss':>18}{'B/step':>10}{'equal':>7}{'simulation':>12}{'s':>6}"
    print(head, flush=True)
    cases = [*plain_cases(), *(adaptive_cases(steps) if not named else [])]
    for case in (case for case in cases if named in case.name):
        begin_s = perf_counter()
        found = [trained(case.wire_for, seed, steps) for seed in seeds]
        lasted_s = perf_counter() - begin_s
        print(f"{case.name:<24}{columns(found)}{'yes':>7}{case.simulated:>12}{lasted_s:>6.0f}", flush=True)


def print_bits(seeds: Sequence[int], steps: int) -> None:
    """Print fixed bits, DQ-SGD's rule at as many bytes, and their difference."""
    print(
        f"fixed bits and DQ-SGD's rule (decay {DECAY}), nearest, no feedback, mean +- deviation of {len(seeds)} seeds"
    )
    print(f"{'wire':<24}{'accuracy %':>16}{'loss':>18}{'B/step':>10}", flush=True)
    for bits in FIXED_BITS:
        rules = [Recorded(bits) for _ in seeds]
        plain = [
            trained(lambda *_, rule=rule: rule.wire(), seed, steps) for seed, rule in zip(seeds, rules, strict=True)
        ]
        print(f"{f'int{bits}':<24}{columns(plain)}", flush=True)
        target = target_for(bits, rules[0].norms, steps)
        ruled = [trained(lambda *_, target=target: dq_wire(target, steps), seed, steps) for seed in seeds]
        print(f"{f'dq, target {target:.5g}':<24}{columns(ruled)}")
        expected = mean_bits(target, rules[0].norms, steps)
        print(f"  {expected:.3f} bits on the norms of int{bits}, seed 0; {paired(plain, ruled)}", flush=True)


def paired(plain: Sequence[Outcome], ruled: Sequence[Outcome]) -> str:
    """Describe the difference of accuracies, seed by seed."""
    gains = [ours.accuracy - theirs.accuracy for theirs, ours in zip(plain, ruled, strict=True)]
    error = stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else math.nan
    listed = ", ".join(f"{gain:+.1f}" for gain in gains)
    return f"dq - fixed: {mean(gains):+.2f} +- {error:.2f} points (standard error; by seed {listed})"


def main() -> None:
    """Run the parts that are named, all by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help="accuracy, error or bits; all by default")
    parser.add_argument("--seeds", type=int, help="seeds of accuracy (3 by default) and of bits (5 by default)")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps")
    parser.add_argument("--wire", default="", help="accuracy: only fixed wires whose name contains this")
    options = parser.parse_args()
    parts = {
        "accuracy": lambda: print_accuracies(range(options.seeds or 3), options.steps, options.wire),
        "error": print_errors,
        "bits": lambda: print_bits(range(options.seeds or 5), options.steps),
    }
    if unknown := set(options.parts) - set(parts):
        parser.error(f"no part {', '.join(sorted(unknown))}: name {', '.join(parts)}")
    torch.set_num_threads(1)
    small_images()
    for name in options.parts or parts:
        begin_s = perf_counter()
        parts[name]()
        print(f"# {name}: {perf_counter() - begin_s:.0f} s\n", flush=True)


if __name__ == "__main__":
    main()
