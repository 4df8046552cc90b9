# SPDX-License-Identifier: Apache-2.0
"""Which options go together: one table, and the functions that refuse. Needs no torch.

An algorithm or a wire that is more than the usual says so by `traits`, words of this table.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

import numpy as np

from commrt.errors import UsageError
from commrt.schedule import ADD, Schedule, require_valid

NO_ALL_REDUCE = (
    "algorithm={algorithm!r} is no all-reduce, in which every rank takes part: use Torus2D(),"
    " Ring() or HalvingDoubling() here, and attach() for gossip, backup workers and local SGD"
)
NO_VIEWS = 'gradients="views" with {kind}, where gradients do not travel as they are: leave it out'
ONE_ALL_REDUCE = (
    "same_bits=True with {kind}, where not every gradient of every rank is added in each step: use"
    " Direct(), or leave same_bits out"
)

NOTHING_EQUAL = (
    "watch=True with {kind}: replicas differ there by design, so nothing is compared; leave"
    " watch out"
)
REFUSED = {
    **{("all-reduce", kind): NO_ALL_REDUCE for kind in ("gossip", "backup workers", "local SGD")},
    ("all-reduce", "adaptive wire"): (
        "wire={wire} follows the gradients of attach(): here use a quantizer with fixed bits, such"
        " as commrt.quantization.Int8()"
    ),
    ("no optimizer", "backup workers"): (
        "BackupWorkers needs the optimizers that step the model: attach(model, optimizer, ...)"
    ),
    ("no optimizer", "local SGD"): (
        "LocalSGD needs the optimizers whose steps it counts: attach(model, optimizer, ...)"
    ),
    ("graphs", "backup workers"): (
        "graphs=True with BackupWorkers: another quorum in each step leaves nothing to repeat"
    ),
    ("graphs", "local SGD"): (
        "graphs=True with LocalSGD: it exchanges too rarely to need them; leave graphs out"
    ),
    ("graphs", "quantized wire"): (
        "graphs=True with a wire of {wire}: its exchanges cannot be captured yet; leave graphs out"
    ),
    **{("views", kind): NO_VIEWS for kind in ("gossip of weights", "backup workers", "local SGD")},
    ("watch", "local SGD by gossip"): NOTHING_EQUAL,
    ("watch", "gossip of gradients"): NOTHING_EQUAL,
    ("watch", "rows"): "watch=True with within=: messages of rows are added up; use within=1",
    **{("same bits", kind): ONE_ALL_REDUCE for kind in ("gossip", "backup workers", "local SGD")},
    ("same bits", "quantized wire"): (
        "same_bits=True with a wire of {wire}, which rounds a value by the block that it lies in:"
        " leave wire out, or use torch.bfloat16"
    ),
    ("wire", "local SGD by gossip"): (
        "wire={wire} with LocalSGD(inner=Gossip()): weights travel there, not small differences,"
        " and would be rounded; leave wire out, or use an all-reduce"
    ),
    ("adaptive wire", "local SGD"): (
        "a wire of {wire} with LocalSGD: its bits follow gradients; use Int4() or Int8()"
    ),
    ("quantized wire", "gossip"): (
        "a wire of {wire} with gossip: what one rank gains its peer would not lose; use bfloat16,"
        " or Direct()"
    ),
    ("error feedback", "backup workers"): (
        "a wire of {wire} with backup workers: a step that is tried again would forget what"
        " rounding lost; use one without feedback, such as int8, or Direct() without backup workers"
    ),
    ("adaptive wire", "backup workers"): (
        "a wire of {wire} with backup workers: a late rank misses the average that the next step's"
        " bits follow from; use one whose bits do not change, such as int8"
    ),
}
"""What is wrong with two traits together, and what to do."""
MOST_SUMMING_STEPS = 2
"""Steps in which a sum may grow: each codes it again, and the error grows with them."""


def require_compatible(algorithm: object, wire: object = None, also: Iterable[str] = ()) -> None:
    """Raise `UsageError` for the first row of the table that these, and the traits `also`, meet.

    >>> from commrt.local_sgd import LocalSGD
    >>> require_compatible(LocalSGD(), also=["graphs"])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    commrt.errors.UsageError: graphs=True with LocalSGD: it exchanges too rarely to need them; ...
    """
    present = {
        *also,
        *getattr(algorithm, "traits", ()),
        *getattr(wire, "traits", ()),
    }
    if wire is not None:
        present.add("wire")
    for pair, why in REFUSED.items():
        if present.issuperset(pair):
            raise UsageError(
                why.format(algorithm=algorithm, wire=wire, kind=type(algorithm).__name__)
            )


def require_short_sums(schedule: Schedule, wire: object) -> None:
    """Raise `UsageError` if `schedule` would quantize a sum of codes again and again."""
    if summing_steps(schedule, MOST_SUMMING_STEPS) > MOST_SUMMING_STEPS:
        raise UsageError(
            f"a wire of {wire} cannot carry {schedule.name}: codes do not add, and more than"
            f" {MOST_SUMMING_STEPS} steps add to a chunk, each of which may round its sums again;"
            " use commrt.Direct(), which sums in one (direct on the command line)"
        )


def summing_steps(schedule: Schedule, enough: float = inf) -> int:
    """Return the largest number of steps that add to the same chunk; stop counting above `enough`.

    >>> from commrt.algorithms import direct, ring
    >>> summing_steps(direct.all_reduce(8)), summing_steps(ring.all_reduce(8))
    (1, 7)
    """
    counts = np.zeros(schedule.chunks, dtype=np.int32)
    for step in schedule.checked_steps():
        adds = require_valid(step, schedule).rows(step.combine == ADD)
        begun, ended = (
            np.bincount(each, minlength=schedule.chunks + 1) for each in (adds.lo, adds.hi)
        )
        counts += np.cumsum(begun - ended)[:-1] > 0
        if counts.max() > enough:
            break
    return int(counts.max())
