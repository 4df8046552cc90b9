# SPDX-License-Identifier: Apache-2.0
"""When a step ends: sequences of what a loop does, and the steps that end at each of them."""

from random import Random

import pytest

from commrt.training.step_clock import MOST_PASSES, StepClock

EVENTS = {
    "pass": lambda clock: clock.on_pass(within_step=False),
    "inner": lambda clock: clock.on_pass(within_step=True),
    "A[": lambda clock: clock.on_step_begin("A"),
    "A]": lambda clock: clock.on_step_end("A"),
    "B[": lambda clock: clock.on_step_begin("B"),
    "B]": lambda clock: clock.on_step_end("B"),
    "need": StepClock.on_weights_needed,
    "save": StepClock.on_save,
    "skip": lambda clock: clock.leave_out(running=False),
    "skip!": lambda clock: clock.leave_out(running=True),
    "end": lambda clock: clock.on_weights_needed() if clock.is_left_out else None,  # of a backward pass
}


def ends(clock, events):
    """Return the events, each with the steps that end there; "A" stands for "A[ A]"."""
    said = []
    for event in events.replace("A ", "A[ A] ").replace("B ", "B[ B] ").split():
        ended = EVENTS[event](clock) or ()
        for step in ended:
            assert step == clock.step
            clock.end_step()
        said.append(" ".join([event, *map(str, ended)]))
    return ", ".join(said)


LOOPS = {
    "one optimizer": ("A", "pass, A[, A] 0, pass, A[, A] 1"),
    "two optimizers": ("AB", "pass, A[, A], B[, B] 0, pass, A[, A], B[, B] 1"),
    "of which one never steps": ("AB", "pass, A[, A], pass, A[ 0, A], pass, A[ 1, A]"),
    "of which one steps rarely": ("AB", "pass, A[, A], pass, A[ 0, A], B[, B] 1, pass, A[, A], pass, A[ 2, A]"),
    "that take turns": ("AB", "pass, A[, A], pass, B[, B] 0 1, pass, A[, A], pass, B[, B] 2 3"),
    "a scaler leaves a step out": ("A", "pass, pass, A[, A] 0 1, pass, A[, A] 2"),
    "and the weights are needed": ("A", "pass, need 0, pass, A[, A] 1, need"),
    "of two, one has stepped": ("AB", "pass, A[, A], need 0, B[, B], pass, A[, A], B[, B] 1"),
    "two steps with one pass": ("A", "pass, A[, A] 0, A[, A], pass, A[, A] 1"),
    "a step before all passes": ("A", "A[, A], pass, A[, A] 0"),
    "a closure": ("A", "A[, inner, inner, A] 0 1, A[, inner, A] 2"),
    "a closure, the other steps first": ("AB", "pass, B[, B], A[, inner, A] 0 1, B[, B], A[, inner, A], B[, B] 2"),
    "a step within a step": ("AB", "pass, A[, B[, B], A] 0"),
    "no optimizers": ("", "pass, need 0, pass, pass, need 1 2, need"),
    "a checkpoint between pass and step": ("A", "pass, save 0, A[, A], pass, A[, A] 1, save"),
    "or between two steps": ("AB", "pass, A[, A], save, B[, B] 0, save"),
    "a pass that is to be left out": ("A", "skip, pass, end 0, pass, end, A[, A] 1"),
    "said while it runs": ("A", "pass, end, skip!, end 0, pass, end, A[, A] 1"),
}


@pytest.mark.parametrize(("optimizers", "loop"), LOOPS.values(), ids=LOOPS)
def test_steps_end(optimizers, loop):
    events = " ".join(part.split()[0] for part in loop.split(", "))
    assert ends(StepClock(optimizers), events) == loop


@pytest.mark.parametrize("seed", range(200))
def test_each_pass_belongs_to_one_step_that_ends_once_and_in_order_also_after_errors(seed):
    random, optimizers = Random(seed), "AB"[: seed % 3]
    clock, ended, passes = StepClock(optimizers), [], 0
    for event in random.choices([each for each in EVENTS if each[0] not in "AB" or each[0] in optimizers], k=60):
        due = EVENTS[event](clock) or range(0)
        passes += event in {"pass", "inner"}
        assert clock.passes == passes
        assert not due or (due.start, due.stop <= passes) == (clock.step, True)
        for step in due[: random.choice([1, None])]:  # an error keeps the others from ending
            ended.append(step)
            clock.end_step()
        if random.random() < 0.1:  # from a checkpoint
            before, pending = clock, clock.pending()
            clock = StepClock(optimizers)
            clock.restart(before.step, *pending)
            assert (clock.is_used, clock.passes) == (before.is_used, passes)
    assert [*ended, *clock.on_weights_needed()] == [*range(passes)]


@pytest.mark.parametrize(
    ("optimizers", "events", "unused"),
    [("A", "pass", 25), ("AB", "pass A", 0), ("A", "pass need", 25), ("", "pass need", 0), ("A", "inner", 0)],
)
def test_passes_that_no_optimizer_uses_are_counted(optimizers, events, unused):
    ends(clock := StepClock(optimizers), f"{events} " * 25)
    assert MOST_PASSES < 25
    assert clock.unused == unused
