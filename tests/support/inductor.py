# SPDX-License-Identifier: Apache-2.0
"""What torch's compiler needs of a machine."""

import sysconfig
from pathlib import Path

import torch
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler


def what_inductor_lacks() -> str:
    """Return what keeps inductor from compiling here; empty if nothing does."""
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "a C++ compiler"
    if " " in torch.__file__:
        return "a path to torch without spaces, which it gives to the linker unquoted"
    return "" if Path(sysconfig.get_path("include"), "Python.h").exists() else "Python.h"
