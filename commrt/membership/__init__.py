# SPDX-License-Identifier: Apache-2.0
"""Which ranks are in the world, which of them count in a step, and what they agree on through torch's store."""
