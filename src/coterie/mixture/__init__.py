# SPDX-License-Identifier: Apache-2.0
"""Mixtures from fit to folder: fit, results, model (in use), scores, run (from options), tables and folder.

The algorithms are in `coterie.algorithms` (`fedgrem`, `em`, `fedgmm`), families of components in `coterie.models`.
"""
