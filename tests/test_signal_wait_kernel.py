# SPDX-License-Identifier: Apache-2.0
"""The kernel that signals and waits against its definition, in Triton's interpreter; and what the compiler makes of it.

The interpreter has no inline assembly, so functions in Python stand for the helpers that use it. They note what is
done in which order, and move the clock.
"""

import ctypes
import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import triton.language as tl
from forked_commands import printed
from interpreter import BadAccess, complaint, interpret, plant, watched
from kernel_bugs import BUGS
from moved_clock import moved_clock
from peer_memory import signal_wait as defined
from triton.runtime.interpreter import TensorHandle

from commrt.kernels.device import signal_wait, variants
from commrt.kernels.signal_wait import BACK, SignalWaitPlan

SUPPORT = Path(__file__).parent / "support"
TICK_NS = 7_000
"""The clock moves on by that much each time the kernel reads it."""
TIMEOUT = 1_000_000
MOST_READS = 600
"""Of the clock: more than any deadline needs."""


def int32(value):
    return ctypes.c_int32(value).value


@dataclass
class Scene:
    """What a rank finds: words relative to `counts`, and what comes while it waits."""

    counts: list
    needs: list
    signalled: list
    """By the peers, before."""
    comes: list
    """What each peer signals once somebody waits, or None."""
    position: int = 5
    last: int = 0
    failed: bool = False
    aborted: bool = False
    checks_abort: bool = False

    def plan(self):
        def words(values):
            return [torch.tensor([int32(value)], dtype=torch.int32) for value in values]

        inboxes = words(count + signalled for count, signalled in zip(self.counts, self.signalled, strict=True))
        return SignalWaitPlan(
            outboxes=words([99] * len(inboxes)),
            inboxes=inboxes,
            counts=words(self.counts),
            ranks=[10 + place for place in range(len(self.counts))],
            needs=self.needs,
            state=torch.tensor([int(self.failed), 0], dtype=torch.int32),
            host=torch.tensor([int(self.aborted), TIMEOUT, 0, 0]),
            position=self.position,
            last=self.last,
            number=3,
            checks_abort=self.checks_abort,
        )

    def come(self, plan):
        """Let the peers signal what they signal while this rank waits."""
        for inbox, count, signalled in zip(plan.inboxes, self.counts, self.comes, strict=True):
            if signalled is not None:
                inbox.fill_(int32(count + signalled))


def state_of(plan):
    """All that a rank writes."""
    return [word.tolist() for word in (*plan.outboxes, *plan.counts, plan.state, plan.host)]


def by_definition(scene):
    plan = scene.plan()
    with moved_clock() as clock:
        for waits in defined(plan):
            if waits:
                scene.come(plan)
                clock.advance(TIMEOUT * 1e-9 / 2)
    return state_of(plan)


@dataclass
class Helpers:
    """In place of the helpers of the kernel."""

    scene: Scene
    plan: SignalWaitPlan
    now_ns: int = 2**62
    calls: list = field(default_factory=list)
    """(what, which word), in order."""

    def signal(self, address, position):
        word = self.word("signal", address, self.plan.outboxes)
        word.fill_(int(position.handle.data[0]))

    def acquire(self, address):
        value = int(self.word("acquire", address, self.plan.inboxes))
        if self.calls.count(self.calls[-1]) > 1:
            self.scene.come(self.plan)
        return number(value, tl.int32)

    def relaxed(self, address):
        return number(int(self.word("relaxed", address, self.plan.inboxes)), tl.int32)

    def volatile(self, address):
        place = (int(address.handle.data[0]) - self.plan.host.data_ptr()) // 8
        return number(int(self.plan.host[place]), tl.int64)

    def clock(self):
        self.now_ns += TICK_NS
        if self.now_ns - 2**62 > MOST_READS * TICK_NS:
            raise BadAccess("it waits for ever")
        return number(self.now_ns, tl.int64)

    def word(self, what, address, words):
        addresses = [word.data_ptr() for word in words]
        if address.handle.data[0] not in addresses:
            raise BadAccess(f"{what} at another place")
        place = addresses.index(address.handle.data[0])
        self.calls.append((what, place))
        return words[place]


def number(value, dtype):
    kind = np.int32 if dtype == tl.int32 else np.int64
    return tl.tensor(TensorHandle(np.array([value], kind), dtype), dtype)


def by_kernel(scene, module):
    """What the kernel of `module` does, and in which order."""
    plan = scene.plan()
    rows = [torch.tensor([word.data_ptr() for word in row]) for row in (plan.outboxes, plan.inboxes, plan.counts)]
    memory = [*rows, torch.tensor([*plan.needs, *plan.ranks], dtype=torch.int32), plan.state, plan.host]
    variant = replace(variants.signal_wait(len(plan.needs)), kernel=module.signal_wait_kernel)
    helpers = Helpers(scene, plan)
    names = {"_signal": helpers.signal, "_load_acquire": helpers.acquire, "_load_relaxed": helpers.relaxed}
    names |= {"_load_volatile": helpers.volatile, "_now_ns": helpers.clock}
    with watched([*memory, *plan.counts]), patch.multiple(module, **names):
        numbers = plan.position, plan.last, plan.number, int(plan.checks_abort)
        interpret(variant, [0], *(part.data_ptr() for part in memory), *numbers)
    assert not scene.aborted or helpers.now_ns - 2**62 < TIMEOUT, "it waits though the host has given up"
    return state_of(plan), helpers.calls


def require_alike(scene, module=signal_wait):
    found, calls = by_kernel(scene, module)
    assert found == by_definition(scene)
    order = [what for what, _ in calls]
    signals = order.index("signal") if "signal" in order else len(order)
    assert "relaxed" not in order[signals:], "it signals before it has looked at all peers"
    assert "acquire" not in order[:signals], "it waits before it signals"


WRAPS = 2**31 - 2
"""The position 5 after it is negative."""
SCENES = {
    "all are there": Scene([0, WRAPS], [3, 5], [3, 7], [None, None]),
    "one comes later": Scene([0, WRAPS, 0], [3, 5, 9], [0, 2, 9], [3, 5, None], last=9),
    "one does not come": Scene([0, 0, 0], [0, 3, 9], [0, 3, 0], [None, None, 8], last=9),
    "the last does not come": Scene([WRAPS, 0], [3, 3], [3, 2], [None, None]),
    "one does not come beyond the wrap": Scene([WRAPS], [5], [0], [None]),
    "a peer has gone back": Scene([0, WRAPS], [0, 0], [5, 5 - BACK], [None, None], last=9),
    "two have gone back": Scene([0, 0, 0], [0, 0, 0], [5, -BACK, -BACK], [None, None, None]),
    "a peer is a program behind": Scene([20, 20], [0, 0], [-9, 0], [None, None]),
    "the host gives up": Scene([0, 0], [3, 0], [0, 0], [None, None], aborted=True),
    "the host gave up what comes before": Scene([0, 0], [3, 0], [3, 0], [None, None], aborted=True, checks_abort=True),
    "one has failed before": Scene([0, 0], [3, 0], [3, 0], [None, None], last=9, failed=True),
    "the program ends": Scene([7, WRAPS], [3, 0], [3, 0], [None, None], last=9),
}


def looked_over(module):
    """The text of the helpers, which the interpreter does not run, says what orders memory."""
    text = Path(module.__file__).read_text()
    for order in ("@first st.release.sys.global.u32", "ld.acquire.sys.global.u32", "ld.relaxed.sys.global.u32"):
        assert text.count(order) == 1, order


def first_complaint(module):
    """What the scenes, and a look at its text, say against a kernel."""
    checks = [(looked_over, module), *((require_alike, scene, module) for scene in SCENES.values())]
    return next(filter(None, (complaint(*check) for check in checks)), None)


@pytest.mark.slow
def test_in_each_scene_a_planted_bug_does_not_do_what_the_definition_does(tmp_path, monkeypatch):
    assert first_complaint(signal_wait) is None
    bugs, missed = [bug for bug in BUGS if BUGS[bug][0] == "signal_wait"], []
    for bug in bugs:
        with monkeypatch.context() as patch:
            plant(BUGS[bug], ["signal_wait"], tmp_path, patch)
            broken = sys.modules[variants.signal_wait_kernel.fn.__module__]
            missed += [] if first_complaint(broken) else [bug]
    assert len(bugs) > 10
    assert missed == []


@pytest.mark.slow
def test_the_compiled_kernel_orders_memory_for_the_whole_system_and_keeps_all_in_registers():
    """In a process in which Triton compiles instead of interpreting."""
    compiled = json.loads(printed(sys.executable, SUPPORT / "signal_wait_code.py", TRITON_INTERPRET="0"))
    assert {code["arch"] for code in compiled} == {"sm_80", "sm_90a", "sm_100a"}
    for code in compiled:
        peers = code["peers"]  # signalled, and signalled that this rank goes back; asked before and while it waits
        assert code["orders"] == {
            "st.release.sys.global": 2 * peers,
            "ld.acquire.sys.global": 2 * peers,
            "ld.relaxed.sys.global": peers,
            "ld.volatile.global": 2 * peers + 1,
        }
        assert (code["forbidden"], code["traps"], code["local_bytes"]) == ([], 0, 0)
        assert code["registers"] <= 64
