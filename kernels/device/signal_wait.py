# SPDX-License-Identifier: Apache-2.0
"""Signal to peers how far this rank has come, and wait until they are far enough; with a deadline.

A signal is a store with release, a wait loads with acquire, at the scope of the whole system. So
what a peer's kernels wrote before its signal is there for this rank's next kernel. One program, of
one warp, writes the peers' inboxes, this rank's counts and state, and two words of the host.
"""

from __future__ import annotations

import triton
import triton.language as tl

from commrt.kernels.signal_wait import ABORT, BACK, ENDED, FAILED, MOST_RANKS, TIMEOUT_NS

LOOK_NS = tl.constexpr(10_000)
"""Between two looks at host memory, which is far away."""
ABORT_WORD = tl.constexpr(ABORT)
TIMEOUT_WORD = tl.constexpr(TIMEOUT_NS)
FAILED_WORD = tl.constexpr(FAILED)
ENDED_WORD = tl.constexpr(ENDED)
RANKS = tl.constexpr(MOST_RANKS)
FAR_BACK = tl.constexpr(BACK)


@triton.jit
def _signal(address, position):
    """Write `position` to a peer's memory after all that this rank wrote before, by one thread."""
    tl.inline_asm_elementwise(
        "{ .reg .pred first; .reg .u32 lane; mov.u32 lane, %tid.x; setp.eq.u32 first, lane, 0;"
        " @first st.release.sys.global.u32 [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [address, position],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _load_acquire(address):
    """Read a peer's signal before all later reads of this rank; the same for a warp's threads."""
    return tl.inline_asm_elementwise(
        "{ .reg .u32 there; ld.acquire.sys.global.u32 there, [$1]; shfl.sync.idx.b32 $0, there, 0,"
        " 31, -1; }",
        "=r,l",
        [address],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _load_relaxed(address):
    """Read a peer's signal in any order with other reads; the same for a warp's threads."""
    return tl.inline_asm_elementwise(
        "{ .reg .u32 there; ld.relaxed.sys.global.u32 there, [$1]; shfl.sync.idx.b32 $0, there, 0,"
        " 31, -1; }",
        "=r,l",
        [address],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _load_volatile(address):
    """Read a word that the host may write at any time; the same for all threads of the warp."""
    return tl.inline_asm_elementwise(
        "{ .reg .u64 word; .reg .b32 low, high; ld.volatile.global.u64 word, [$1]; mov.b64 {low,"
        " high}, word; shfl.sync.idx.b32 low, low, 0, 31, -1; shfl.sync.idx.b32 high, high, 0, 31,"
        " -1; mov.b64 $0, {low, high}; }",
        "=l,l",
        [address],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _now_ns():
    """Read the clock of the device; the same for all threads of the warp."""
    return tl.inline_asm_elementwise(
        "{ .reg .u64 now; .reg .b32 low, high; mov.u64 now, %globaltimer; mov.b64 {low, high}, now;"
        " shfl.sync.idx.b32 low, low, 0, 31, -1; shfl.sync.idx.b32 high, high, 0, 31, -1; mov.b64"
        " $0, {low, high}; }",
        "=l",
        [],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _word(addresses, peer):
    """Return the word of `peer` whose address is in a table."""
    return tl.load(addresses + peer).to(tl.pointer_type(tl.int32))


@triton.jit
def _signal_all(outboxes, counts, position, PEERS: tl.constexpr):
    """Signal `position` to all peers, from their counts on."""
    for peer in tl.static_range(PEERS):
        _signal(tl.load(outboxes + peer), tl.load(_word(counts, peer)) + position)


@triton.jit
def _first_gone_back(inboxes, counts, PEERS: tl.constexpr):
    """Return 1 and the index of the first peer that has gone back; 0 if none has."""
    gone = 0
    for peer in tl.static_range(PEERS):
        ahead = _load_relaxed(tl.load(inboxes + peer)) - tl.load(_word(counts, peer))
        if (ahead < -(FAR_BACK // 2)) & (gone == 0):
            gone = peer + 1
    return gone


@triton.jit
def _first_missing(inboxes, counts, needs, host, PEERS: tl.constexpr):
    """Wait for all peers; return 0, or 1 and the index of the first that did not come in time."""
    begin = _now_ns()
    look = begin + LOOK_NS
    missing = 0
    for peer in tl.static_range(PEERS):
        need = tl.load(needs + peer)
        if (need > 0) & (missing == 0):
            goal = tl.load(_word(counts, peer)) + need
            inbox = tl.load(inboxes + peer)
            while (_load_acquire(inbox) - goal < 0) & (missing == 0):
                now = _now_ns()
                if now > look:
                    look = now + LOOK_NS
                    late = now - begin > _load_volatile(host + TIMEOUT_WORD)
                    if late | (_load_volatile(host + ABORT_WORD) != 0):
                        missing = peer + 1
    return missing


@triton.jit
def signal_wait_kernel(
    outboxes,
    inboxes,
    counts,
    needs,
    state,
    host,
    position,
    last,
    number,
    checks_abort,
    PEERS: tl.constexpr,
):
    """Signal to `PEERS` peers, wait for each; nothing once a wait failed. See `SignalWaitPlan`.

    `outboxes` and `inboxes` [PEERS] are addresses of what this rank signals to a peer, and the peer
    to it. Both count from `counts` [PEERS] on, which a plan with `last` moves on. `needs` [2,
    PEERS] is 0 for a peer that need not be waited for; then come the ranks.
    """
    if tl.load(state) == 0:
        missing = _first_gone_back(inboxes, counts, PEERS)
        if (checks_abort > 0) & (missing == 0):
            missing = _load_volatile(host + ABORT_WORD).to(tl.int32)
        if missing == 0:
            _signal_all(outboxes, counts, position, PEERS)
            missing = _first_missing(inboxes, counts, needs, host, PEERS)
        if missing > 0:
            tl.store(state, 1)
            rank = tl.load(needs + PEERS + missing - 1)
            tl.store(host + FAILED_WORD, number.to(tl.int64) * RANKS + rank + 1)
            _signal_all(outboxes, counts, -FAR_BACK, PEERS)
        elif last > 0:
            for peer in tl.static_range(PEERS):
                tl.store(_word(counts, peer), tl.load(_word(counts, peer)) + last)
            ended = tl.load(state + 1) + 1
            tl.store(state + 1, ended)
            tl.store(host + ENDED_WORD, ended.to(tl.int64))
