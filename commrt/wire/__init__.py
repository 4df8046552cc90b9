# SPDX-License-Identifier: Apache-2.0
"""Gradients -> buckets -> the buffer that travels."""
