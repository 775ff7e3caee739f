# SPDX-License-Identifier: Apache-2.0
"""Personal models from fit to folder: measure, plan, run (from options), model (in use), tables and folder.

The algorithms are in `coterie.algorithms` (`fedrep`, `lg_fedavg`, `maml`, `srpfl`), split networks in `coterie.models`.
"""
