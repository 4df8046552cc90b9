# SPDX-License-Identifier: Apache-2.0
from commrt.algorithms.direct import Direct as Direct
from commrt.algorithms.double_tree import DoubleTree as DoubleTree
from commrt.algorithms.gossip import Gossip as Gossip
from commrt.algorithms.halving_doubling import HalvingDoubling as HalvingDoubling
from commrt.algorithms.recursive_doubling import RecursiveDoubling as RecursiveDoubling
from commrt.algorithms.ring import Ring as Ring
from commrt.algorithms.ring import Rings as Rings
from commrt.algorithms.sliced import Sliced as Sliced
from commrt.algorithms.torus import Torus2D as Torus2D
