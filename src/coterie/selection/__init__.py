# SPDX-License-Identifier: Apache-2.0
"""Which structure do clients have? All of them under one protocol of held-out rows and held-out clients."""

from coterie.selection.fit import fit_chosen
from coterie.selection.result import ORDER, Comparison, Difference, FitAdvice, Grouping, Structure, Trial
from coterie.selection.run import compare

__all__ = ["ORDER", "Comparison", "Difference", "FitAdvice", "Grouping", "Structure", "Trial", "compare", "fit_chosen"]
