# SPDX-License-Identifier: Apache-2.0
"""Parameters -> buckets -> the buffers that travel."""
