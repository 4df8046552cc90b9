# SPDX-License-Identifier: Apache-2.0
"""What a schedule costs on a described cluster, and which one is cheapest. Needs only numpy."""

from commrt.importing import names_of

__getattr__, __dir__ = names_of(__name__)
