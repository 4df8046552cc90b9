# SPDX-License-Identifier: Apache-2.0
"""What ranks tell each other in words, on torch's store; every question ends."""
