# SPDX-License-Identifier: Apache-2.0
"""Random command lines, mostly good ones; and that a program takes each or refuses it in one line."""

from commands import Runner
from fuzzing import NUMBERS, ODD_TEXTS, TEXTS, in_time
from hypothesis import strategies as st

from commrt.errors import CommrtError, DisagreementError, ScheduleError, UsageError
from commrt.tools.commands.app import in_one_line

STOPPED = "stopped here"
"""The error of what a test puts in the place of workers."""
BAD = ODD_TEXTS | TEXTS | NUMBERS.map(str)
MANY = st.sampled_from(["-1", "0", "4097", "65537", "1e9", "1000000000", "9" * 30, "nan", "1_0", "٣", "4.0"])


def mostly(*good, bad=BAD):
    """A value of `good`, or now and then a bad one."""
    return st.one_of(*[st.sampled_from(good)] * 4, bad)


ALGORITHM = mostly("ring", "halving_doubling", "torus2d", "direct", "gossip", "local", "backup", "RING", "ddp")
RANKS = mostly("1", "2", "3", "4", "6", "8", "13", bad=MANY)
COUNT = mostly("1", "2", "5", bad=MANY | BAD)
SIZE = mostly("1", "0.5", "25", "1e6", bad=BAD)
FILE = mostly("/dev/null", "/nowhere.json", "/", "..")
LOCAL = {"--period": COUNT, "--delay": COUNT, "--fragments": COUNT}


def drawn_options(draw, options):
    """Up to six of `options`, each with a value; those whose values are None are flags."""
    chosen = draw(st.lists(st.sampled_from(sorted(options)), unique=True, max_size=6)) if options else []
    return [
        word for option in chosen for word in ([option] if options[option] is None else [option, draw(options[option])])
    ]


def told_or_refused(program, words, *, may_be_silent=False):
    """As `main` does: bad input is one line and exit code 2."""
    with in_time():
        result = Runner().invoke(program, words)
    refusal = result.exception
    if isinstance(refusal, CommrtError):
        line = in_one_line(refusal)
        assert line.isprintable()
        assert len(line) < 2000, line
        assert isinstance(refusal, UsageError | ScheduleError | DisagreementError) or STOPPED in line
    elif refusal is None or (isinstance(refusal, SystemExit) and result.exit_code in (0, 1, 2)):
        assert result.output or may_be_silent
        assert "nan" not in result.stdout.lower().replace("nancy", "") or "'nan" in result.stdout, result.stdout
    else:
        raise refusal
