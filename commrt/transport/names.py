# SPDX-License-Identifier: Apache-2.0
"""The names of transports, where to import each, and which one COMMRT_TRANSPORT asks for.

Imports none of them, and keeps nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from commrt.errors import UsageError
from commrt.store.environment import ENVIRONMENT

TRANSPORTS = {
    "shared": "commrt.transport.shared:SharedTransport",
    "gloo": "commrt.transport.gloo:GlooTransport",
}
"""Transports for host memory: the class of each."""
GPU_TRANSPORTS = {
    "peers": "commrt.transport.peers:connect",
    "nccl": "commrt.transport.nccl:NcclTransport",
}
"""Transports for GPUs: what connects a rank. The first is the default."""


def chosen_transport(env: Mapping[str, str] = ENVIRONMENT) -> str | None:
    """Return the transport that COMMRT_TRANSPORT names, of host memory or of GPUs, or None."""
    kind = env.get("COMMRT_TRANSPORT")
    known = (*TRANSPORTS, *GPU_TRANSPORTS)
    if kind not in (None, *known):
        raise UsageError(
            f"COMMRT_TRANSPORT={kind!r} is no transport: set one of {', '.join(known)}, or unset it"
        )
    return kind
