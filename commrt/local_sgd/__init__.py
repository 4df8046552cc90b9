# SPDX-License-Identifier: Apache-2.0
"""Train by local SGD: ranks train alone for a period, and average what they have learned.

Its settings, in `policy` and `outer`, need no torch.
"""

from commrt.importing import names_of

__getattr__, __dir__ = names_of(__name__)
