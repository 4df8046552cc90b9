# SPDX-License-Identifier: Apache-2.0
"""Kernels run in Triton's interpreter, which decides at its first import; no test fails because a machine is busy."""

import gc
import os
import signal
import tempfile
from contextlib import ExitStack
from multiprocessing import forkserver, set_forkserver_preload

import profiles  # noqa: F401  # loads one
import pytest

os.environ["TRITON_INTERPRET"] = "1"
# torch asks a name server for the name of each address that its store connects to, and waits 5 s for a lost answer.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# CuPy and Triton make folders in the home, which may be read-only.
os.environ.setdefault("CUPY_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"commrt-tests-cupy-{os.getuid()}"))  # noqa: PTH118
os.environ.setdefault("TRITON_HOME", os.path.join(tempfile.gettempdir(), f"commrt-tests-triton-{os.getuid()}"))  # noqa: PTH118

# Each rank that compiles would start processes that import torch, and have a compiler try what it knows of vectors.
os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "0"}
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several ranks share the cores: more threads only wait for each other

pytest.register_assert_rewrite("late_ranks", "local_loops")  # they check what ranks returned
collect_ignore = ["support", "audits"]  # helpers, in some of which Triton compiles, and programs to run by hand


def pytest_addoption(parser):
    parser.addoption(
        "--over", choices=["threads", "nccl", "peers"], default="threads", help="what connects ranks of one process"
    )


def pytest_configure(config):
    from commrt.testing.processes import IMPORTED  # noqa: PLC0415  # after the environment is set

    set_forkserver_preload(IMPORTED)  # whichever test starts it: or each rank imports torch


def pytest_unconfigure():
    forkserver._forkserver._stop()  # waits for it: so its CPU time, and that of its ranks, counts as ours


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # many tests collect garbage, which takes 0.2 s if it looks at all of torch


@pytest.fixture(autouse=True, scope="session")
def _interruptible():
    """Let Ctrl-C end tests and what they start, though a shell ignores it in the background (`make test &`)."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _over(request):
    from transports import over_nccl, over_peers  # noqa: PLC0415  # after the environment is set

    from commrt.testing import ranks  # noqa: PLC0415

    before = ranks.over_threads
    ranks.over_threads = {"threads": ranks.over_threads, "nccl": over_nccl, "peers": over_peers}[
        request.config.getoption("--over")
    ]
    yield
    ranks.over_threads = before


@pytest.fixture
def members():
    """Forms a generation of so many members, who leave when the test ends."""
    from store_members import members_of  # noqa: PLC0415  # after the environment is set

    with ExitStack() as stack:
        yield lambda ranks, needed=0: stack.enter_context(members_of(ranks, needed))
