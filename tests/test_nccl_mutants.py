# SPDX-License-Identifier: Apache-2.0
"""A GPU transport that breaks a rule of NCCL fails a check: each is planted here, and must be noticed."""

import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import nccl_stand_in as stand_in
import pytest
from peer_group import on_threads
from torch.distributed import HashStore

from commrt.testing import conformance
from commrt.threads.calls import start_call
from commrt.transport import group_watch, nccl
from commrt.transport import nccl_communicator as communicator
from commrt.transport.protocol import CPU

SHORT_S = 0.2
PATIENT_S = 1.5
"""As long as a mutant that hangs is waited for."""

ISSUED = """            self._binding.groupStart()
            try:
                for call in calls:
                    call(stream)
            finally:
                self._binding.groupEnd()  # or NCCL would collect all later calls of this thread
"""
ERROR = "except (RuntimeError, KeyError) as error:\n            "
EXPLAINED = "self._fail_by(error, pending)"
EACH = "            for call in calls:\n"
CALL = "call(stream)\n"

MUTANTS = {
    "no group": (nccl, ISSUED, f"{EACH}                {CALL}"),
    "a group per call": (
        nccl,
        ISSUED,
        f"{EACH}{16 * ' '}self._binding.groupStart()\n{16 * ' '}{CALL}{16 * ' '}self._binding.groupEnd()\n",
    ),
    "a group that is never ended": (nccl, "                self._binding.groupEnd()  #", "                pass  #"),
    "sends in another order": (nccl, "for each in some.sends", "for each in some.sends[::-1]"),
    "receives in another order": (nccl, "for each in some.recvs", "for each in some.recvs[::-1]"),
    "a send forgotten": (nccl, "for each in some.sends", "for each in some.sends[:-1]"),
    "a receive forgotten": (nccl, "for each in some.recvs", "for each in some.recvs[1:]"),
    "the last byte forgotten": (nccl, "= message.data.nbytes\n", "= message.data.nbytes - 1\n"),
    "elements for bytes": (nccl, "= message.data.nbytes\n", "= message.data.numel()\n"),
    "the beginning of the storage": (nccl, "message.data.data_ptr()", "message.data.untyped_storage().data_ptr()"),
    "sends for receives": (nccl, "_call(recv", "_call(send"),
    "peers mixed up": (nccl, ".index(message.peer)", ".index(max(message.peer - 1, 0))"),
    "empty transfers sent": (nccl, "= split_self(group, self.rank, self.members)", "= group, []"),
    "copies to self forgotten": (nccl, "target.copy_(source)", "pass"),
    "errors swallowed": (group_watch, f"{ERROR}raise {EXPLAINED} from error", f"{ERROR}{EXPLAINED}"),
    "no deadline": (group_watch, "age_s > pending.timeout_s", "False"),
    "a deadline of its own": (group_watch, "tag, clock.now_s(), self.timeout_s,", "tag, clock.now_s(), 300.0,"),
    "a late communicator not aborted": (communicator, "(nccl.abort)", "(int)"),
    "the others not told": (group_watch, "self._notices.announce(None)", "pass"),
    "the others not asked": (group_watch, "self.lost_peer(pending.counts, pending.tag, pending.group.hop)", "None"),
    "use after close": (group_watch, "            self.is_closed = True\n            if self", "            if self"),
    "an id of each rank's own": (communicator, "bytes.fromhex(infos[members[0]].unique_id)", "binding.get_unique_id()"),
    "a rank of another": (communicator, "unique_id, members.index(rank))", "unique_id, 0)"),
}


def mutated(module, old, new):
    """`module` with `old` replaced by `new`."""
    text = Path(module.__file__).read_text()
    assert text.count(old) == 1, f"{old!r} is there {text.count(old)} times"
    mutant = ModuleType("commrt_mutant")
    sys.modules[mutant.__name__] = mutant  # dataclasses look there
    try:
        exec(compile(text.replace(old, new), module.__file__, "exec"), vars(mutant))  # noqa: S102  # our own text
    finally:
        del sys.modules[mutant.__name__]
    return mutant


def complaint(transport, monkeypatch):
    """The first check that fails, or hangs; or None."""
    made = []

    def make(ranks, timeout_s):
        store = HashStore()
        made.extend(on_threads(ranks, lambda rank: transport(store, rank, range(ranks), timeout_s, CPU, stand_in)))
        return made[-ranks:]

    monkeypatch.setattr(conformance, "LONG_S", PATIENT_S)
    monkeypatch.setattr(conformance, "SHORT_S", SHORT_S)
    try:
        for check in conformance.CHECKS:
            try:
                start_call(partial(check, make)).result(3 * PATIENT_S)
            except Exception:  # whatever it is
                return conformance.name(check)
    finally:
        for one in made:
            one.abort()
            one.watch.communicator.nccl.abort()  # which the mutant may have forgotten
    return None


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_rule_is_noticed(name, monkeypatch):
    module, old, new = MUTANTS[name]
    mutant = mutated(module, old, new)
    if module is not nccl:
        replaced = "create" if module is communicator else "GroupWatch"
        monkeypatch.setattr(nccl, replaced, getattr(mutant, replaced))
        mutant = nccl
    noticed = complaint(mutant.NcclTransport, monkeypatch)
    sys.stdout.write(f"{name}: {noticed}\n")  # for pytest -s
    assert noticed is not None
