# SPDX-License-Identifier: Apache-2.0
from commrt.proof.additions import order_of_additions as order_of_additions
from commrt.proof.additions import require_one_order as require_one_order
from commrt.proof.replay import prove as prove
from commrt.proof.replay import verify as verify
from commrt.proof.spec import all_gather as all_gather
from commrt.proof.spec import all_reduce as all_reduce
from commrt.proof.spec import all_to_all as all_to_all
from commrt.proof.spec import broadcast as broadcast
from commrt.proof.spec import collective_of as collective_of
from commrt.proof.spec import doubly_stochastic as doubly_stochastic
from commrt.proof.spec import gather as gather
from commrt.proof.spec import promise as promise
from commrt.proof.spec import reduce as reduce
from commrt.proof.spec import reduce_scatter as reduce_scatter
from commrt.proof.spec import scatter as scatter
