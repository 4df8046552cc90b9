# SPDX-License-Identifier: Apache-2.0
"""Which rank trains on which samples, and on how many."""
