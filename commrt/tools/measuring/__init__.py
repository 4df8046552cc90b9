# SPDX-License-Identifier: Apache-2.0
"""What is measured on running worlds and on models: links, and what a model gives an exchange to do."""
