# SPDX-License-Identifier: Apache-2.0
"""Which options go together: one table, and one function that refuses. Needs no torch.

An algorithm or a wire that is more than the usual says so by `traits`, a tuple of words of this table.
"""

from __future__ import annotations

from collections.abc import Iterable

from commrt.errors import UsageError

__all__ = ["require_compatible", "traits_of"]

LEAVE_OUT_GRAPHS = "leave graphs out"
NO_ALL_REDUCE = (
    "algorithm={algorithm!r} is no all-reduce, in which every rank takes part: use Torus2D(), Ring() or "
    "HalvingDoubling() here, and attach() for gossip, backup workers and local SGD"
)
NO_VIEWS = 'gradients="views" with {kind}, where gradients do not travel as they are: leave it out'

REFUSED = {
    ("all-reduce", "gossip"): NO_ALL_REDUCE,
    ("all-reduce", "backup workers"): NO_ALL_REDUCE,
    ("all-reduce", "local SGD"): NO_ALL_REDUCE,
    ("all-reduce", "adaptive wire"): (
        "wire={wire} follows the gradients of attach(): here use a quantizer with fixed bits, such as "
        "commrt.quantization.Int8()"
    ),
    ("no optimizer", "backup workers"): (
        "BackupWorkers needs the optimizers that step the model: attach(model, optimizer, ...)"
    ),
    ("no optimizer", "local SGD"): "LocalSGD needs the optimizers whose steps it counts: attach(model, optimizer, ...)",
    ("graphs", "backup workers"): (
        "graphs=True with BackupWorkers: another quorum in each step leaves nothing to repeat"
    ),
    ("graphs", "local SGD"): (f"graphs=True with LocalSGD: it exchanges too rarely to need them; {LEAVE_OUT_GRAPHS}"),
    ("graphs", "quantized wire"): (
        f"graphs=True with a wire of {{wire}}: its exchanges cannot be captured yet; {LEAVE_OUT_GRAPHS}"
    ),
    ("views", "gossip of weights"): NO_VIEWS,
    ("views", "backup workers"): NO_VIEWS,
    ("views", "local SGD"): NO_VIEWS,
    ("wire", "local SGD by gossip"): (
        "wire={wire} with LocalSGD(inner=Gossip()): weights travel there, and would be rounded"
    ),
    ("adaptive wire", "local SGD"): ("a wire of {wire} with LocalSGD: its bits follow gradients; use Int4() or Int8()"),
    ("quantized wire", "gossip"): (
        "a wire of {wire} with gossip: what one rank gains its peer would not lose; use bfloat16, or Direct()"
    ),
    ("error feedback", "backup workers"): (
        "a wire of {wire} with backup workers: a step that is tried again would forget what rounding lost; use one "
        "without feedback, such as int8, or Direct() without backup workers"
    ),
    ("adaptive wire", "backup workers"): (
        "a wire of {wire} with backup workers: a late rank misses the average that the next step's bits follow from; "
        "use one whose bits do not change, such as int8"
    ),
}
"""What is wrong with two traits together, and what to do."""


def traits_of(option: object) -> frozenset[str]:
    """Return what the table calls an algorithm or a wire; nothing for the usual ones.

    >>> from commrt.algorithms.gossip import Gossip
    >>> sorted(traits_of(Gossip()))
    ['gossip', 'gossip of weights']
    """
    return frozenset(getattr(option, "traits", ()))


def require_compatible(algorithm: object, wire: object = None, also: Iterable[str] = ()) -> None:
    """Raise `UsageError` for the first row of the table that `algorithm`, `wire` and the traits `also` meet.

    >>> from commrt.algorithms.local import LocalSGD
    >>> require_compatible(LocalSGD(), also=["graphs"])
    Traceback (most recent call last):
    commrt.errors.UsageError: graphs=True with LocalSGD: it exchanges too rarely to need them; leave graphs out
    """
    present = traits_of(algorithm) | traits_of(wire) | frozenset(also) | ({"wire"} if wire is not None else set())
    for pair, why in REFUSED.items():
        if present.issuperset(pair):
            raise UsageError(why.format(algorithm=algorithm, wire=wire, kind=type(algorithm).__name__))
