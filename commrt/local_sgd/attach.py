# SPDX-License-Identifier: Apache-2.0
"""Make a replica that trains by local SGD: what `attach` does where the algorithm is `LocalSGD`.

On the thread that trains.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import cast

from commrt.buckets.tensors import exchanged_tensors
from commrt.local_sgd.fragment import cut_fragments
from commrt.local_sgd.fragment_exchange import FragmentExchange
from commrt.local_sgd.growing_replica import GrowingReplica, require_that_grows
from commrt.local_sgd.local_replica import LocalReplica
from commrt.local_sgd.policy import LocalSGD
from commrt.runtime.wire import is_quantized
from commrt.training.replica import Replica
from commrt.training.request import Request

_log = logging.getLogger("commrt")


def attach(request: Request) -> Replica:
    """Return a replica that trains alone, and averages once in a period. Collective."""
    algorithm = cast("LocalSGD", request.algorithm)
    for sentence in algorithm.unwise():
        _log.warning("commrt: %s", sentence)
    # rounding would make a variance of BatchNorm negative
    skips_buffers = is_quantized(request.wire)
    held = [
        slot for slot in exchanged_tensors(request.model) if not (slot.is_buffer and skips_buffers)
    ]
    grows = request.world.size > request.world.founders
    if grows:
        require_that_grows(request)
    exchange = FragmentExchange(request, cut_fragments(held, algorithm))
    engine = exchange.engine
    return request.open(
        engine.schedule(0, request.world.founders),
        engine.buckets,
        partial(GrowingReplica if grows else LocalReplica, request, exchange),
        # before the replica: from then on the world goes on without lost ranks
        prepare=lambda: engine.submit_preparation(0, request.world.membership.ranks).result(),
        come=GrowingReplica.come if grows else None,
    )
