# SPDX-License-Identifier: Apache-2.0
"""Curves whose steps to a loss are known, with noise like that of small batches."""

from __future__ import annotations

import json
from math import log
from pathlib import Path

import numpy as np
from curve import SYNCHRONOUS, Curve

FIRST, PER_RANK, NOISE = 2.3, 16, 0.1
"""The loss of the first step, the samples of a rank, and the noise of one rank relative to the loss."""


def made(half, ranks, seed=0, training=SYNCHRONOUS, noise=NOISE, **settings):
    """A curve whose loss is halved after `half` steps, and falls as 1/step in the end."""
    steps = np.arange(1, int(30 * half) + 50)
    losses = FIRST / (1 + steps / half)
    losses = losses * (1 + noise / ranks**0.5 * np.random.default_rng([seed, ranks]).standard_normal(len(steps)))
    return Curve(training, ranks, PER_RANK * ranks, losses, settings, seed)


def made_power(ranks, seed=0, noise=NOISE):
    """A curve of which the log loss is a line in log step, whose slope depends on the ranks."""
    steps = np.arange(1, 3000)
    losses = 8 * steps ** -(0.5 + 0.06 * log(ranks))
    losses = losses * (1 + noise / ranks**0.5 * np.random.default_rng([seed, ranks]).standard_normal(len(steps)))
    return Curve(SYNCHRONOUS, ranks, PER_RANK * ranks, losses, {}, seed)


def steps_of(half, target):
    """The steps to `target` of a curve without noise."""
    return half * (FIRST / target - 1)


def curves_of(half_of, counts, seeds=3, **given):
    """Curves by names, of some rank counts and seeds."""
    return {f"{n}-{seed}": made(half_of(n), n, seed, **given) for n in counts for seed in range(seeds)}


def save(curve, file):
    """Write `curve` as a recorder does."""
    names = ("training", "ranks", "batch", "settings", "seed", "recipe")
    columns = {"loss": curve.losses, "signal": curve.signal, "noise": curve.noise}
    known = {name: values.tolist() for name, values in columns.items() if values is not None}
    steps = ({name: values[step] for name, values in known.items()} for step in range(len(curve.losses)))
    lines = [{"commrt_curve": 1} | {name: getattr(curve, name) for name in names}]
    lines += ({"step": number} | step for number, step in enumerate(steps))
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


def written(folder, curves):
    """Write `curves` to files in `folder`; return their paths."""
    files = []
    for name, curve in curves.items():
        files.append(str(folder / f"{curve.training}-{name}.jsonl"))
        save(curve, Path(files[-1]))
    return files
