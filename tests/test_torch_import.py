# SPDX-License-Identifier: Apache-2.0
"""``import commrt`` is enough to open a group, in any order with torch, and imports no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.slow]

OPEN = """
import sys
import torch.distributed as dist
assert not any("torch_import" in type(finder).__module__ and finder._name == "torch" for finder in sys.meta_path)
dist.init_process_group("commrt", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(tensor := torch.ones(3))
print(dist.get_backend(), tensor.tolist())
dist.destroy_process_group()
"""


def said(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "imports",
    [
        "import commrt, torch",
        "import torch, commrt",
        "import commrt.c10d, torch",
        "import torch, torch._dynamo, commrt, commrt.c10d",
        "import importlib.util, commrt; importlib.util.find_spec('torch'); import torch",
        "import threading, commrt; threading.Thread(target=__import__, args=['torch']).start(); import torch",
        "import commrt, importlib; importlib.reload(commrt); import torch",
        "import commrt, sys; sys.modules.pop('commrt'); sys.modules.pop('commrt.torch_import'); import commrt, torch",
    ],
)
def test_a_group_is_opened_whatever_was_imported_first(imports):
    assert said(imports + OPEN) == "commrt [1.0, 1.0, 1.0]"


def test_commrt_imports_no_torch_and_torch_no_backend():
    assert said("import commrt, sys; print('torch' in sys.modules)") == "False"
    assert said("import commrt, torch, sys; print('commrt.c10d' in sys.modules)") == "False"
    assert said("import torch, sys; print('commrt' in sys.modules)") == "False"


def test_a_torch_that_cannot_be_imported_can_be_imported_later(tmp_path):
    (tmp_path / "torch.py").write_text("1 / 0")
    program = f"""
import sys, commrt
sys.path.insert(0, {str(tmp_path)!r})
try:
    import torch
except ZeroDivisionError:
    sys.path.pop(0)
    sys.path_importer_cache.clear()
import torch
"""
    assert said(program + OPEN) == "commrt [1.0, 1.0, 1.0]"
