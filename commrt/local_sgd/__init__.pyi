# SPDX-License-Identifier: Apache-2.0
from commrt.algorithms.local import LocalSGD as LocalSGD
from commrt.algorithms.local import Mix as Mix
from commrt.algorithms.local import cocod as cocod
from commrt.algorithms.local import dasgd as dasgd
from commrt.algorithms.local import diloco as diloco
from commrt.algorithms.local import noloco as noloco
from commrt.algorithms.local import streaming_diloco as streaming_diloco
from commrt.algorithms.outer import HeavyBall as HeavyBall
from commrt.algorithms.outer import Nesterov as Nesterov
from commrt.algorithms.outer import Outer as Outer
from commrt.algorithms.outer import SlowMomentum as SlowMomentum
