# SPDX-License-Identifier: Apache-2.0
"""What can be proven of a schedule before it runs. Needs only numpy; changes nothing."""

from commrt.importing import names_of

__getattr__, __dir__ = names_of(__name__)
