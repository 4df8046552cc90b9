# SPDX-License-Identifier: Apache-2.0
"""What fails in CI because it takes too much CPU time."""

from pathlib import Path

import cpu_limit
import pytest
from cpu_limit import AgainAlone, CpuLimit

pytest_plugins = ["pytester"]

CASES = """\
    import subprocess, sys
    from multiprocessing import get_context
    from time import process_time

    import pytest

    BURN = "from time import process_time\\nbegin = process_time()\\nwhile process_time() < begin + 0.2: pass"

    def burn():
        exec(BURN, {})

    def test_itself():
        burn()

    @pytest.fixture
    def dear():
        burn()

    def test_set_up(dear):
        pass

    def test_child():
        subprocess.run([sys.executable, "-S", "-c", BURN])

    def test_forked():
        process = get_context("forkserver").Process(target=exec, args=(BURN, {}))
        process.start()
        process.join()

    def test_cheap():
        pass

    def test_import(tmp_path, monkeypatch):
        (tmp_path / "burns_when_imported.py").write_text(BURN)
        monkeypatch.syspath_prepend(tmp_path)
        import burns_when_imported

    @pytest.mark.cpu_limit(60, reason="to see")
    def test_with_a_limit_of_its_own():
        burn()

    @pytest.mark.slow
    def test_slow():
        burn()
"""


def test_an_unmarked_test_that_takes_much_cpu_fails_and_says_what_to_do(pytester):
    pytester.makepyfile(CASES)
    run = pytester.inline_run("-p", "no:cacheprovider", plugins=[CpuLimit(0.15)])
    passed, _, failed = run.listoutcomes()
    assert [report.nodeid.partition("::")[2] for report in passed] == [
        "test_cheap",
        "test_import",
        "test_with_a_limit_of_its_own",
        "test_slow",
    ]
    assert [report.nodeid.partition("::")[2] for report in failed] == [
        "test_itself",
        "test_set_up",
        "test_child",
        "test_forked",
    ]
    assert "s of CPU, and a test may take 0.15 s: mark it slow, or make it cheaper" in failed[0].longrepr


CONFTEST = """\
    import sys

    sys.path.append({support!r})
    from cpu_limit import CpuLimit

    def pytest_addoption(parser):
        parser.addoption("--cpu-limit", type=float)

    def pytest_configure(config):
        if limit_s := config.getoption("--cpu-limit"):
            config.pluginmanager.register(CpuLimit(limit_s))
"""
TWICE = """\
    from pathlib import Path
    from time import process_time

    def burn():
        begin = process_time()
        while process_time() < begin + 0.2: pass

    def test_first_time():
        if not Path("ran").exists():
            Path("ran").touch()
            burn()
    {another}
"""


@pytest.mark.slow
def test_what_took_much_beside_others_fails_only_if_it_does_so_alone(pytester):
    pytester.makeconftest(CONFTEST.format(support=str(Path(cpu_limit.__file__).parent)))
    for another, status in (("", 0), ("\n    def test_always(): burn()", 1)):
        pytester.makepyfile(TWICE.format(another=another))
        pytester.path.joinpath("ran").unlink(missing_ok=True)
        run = pytester.inline_run("-p", "no:cacheprovider", plugins=[CpuLimit(0.15, fails=False), AgainAlone(0.15)])
        assert not run.listoutcomes()[2], "nothing fails beside others"
        assert run.ret == status
