# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501  # lines of the kernels, as they stand there
"""Bugs that the tests of the kernels must notice: (module, text, what is put in its place)."""

WAIT = """        need = tl.load(needs + peer)
"""
SIGNAL = "            _signal_all(outboxes, counts, position, PEERS)\n"
SIGNALLED = """    for peer in tl.static_range(PEERS):
        _signal("""
WAITED = "            missing = _first_missing(inboxes, counts, needs, host, PEERS)\n"
BUGS = {
    "tail off by one": ("pack", "left = whole + tl.arange(0, 8)", "left = whole + 1 + tl.arange(0, 8)"),
    "tail too long": ("pack", "mask=left < count)", "mask=left <= count)"),
    "whole part too long": ("tiles", "(count // 8) * 8", "((count + 7) // 8) * 8"),
    "places written twice": ("tiles", "tl.load(counts + tile),\n", "tl.load(counts + tile) + 16,\n"),
    "flag of an absent tensor": ("header", "tl.where(address != 0, 1.0, 0.0)", "tl.where(address == address, 1.0, 0.0)"),
    "header shifted": ("header", "tl.store(wire + bit,", "tl.store(wire + (bit ^ 1),"),
    "wrong offset of a tensor": ("tiles", ".to(tl.int64) * GRAIN, GRAIN)", ".to(tl.int64) * 15, 1)"),
    "offset of another tile": ("tiles", "tl.load(offsets + tl.program_id(0))", "tl.load(offsets)"),
    "tile forgotten in the source": ("tiles", "start = address + first *", "start = address + 0 * first *"),
    "overlapping tiles": ("tiles", "tl.load(numbers + tile).to(tl.int64) * TILE", "tl.load(numbers + tile).to(tl.int64) * (TILE - 16)"),
    "scale forgotten": ("pack", "scaled = values.to(tl.float32) * factor", "scaled = values.to(tl.float32)"),
    "scale forgotten in the tail": ("pack", ".to(tl.float32) * factor\n        tl.store", ".to(tl.float32)\n        tl.store"),
    "cast before the scale": ("pack", "scaled.to(wire.dtype.element_ty)", "((scaled / factor).to(wire.dtype.element_ty).to(tl.float32) * factor).to(wire.dtype.element_ty)"),
    "a hint that is not kept": ("tiles", "tl.multiple_of(start.to(tl.pointer_type(DTYPE)), ALIGN)", "tl.multiple_of(start.to(tl.pointer_type(DTYPE)), 16)"),
    "absent tensor read": ("pack", "tl.where(address != 0, whole, 0)", "whole"),
    "unpack: absent tensor written": ("unpack", "tl.where(address != 0, count, 0)", "count"),
    "unpack: tail forgotten": ("unpack", "        tl.store(target + left, tail.to(DTYPE), mask=there)\n", "        pass\n"),
    "unpack: header not looked at": ("unpack", "    note_mismatch(mismatch, wire, tl.load(header) if HELD else header)\n", ""),
    "mix: absent tensor mixed": ("mix", "tl.where(address != 0, count, 0)", "count"),
    "mix: sent and received swapped": ("mix", "(came - went)", "(went - came)"),
    "mix: tail forgotten": ("mix", "        _mix(own, theirs, ours, factor, left, left < count)\n", "        pass\n"),
    "reduce: last buffer forgotten": ("reduce", "tl.static_range(COUNT)", "tl.static_range(COUNT - 1)"),
    "reduce: first buffer again": ("reduce", "tl.load(rest + number)", "tl.load(rest)"),
    "reduce: rounded after each": ("reduce", "other=0.0).to(tl.float32)\n    return total", "other=0.0).to(tl.float32)\n        total = total.to(head.dtype.element_ty).to(tl.float32)\n    return total"),
    "reduce: tail forgotten": ("reduce", "        tl.store(out + left, tail.to(out.dtype.element_ty), mask=left < count)\n", "        pass\n"),
    "tiles: tile counted in int32": ("tiles", "tl.load(numbers + tile).to(tl.int64) * TILE", "tl.load(numbers + tile) * TILE"),
    "tiles: offset counted in int32": ("tiles", "tl.load(offsets + tl.program_id(0)).to(tl.int64) * GRAIN", "tl.load(offsets + tl.program_id(0)) * GRAIN"),
    "reduce: tile counted in int32": ("reduce", "tl.program_id(0).to(tl.int64) * TILE", "tl.program_id(0) * TILE"),
    "wait: nothing signalled": ("signal_wait", SIGNAL, ""),
    "wait: signalled after waiting": ("signal_wait", SIGNAL + WAITED, WAITED + SIGNAL),
    "wait: the last peer is not signalled": ("signal_wait", SIGNALLED, SIGNALLED.replace("PEERS", "PEERS - 1")),
    "wait: signalled from nowhere on": ("signal_wait", "tl.load(_word(counts, peer)) + position", "position"),
    "wait: signalled with a release on this GPU only": ("signal_wait", "st.release.sys", "st.release.gpu"),
    "wait: signalled by a plain store": ("signal_wait", "st.release.sys.global", "st.volatile.global"),
    "wait: loaded without an acquire": ("signal_wait", "ld.acquire.sys", "ld.relaxed.sys"),
    "wait: failure not looked at": ("signal_wait", "if tl.load(state) == 0:", "if tl.load(state) >= 0:"),
    "wait: no wait for the first peer": ("signal_wait", WAIT, WAIT.replace("peer)", "peer) * (peer > 0)")),
    "wait: no wait for the last peer": ("signal_wait", WAIT, WAIT.replace("peer)", "peer) * (peer < PEERS - 1)")),
    "wait: waits for one position more": ("signal_wait", "- goal < 0)", "- goal <= 0)"),
    "wait: positions compared without wrap": ("signal_wait", "(_load_acquire(inbox) - goal < 0)", "(_load_acquire(inbox) < goal)"),
    "wait: no deadline": ("signal_wait", "late | (_load_volatile(host + ABORT_WORD) != 0)", "_load_volatile(host + ABORT_WORD) != 0"),
    "wait: the host cannot give up": ("signal_wait", "late | (_load_volatile(host + ABORT_WORD) != 0)", "late"),
    "wait: a wait ends as if all had come": ("signal_wait", "    return missing\n", "    return 0\n"),
    "wait: another peer is named": ("signal_wait", "tl.load(needs + PEERS + missing - 1)", "tl.load(needs + PEERS)"),
    "wait: what the host gave up is signalled": ("signal_wait", "if (checks_abort > 0) & (missing == 0):", "if (checks_abort > 9) & (missing == 0):"),
    "wait: failure not kept": ("signal_wait", "            tl.store(state, 1)\n", ""),
    "wait: counters move though it failed": ("signal_wait", "elif last > 0:", "if last > 0:"),
    "wait: counters do not move": ("signal_wait", "tl.load(_word(counts, peer)) + last)", "tl.load(_word(counts, peer)))"),
    "wait: nothing taken back": ("signal_wait", "            _signal_all(outboxes, counts, -FAR_BACK, PEERS)\n", ""),
    "wait: a peer that went back not seen": ("signal_wait", "    return gone\n", "    return 0\n"),
    "wait: a peer that is behind taken for one that went back": ("signal_wait", "ahead < -(FAR_BACK // 2)", "ahead < 0"),
    "wait: the last peer that went back is named": ("signal_wait", "(ahead < -(FAR_BACK // 2)) & (gone == 0)", "ahead < -(FAR_BACK // 2)"),
}  # fmt: skip
