# SPDX-License-Identifier: Apache-2.0
"""Train with backup workers: the vote, the late ranks that catch up, and processes that replace dead ones."""
