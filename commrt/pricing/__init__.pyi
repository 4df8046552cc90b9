# SPDX-License-Identifier: Apache-2.0
from commrt.pricing.cluster import Cluster as Cluster
from commrt.pricing.cluster import builtin_clusters as builtin_clusters
from commrt.pricing.price import Price as Price
from commrt.pricing.price import Pricing as Pricing
