# SPDX-License-Identifier: Apache-2.0
"""Programs to run by hand, and what they share with tests: pytest collects none of them."""

collect_ignore_glob = ["*.py"]
