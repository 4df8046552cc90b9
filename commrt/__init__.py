# SPDX-License-Identifier: Apache-2.0
"""A communication runtime for data-parallel training: collectives as schedules that are proven,
then run.

::

    import commrt

    world = commrt.init()
    replica = commrt.attach(model, optimizer, algorithm=commrt.Torus2D())

The rest of the loop stays plain PyTorch. Names are imported when first used, so ``import commrt``
needs neither torch nor a GPU.
"""

from commrt.importing import names_of

__version__ = "0.2.0"

__getattr__, __dir__ = names_of(__name__)
