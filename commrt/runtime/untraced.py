# SPDX-License-Identifier: Apache-2.0
"""Keeps torch's compiler out of what runs between the graphs of a compiled model or step.

It marks code objects for torch as modules are imported, by parts of torch that are not public.
"""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def untraced(what: T) -> T:
    """Keep torch's compiler from tracing `what`, a function or the plain methods of a class.

    Properties stay traced, and what a decorator of another file wraps.

    What it calls, such as numpy's functions, is not traced either. ``torch.compiler.disable`` would
    do the same, but its import takes seconds, and its wrappers cost calls in each step.
    """
    frames = torch._C._dynamo.eval_frame  # noqa: SLF001
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)  # noqa: SLF001
    # else code that the whole process shares, as that of `contextlib`, would be marked
    named: Any = what
    file = sys.modules[named.__module__].__file__
    for each in vars(what).values() if isinstance(what, type) else [what]:
        if isinstance(each, FunctionType) and each.__code__.co_filename == file:
            frames.set_code_exec_strategy(each.__code__, skip)
            function: Any = each
            function._torchdynamo_disable = True  # noqa: SLF001  # else calls of it are inlined
    return what
