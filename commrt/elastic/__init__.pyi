# SPDX-License-Identifier: Apache-2.0
from commrt.errors import Evicted as Evicted
from commrt.errors import QuorumLost as QuorumLost
from commrt.runtime.generation import Loss as Loss
