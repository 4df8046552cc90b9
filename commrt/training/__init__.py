# SPDX-License-Identifier: Apache-2.0
"""Ways to train a model on many ranks."""
