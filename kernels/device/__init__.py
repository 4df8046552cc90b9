# SPDX-License-Identifier: Apache-2.0
"""The kernels in Triton.

Imported by `commrt.kernels.dispatch` only, and only if tensors are on a GPU.
"""

import triton
from torch.torch_version import TorchVersion

from commrt.kernels.dispatch import TRITON_AT_LEAST

if TorchVersion(triton.__version__) < TRITON_AT_LEAST:
    raise ImportError(
        f"commrt's kernels for GPUs need Triton {TRITON_AT_LEAST} or newer, and this is"
        f" {triton.__version__}: upgrade torch, which brings it"
    )
