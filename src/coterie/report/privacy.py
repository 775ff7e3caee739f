# SPDX-License-Identifier: Apache-2.0
"""The account of a privacy budget: what was spent on which questions."""

from collections.abc import Mapping
from typing import Any

from coterie.report.run_folder import Run
from coterie.report.section import Section, section

__all__ = ["privacy", "said"]


def privacy(run: Run) -> Section | None:
    """Lay out what each kind of question cost."""
    account = run.results.get("privacy")
    if not account:
        return None
    rows = [
        {
            "purpose": one["purpose"], "times": one["times"], "noise": f"{one['multiplier']:.3g}",
            "sampling": f"{one['sampling']:.0%}", "alone": f"{one['alone']:.2f}",
        }
        for one in account["questions"]
    ]  # fmt: skip
    return section("privacy", "Privacy", said=said(account), questions=rows)


def said(account: Mapping[str, Any]) -> str:
    """What was spent, in a sentence."""
    return f"privacy of every client: epsilon {account['spent']:.2f} of {account['epsilon']:g}, delta {account['delta']:.2g}"
