# SPDX-License-Identifier: Apache-2.0
"""The estimator of the mixed model."""

from typing import ClassVar

import numpy as np

from coterie.errors import DataError
from coterie.estimators.base import estimator
from coterie.estimators.personal import Personalised
from coterie.methods.base import Fitted
from coterie.methods.mixed.model import FromEffects, MixedModels, interval_of
from coterie.registry import MixedModelOptions

__all__ = ["MixedModel"]


@estimator
class MixedModel(Personalised, MixedModelOptions):
    """The linear mixed model: fixed effects for all, random effects of every client; for two classes by Laplace.

    A client that is new is predicted by its labelled rows, and without any by the fixed effects alone.

    Attributes
    ----------
    fixed_effects_ : dict
        Name -> estimate, error (standard), low and high (95 % interval), in the data's own units.
    variance_ : dict
        Name -> variance of a random effect.
    residual_sd_, icc_, log_likelihood_, aic_, bic_
        Of the model; `residual_sd_` is None for classes.
    summary_ : dict
        All quantities, as a run's `run.json` has them under `mixed`.
    client_names_, personal_, scores_, spread_
        As of `Local`; ``theta_`` [P] is the model of the population.
    """

    method = "mixed"
    doubts: ClassVar[tuple[str, ...]] = ("has not converged",)

    def client_effects(self) -> dict[str, np.ndarray]:
        """Random effects of the training's clients as columns: client, and of each effect it, its deviation, low and high.

        Deviations are given the clients' rows and all that is common (BLUPs with conditional standard deviations).
        """
        models = self.personal_
        assert isinstance(models, MixedModels)
        assert isinstance(models.fit, FromEffects)
        own = models.client_effects
        if own is None:
            raise DataError(
                "random effects are stored at the clients", "predict there: coterie predict RUN DATA --state FOLDER"
            )
        low, high = interval_of(own.effects, own.deviation)
        columns: dict[str, np.ndarray] = {"client": own.names}
        for r, name in enumerate(models.fit.names):
            parts = {"": own.effects, " deviation": own.deviation, " low": low, " high": high}
            columns |= {f"{name}{part}": value[:, r].numpy() for part, value in parts.items()}
        return columns

    # -- inside -------------------------------------------------------------------------------------------------------
    def _know(self, found: Fitted) -> None:
        super()._know(found)
        said = found.models.quantities
        self.summary_ = said
        self.fixed_effects_ = {one["name"]: {k: v for k, v in one.items() if k != "name"} for one in said["fixed"]}
        self.variance_ = {one["name"]: one["variance"] for one in said["random"]}
        self.residual_sd_, self.icc_, self.log_likelihood_ = said["residual_sd"], said["icc"], said["log_likelihood"]
        self.aic_, self.bic_ = said["aic"], said["bic"]
