# SPDX-License-Identifier: Apache-2.0
"""Which options go together: one table, and one function that refuses. Needs no torch.

An algorithm or a wire that is more than the usual says so by `traits`, words of this table. It
reads these only, and keeps nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from commrt.errors import UsageError

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
        " as commrt.Int8()"
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
