# SPDX-License-Identifier: Apache-2.0
from commrt.local_sgd.outer import HeavyBall as HeavyBall
from commrt.local_sgd.outer import Nesterov as Nesterov
from commrt.local_sgd.outer import Outer as Outer
from commrt.local_sgd.outer import SlowMomentum as SlowMomentum
from commrt.local_sgd.policy import LocalSGD as LocalSGD
from commrt.local_sgd.policy import Mix as Mix
from commrt.local_sgd.policy import cocod as cocod
from commrt.local_sgd.policy import dasgd as dasgd
from commrt.local_sgd.policy import diloco as diloco
from commrt.local_sgd.policy import noloco as noloco
from commrt.local_sgd.policy import streaming_diloco as streaming_diloco
