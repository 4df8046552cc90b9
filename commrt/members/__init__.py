# SPDX-License-Identifier: Apache-2.0
"""Which ranks are left, which of them count in a step, and how all come to the same answer."""
