# SPDX-License-Identifier: Apache-2.0
"""Run the demo and draw the figure of the README: `python docs/figures/make.py`."""

import tempfile
from pathlib import Path

from coterie.fitting import Score, fit
from coterie.report.numbers import percent_ticks
from coterie.report.plots import dots
from coterie.studies.digits_demo import demo_clients, demo_options

HERE = Path(__file__).parent


def draw(scores: list[Score]) -> str:
    """Draw held-out beside training accuracy, a row for each method."""
    names = [score.label[:1].upper() + score.label[1:] for score in scores]
    columns = {
        "held-out rows": [score.test or float("nan") for score in scores],
        "training rows": [score.train or float("nan") for score in scores],
    }
    return dots(
        names,
        columns,
        strong=0,
        form=percent_ticks,
        x_label="accuracy, higher is better",
        title="144 clients, digits in four rotations that nobody was told of",
        width=640,
        standalone=True,
    )


def main() -> None:
    """Write methods.svg beside this file and print what it shows."""
    with tempfile.TemporaryDirectory() as folder:
        fitted = fit(demo_clients(0), demo_options(0), folder=Path(folder))
    (HERE / "methods.svg").write_text(draw(fitted.scores) + "\n", encoding="utf-8")
    for score in fitted.scores:
        print(f"{score.label:20} held-out {score.test:.3f}  training {score.train:.3f}")


if __name__ == "__main__":
    main()
