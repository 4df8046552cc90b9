# SPDX-License-Identifier: Apache-2.0
"""Which buckets may leave in a backward pass: full ones, in one order on all ranks.

It only counts: it touches no gradient, and sends nothing. See `ReadyOrder` for threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor


class ReadyOrder:
    """Counts the gradients of a backward pass, and says which buckets may leave: always in their
    own order.

    The last bucket leaves when the pass ends, even if it is full before: nothing is left then that
    it could overlap.

    Before a pass begins, and after it has ended, no gradient is awaited. So what counts them
    (`counter`) asks of each one only if it is awaited, and finds out by this that a pass begins.

    All calls belong to the thread that trains, and to that of its backward pass while one runs.
    Backup workers read `places` and `not_awaited` on the communication thread, when the pass has
    counted all that they ask for.

    >>> order = ReadyOrder([("b.weight", "b.bias"), ("a.weight",)])
    >>> order.arm()
    >>> order.mark("a.weight"), order.mark("b.bias"), order.mark("b.weight")
    (range(0, 0), range(0, 0), range(0, 1))
    >>> order.rest()
    range(1, 2)
    >>> order.places()
    [2, 1, 0]
    """

    def __init__(self, names: Sequence[Sequence[str]] = ()) -> None:
        self.not_awaited: dict[str, int] = {}
        """Gradients that nobody waits for, and the bucket of each: in a pass those that became
        ready, in that order; outside of one all. Only written here, and by `counter`'s hooks.
        """
        self._bucket_of: dict[str, int] = {}
        self._counts: list[int] = []  # gradients of each bucket
        self._missing: list[int] = []  # those of them that are awaited
        self._next = 0  # the bucket that leaves next
        self._last = -1
        self._names: Sequence[Sequence[str]] | None = None
        self.use(names)

    def use(self, names: Sequence[Sequence[str]]) -> None:
        """Count gradients of buckets that have these `names`; a pass may run only if they are those
        of before.
        """
        if names == self._names:
            return
        self._names = names
        self._bucket_of.clear()
        self._bucket_of.update({name: bucket for bucket, some in enumerate(names) for name in some})
        self._counts = [*map(len, names)]
        self._next = len(names)
        self._last = len(names) - 1
        self.not_awaited.clear()
        self.disarm()

    def arm(self) -> None:
        """Begin a backward pass: no gradient is ready."""
        self._missing[:] = self._counts
        self._next = 0
        self.not_awaited.clear()

    def disarm(self) -> None:
        """End a backward pass: no gradient is awaited."""
        self.not_awaited.update(self._bucket_of)

    def counter(
        self, name: str, fill: Callable[[], None], refuse: Callable[[str, Tensor], None]
    ) -> Callable[[Tensor], None]:
        """Return the hook of the gradient `name`, which autograd calls when it is ready.

        It calls ``fill()`` if a bucket has all its gradients then, and ``refuse(name, parameter)``
        instead if none was awaited. Cost: 0.8 us, nearly all of it autograd's.
        """
        not_awaited = self.not_awaited
        missing = self._missing
        bucket_of = self._bucket_of

        # calls nothing, as it runs for each gradient of each step
        def count(param: Tensor) -> None:
            if name in not_awaited:
                refuse(name, param)
                return
            not_awaited[name] = bucket = bucket_of[name]
            missing[bucket] -= 1
            if not missing[bucket]:
                fill()

        return count

    def mark(self, name: str) -> range:
        """Note that the awaited gradient `name` is ready, and return the buckets that may leave
        now, in order.
        """
        self.not_awaited[name] = bucket = self._bucket_of[name]
        self._missing[bucket] -= 1
        return self.full()

    def full(self) -> range:
        """Return the buckets that may leave now, in order."""
        first = self._next
        while self._next < self._last and not self._missing[self._next]:
            self._next += 1
        return range(first, self._next)

    def rest(self) -> range:
        """Return the buckets that have not left when the backward pass ends."""
        first = self._next
        self._next = len(self._missing)
        return range(first, self._next)

    @property
    def all_left(self) -> bool:
        """True from `rest` on, until the next pass begins; on any thread."""
        return self._next == len(self._missing)

    def places(self) -> list[int]:
        """Return the places of all gradients in the order in which they became ready; those that
        did not come last.
        """
        place = {name: i for i, name in enumerate(self._bucket_of)}
        return [place[name] for name in self.not_awaited | place]
