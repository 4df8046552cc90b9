# SPDX-License-Identifier: Apache-2.0
"""The kernels in Triton. Only `commrt.kernels` imports this, and only where there is a GPU to run them on."""

import triton

from commrt.kernels.dispatch import TRITON_AT_LEAST, is_too_old

if is_too_old(triton.__version__):
    raise ImportError(
        f"commrt's kernels for GPUs need Triton {TRITON_AT_LEAST} or newer, and this is {triton.__version__}: "
        "upgrade torch, which brings it"
    )
