# SPDX-License-Identifier: Apache-2.0
"""Train with backup workers: the vote, late ranks that catch up, and processes that replace dead
ones. Its settings, in `policy`, need no torch.
"""

from commrt.importing import names_of

__getattr__, __dir__ = names_of(__name__)
