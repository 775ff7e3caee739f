# SPDX-License-Identifier: Apache-2.0
"""The HTML report of a run folder, and the small SVG plots it is made of."""

from coterie.report.page import write_report

__all__ = ["write_report"]
