# SPDX-License-Identifier: Apache-2.0
"""How all members begin a collective together, and how they agree on whether it succeeded.

A rank that does not come within the timeout is evicted, and the others begin without it. At the end
all members vote: no rank uses a result that another member can never get. All is said on the store.
Its head has the current generation, and how far the latest collective is. Nothing here moves
tensors or connections.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from threading import Event

from commrt.elastic.member import Member
from commrt.elastic.records import GATHERING, OPEN, RUNNING, Arrival, Head
from commrt.elastic.roster import arrival_key, refusal_key
from commrt.errors import DisagreementError
from commrt.runtime.generation import Generation
from commrt.threads.deadline import Deadline

CHECK_S = 0.02
"""For so long a rank only looks whether the others have come: healthy ones come sooner, and to ask
who lives costs more requests than all else.
"""
WHOLE = "whole"
LOST = "lost"
REFUSED = "refused "
"""The outcomes of a vote; a refusal is followed by its reason."""
UNEQUAL_STEPS = (
    "put the loop into `with replica.join():` if ranks have different numbers of batches, and run"
    " the same passes outside of no_sync() on all ranks"
)
OTHER_CALL = "make the same collective calls in the same order on all ranks"


class Barrier:
    """The collectives of one member, and the votes at their ends and of exchanges.

    `ElasticMembership` calls `arrive`, then `vote` or `refuse` for each try of the work, and
    `leave`. An exchange of local SGD has a key of its own, under which ranks call `promise` or
    `decline`, then `outcome`, and `forget` later. Used on the training thread, where a method does
    not say otherwise. Written here of others: the member's count of collectives, and on the store
    heads, arrivals, refusals and votes.
    """

    def __init__(self, member: Member) -> None:
        self._member = member
        self._store = member.store
        self._votes = Counter[int]()  # by generation
        self._used: list[str] = []  # keys of the latest collective

    def arrive(
        self,
        what: str,
        step: int,
        change: Callable[[], None],
        require_open: Callable[[], None] = lambda: None,
        made: int | None = None,
    ) -> Generation:
        """Wait until all members have come to the collective `what`, and return the generation in
        which it begins.

        Members that do not come in time are evicted. `step` is the first one in which this rank has
        not exchanged, and `made` how many steps its loop has made. `change` moves this rank to the
        current generation. `require_open` is called regularly, and may raise. Raises
        `DisagreementError` on all ranks if one came to another collective, or after another number
        of steps, `DeadlineExceeded` if too few come, `QuorumLost`, `Evicted`.
        """
        self._member.begin_collective()
        while (generation := self._all_come(Arrival(step, what, made=made), require_open)) is None:
            change()
        # of ranks that have ended since
        if refusal := self._store.read(refusal_key(self._member.collective)):
            raise DisagreementError(refusal.decode(errors="replace"))
        return generation

    def _all_come(self, own: Arrival, require_open: Callable[[], None]) -> Generation | None:
        """Wait until the collective has begun, which any rank that finds all others may say.

        Return None if a new generation was formed before all had come.
        """
        member = self._member
        number = member.collective
        head = self._begin_gathering()
        generation = head.generation
        if not head.has_begun(number) and generation.number != member.generation.number:
            return None
        key = arrival_key(generation, number)
        member.roster.arrive(key, own)
        limit = Deadline(member.timeout_s())
        for pause_s in member.pauses(limit):
            require_open()
            head = member.head()
            arrivals = member.roster.arrivals(key)
            # first, as a rank that came to something else has gone on
            self._require_same(own, arrivals)
            is_current = head.generation.number == generation.number
            all_are_here = arrivals.keys() >= generation.members.keys() and not generation.silent
            if all_are_here and is_current and not head.has_begun(number):
                head = member.roster.change(head, head._replace(phase=RUNNING))
            if head.has_begun(number):
                break
            if head.generation.number != generation.number:
                return None
            if all_are_here or not self._propose_if_due(head, arrivals, own.what, limit):
                Event().wait(pause_s)
        self._delete_keys_of_last(generation, key)
        return generation

    def _propose_if_due(
        self, head: Head, arrivals: Mapping[int, Arrival], what: str, limit: Deadline
    ) -> bool:
        """Propose a generation without those that do not come to `what`; return False if it is too
        early, or others decide that.
        """
        member = self._member
        # where this rank is missing, the others went on, and have deleted the key
        if limit.waited_s < CHECK_S or member.rank not in arrivals:
            return False
        # a roll call that has begun decides who lives, and takes a timeout itself
        if member.roster.is_roll_call(head.generation):
            return False
        return member.propose_without_absent(head, arrivals, what, limit)

    def _begin_gathering(self) -> Head:
        """Write that ranks gather for this collective, unless another has; return the head."""
        member = self._member
        number = member.collective
        head = member.head()
        while head.collective < number:
            after = head._replace(collective=number, phase=GATHERING)
            head = member.require_member(member.roster.change(head, after))
        return head

    def _require_same(self, own: Arrival, arrivals: Mapping[int, Arrival]) -> None:
        """Raise `DisagreementError` on all ranks if one of `arrivals` cannot meet `own`."""
        found = {
            rank: text for rank, other in arrivals.items() if (text := _difference(own, other))
        }
        if not found:
            return
        rank = min(found, key=lambda each: found[each][2] != UNEQUAL_STEPS)
        ours, theirs, advice = found[rank]
        own_rank = self._member.rank
        why = f"rank {own_rank} comes to {ours} where rank {rank} comes to {theirs}: {advice}"
        self._store.set(refusal_key(self._member.collective), why)
        raise DisagreementError(why)

    def _delete_keys_of_last(self, generation: Generation, key: str) -> None:
        """Delete what the last collective left on the store: all have come to this one, so no rank
        reads it.
        """
        used = self._used
        self._used = [key]
        if generation.ranks[0] == self._member.rank:
            for each in used:
                self._store.delete_key(each)

    def leave(self) -> None:
        """Let new processes in again; every member that has seen the end calls it."""
        roster = self._member.roster
        number = self._member.collective
        head = roster.known
        if head.collective < number:  # an older answer came last, to another thread
            head = roster.head()
        while head.collective == number and head.phase != OPEN:
            head = roster.change(head, head._replace(phase=OPEN))

    def vote(self, ok: bool, generation: Generation) -> bool:
        """Return True if all members of `generation` vote `ok`; the answer is the same for all of
        them.

        A rank that votes no, is gone, or does not vote within the timeout decides for all. Raises
        `DisagreementError` if a member refused instead.
        """
        key = self._next_vote(generation)
        if ok:
            self.promise(key, generation)
        else:
            self.decline(key)
        return self.outcome(key, generation)

    def promise(self, key: str, generation: Generation) -> None:
        """Vote yes under `key`, once per member, and do not wait for the others. On any thread."""
        if self._store.add(key, 1) == len(generation.members):
            self._decide(key, WHOLE)

    def decline(self, key: str) -> None:
        """Vote no under `key`: this decides, unless all members have voted yes. On any thread."""
        self._decide(key, LOST)

    def forget(self, key: str) -> None:
        """Delete what a vote left on the store, once no member asks for its outcome."""
        self._store.delete_key(key)
        self._store.delete_key(f"{key}/outcome")

    def outcome(
        self, key: str, generation: Generation, look: Callable[[], None] = lambda: None
    ) -> bool:
        """Wait for the outcome of the vote under `key`, see `vote`, and decide that it is lost once
        not all will vote; `look` is called regularly, and may raise.
        """
        member = self._member
        limit = Deadline(member.timeout_s())
        for pause_s in member.pauses(limit):
            if found := self._store.read(f"{key}/outcome"):
                break
            if limit.waited_s >= CHECK_S and self._is_hopeless(generation, limit):
                self._decide(key, LOST)
            else:
                look()
                Event().wait(pause_s)
        outcome = found.decode(errors="replace")
        if outcome.startswith(REFUSED):
            raise DisagreementError(outcome.removeprefix(REFUSED))
        return outcome == WHOLE

    def _is_hopeless(self, generation: Generation, limit: Deadline) -> bool:
        """Return True if not all members of `generation` will vote; each rank probes another."""
        member = self._member
        is_over = limit.left_s <= 0 or member.current().number != generation.number
        return is_over or member.has_lost_neighbor(generation)

    def refuse(self, reason: str, generation: Generation) -> bool:
        """Refuse in place of a vote: no member gets a result, and all of them learn the `reason`.

        Return False if the vote was lost already: then the members repeat the work.
        """
        refusal = f"{REFUSED}rank {self._member.rank} refused: {reason}"
        return self._decide(self._next_vote(generation), refusal).startswith(REFUSED)

    def _next_vote(self, generation: Generation) -> str:
        self._votes[generation.number] += 1
        key = f"vote/{generation.number}.{self._votes[generation.number]}"
        self._used += [key, f"{key}/outcome"]
        return key

    def _decide(self, key: str, outcome: str) -> str:
        """Return the outcome that stands: the first one."""
        return str(self._store.compare_set(f"{key}/outcome", "", outcome).decode(errors="replace"))


def _difference(own: Arrival, other: Arrival) -> tuple[str, str, str] | None:
    """Return what each of the two comes to and what to do, or None if they may meet."""
    if own.made != other.made and None not in (own.made, other.made):
        ours, theirs = (f"{each.what} after {each.made} steps" for each in (own, other))
        return ours, theirs, UNEQUAL_STEPS
    return None if own.what == other.what else (own.what, other.what, OTHER_CALL)
