# SPDX-License-Identifier: Apache-2.0
"""The mixed model from fit to folder: design (of effects), run (from options), quantities (in own units), model (in use)."""
