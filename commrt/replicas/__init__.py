# SPDX-License-Identifier: Apache-2.0
"""Attached models: how each way to train exchanges its step, hidden under the passes."""
