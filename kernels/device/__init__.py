# SPDX-License-Identifier: Apache-2.0
"""The kernels in Triton. Only `commrt.kernels` imports this, and only where there is a GPU to run them on."""
