# SPDX-License-Identifier: Apache-2.0
"""Before and after training: plan, simulate, draw, measure. No training job imports this."""

from commrt.importing import names_of

__getattr__, __dir__ = names_of(__name__)
