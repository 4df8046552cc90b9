# SPDX-License-Identifier: Apache-2.0
"""Ways to train a model on many ranks."""

from commrt.importing import names_of

__getattr__, __dir__ = names_of(__name__)
