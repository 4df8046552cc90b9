# SPDX-License-Identifier: Apache-2.0
"""``import commrt`` is enough to open a group, in any order with torch, and imports no torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

OPEN = """
import torch.distributed as dist
dist.init_process_group("commrt", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(tensor := torch.ones(3))
print(dist.get_backend(), tensor.tolist())
dist.destroy_process_group()
"""
STAND_IN = {
    "__init__.py": "from torch import cuda, distributed",
    "cuda.py": "def device_count(): return 0",
    "distributed.py": """
def is_available(): return True
def init_process_group(name): print(name, Backend._plugins[name.upper()](None))
class Backend:
    _plugins = {}
    def register_backend(name, create, **options): Backend._plugins[name.upper()] = lambda _: sorted(options.items())
""",
}
"""A torch that is imported at once."""
REGISTERED = """
import torch.distributed as dist
dist.init_process_group("commrt")
"""
BROKEN_AT_FIRST = """
import sys, commrt
sys.path.insert(0, {!r})
try:
    import torch
except ZeroDivisionError:
    sys.path.pop(0)
    sys.path_importer_cache.clear()
import torch
"""


def said(program, **environment):
    command, given = [sys.executable, "-c", program], os.environ | environment
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100, env=given)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports",
    [
        "import commrt, sys; assert 'torch' not in sys.modules; import torch; assert 'commrt.c10d' not in sys.modules",
        "import torch, sys; assert 'commrt' not in sys.modules; import commrt",
        "import torch, torch._dynamo, commrt, commrt.c10d",
    ],
)
def test_a_group_is_opened_whatever_was_imported_first(imports):
    assert said(imports + OPEN) == "commrt [1.0, 1.0, 1.0]"


@pytest.mark.parametrize(
    "imports",
    [
        "import importlib.util, commrt; importlib.util.find_spec('torch'); import torch",
        "import threading, commrt; threading.Thread(target=__import__, args=['torch']).start(); import torch",
        "import commrt, importlib; importlib.reload(commrt); import torch",
        "import commrt, sys; sys.modules.pop('commrt'); sys.modules.pop('commrt.importing'); import commrt, torch",
        BROKEN_AT_FIRST,
    ],
)
def test_the_backend_is_registered_however_torch_is_imported(imports, tmp_path):
    (tmp_path / "torch.py").write_text("1 / 0")
    folder = tmp_path / "stand-in" / "torch"
    folder.mkdir(parents=True)
    for name, text in STAND_IN.items():
        (folder / name).write_text(text)
    path = os.pathsep.join([str(folder.parent), os.environ.get("PYTHONPATH", "")])
    expected = "commrt [('devices', ['cpu']), ('extended_api', True)]"
    assert said(imports.format(str(tmp_path)) + REGISTERED, PYTHONPATH=path) == expected
