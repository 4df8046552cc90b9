# SPDX-License-Identifier: Apache-2.0
"""What the compiler makes of signals and waits, as JSON; tests/test_signal_wait_kernel.py says what must be in it."""

import json
import sys
from collections import Counter
from pathlib import Path

from commrt.kernels.device.variants import compiled, signal_wait

sys.path.insert(0, str(Path(__file__).parents[2] / "dev"))
from inspect_kernels import ARCHS, disassembled

PEERS = (1, 7)
ORDERS = ("st.release.sys.global", "ld.acquire.sys.global", "ld.relaxed.sys.global", "ld.volatile.global")
FORBIDDEN = ("trap", ".local", "bar.sync", "red.", "atom.")


def code_of(peers: int, arch: int) -> dict[str, object]:
    """Return how often the kernel's code says what orders memory, and what it must not hold."""
    text = compiled(signal_wait(peers), arch).asm["ptx"]
    instructions, used = disassembled(signal_wait(peers), arch)
    return {
        "peers": peers,
        "arch": ARCHS[arch],
        "orders": {order: text.count(order) for order in ORDERS},
        "forbidden": [word for word in FORBIDDEN if word in text],
        "local_bytes": used["STACK"] + used["LOCAL"],
        "registers": used["REG"],
        "traps": Counter(instructions)["BPT"],
    }


if __name__ == "__main__":
    print(json.dumps([code_of(peers, arch) for peers in PEERS for arch in ARCHS]))  # noqa: T201  # a command
