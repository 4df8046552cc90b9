# SPDX-License-Identifier: Apache-2.0
"""Random input from outside. Code under test must accept it or refuse it with an error of commrt.

In the suite each test meets a few cases, always the same ones; ``make fuzz`` meets as many more as its profile says.
"""

import signal
from contextlib import contextmanager

import profiles  # noqa: F401  # where tests/conftest.py was not loaded
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from commrt.errors import CommrtError

LONG_S = 30.0
"""A call that computes for longer counts as hanging."""
THOROUGH = settings.get_current_profile_name() == "thorough"
MORE = settings.default.max_examples // settings.get_profile("busy").max_examples
"""How many times as many cases as in the suite."""

ODD_TEXTS = st.sampled_from(
    [
        "", " ", "0", "1", "2", "-1", "-0", "+1", "1_000", " 3 ", "3 4", "٣", "½", "²", "1e3", "1e400", "0x10", "1.5",
        "nan", "NaN", "inf", "-inf", "Infinity", "true", "None", "null", "[]", "{}", "1,2", "1;2", "4(x2)", "9" * 30,
        "9" * 5000, "/", "..", "\n", "a\nb", "\t", "\x1b[31m", "é", "\u202e", "\ufeff1", "😀", "auto", "a" * 300,
    ]
)  # fmt: skip
TEXTS = ODD_TEXTS | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
NUMBERS = (
    st.integers(-3, 9)
    | st.sampled_from([10**9, -(10**9), 2**31, 2**63, 2**64, 10**30, 10**400])
    | st.floats(allow_nan=True, allow_infinity=True)
)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
"""As JSON can say them, and as wrong arguments."""
FILES = st.binary(max_size=200)


def cases(few):
    """Settings for so many cases in the suite."""
    return settings(
        max_examples=few * MORE,
        derandomize=not THOROUGH,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )


@contextmanager
def in_time(limit_s=LONG_S):
    """Fail if the body computes for more than `limit_s`; for the main thread. What only waits, pytest-timeout ends."""

    def fail(*_):
        raise AssertionError(f"no end after {limit_s:g} s of computing")

    before = signal.signal(signal.SIGPROF, fail)
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def met(call, *args, **more):
    """Return what `call` returns, or None if it raises a `CommrtError` with a message; other errors pass."""
    with in_time():
        try:
            return call(*args, **more)
        except CommrtError as error:
            assert str(error).strip(), "an error without words"  # noqa: PT017
            return None
