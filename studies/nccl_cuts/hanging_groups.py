# SPDX-License-Identifier: Apache-2.0
"""Which groups of sends and receives hang where NCCL cuts them: ``python studies/nccl_cuts/hanging_groups.py``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

from nccl_messages import Message, group_of, in_groups, mixed, several  # of this folder
from nccl_plans import Rules, find_cycle

from commrt.transport.nccl_binding import named

VERSIONS = (22707, 22809, 22902, 22907)
"""The last of each set of rules but the newest, and the first of that, which holds up to 2.30.7."""


def hang(messages: Sequence[Message], ranks: int, rules: Rules) -> bool:
    """Return True if `messages` hang as one group."""
    return find_cycle(group_of(messages, ranks), rules) is not None


def count(exchanges: Iterable[Sequence[Message]], ranks: int, rules: Rules) -> tuple[int, int]:
    """Return how many of `exchanges` hang as one group, and how many in commrt's groups."""
    whole, in_parts = 0, 0
    for messages in exchanges:
        whole += hang(messages, ranks, rules)
        in_parts += any(hang(group, ranks, rules) for group in in_groups(messages, ranks))
    return whole, in_parts


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--exchanges", type=int, default=20, help="random ones, of 800 messages of 4 ranks")
    parser.add_argument("--mixed", type=int, default=2, help="random all-to-alls of 64 ranks on 8 hosts")
    args = parser.parse_args()
    print("| NCCL | several messages of a pair | in commrt's groups | mixed, InfiniBand | in commrt's groups |")
    print("|---|---|---|---|---|")
    for version in VERSIONS:
        several_hang = count((several(seed, 4, 800) for seed in range(args.exchanges)), 4, Rules(version))
        network = Rules(version, ranks_per_node=8, shares_connections=True)
        mixed_hang = count((mixed(seed, 64) for seed in range(args.mixed)), 64, network)
        shares = [f"{each} of {args.exchanges}" for each in several_hang]
        shares += [f"{each} of {args.mixed}" for each in mixed_hang]
        print(f"| {named(version)} | {' | '.join(shares)} |")


if __name__ == "__main__":
    main()
