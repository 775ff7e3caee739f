# SPDX-License-Identifier: Apache-2.0
"""All client functions and values of coterie's own methods, registered so that messages may name them.

To be imported on the server and on every node; those of one's own are registered beside them: see
`coterie.engines.flower.registry`.
"""

from coterie import evaluate
from coterie.algorithms import (
    anchors,
    copies,
    em,
    fedavg,
    fedgmm,
    fedgrem,
    fedrep,
    ifca,
    judging,
    linear_by_fold,
    linear_representation,
    maml,
    mixture_starts,
    moments,
    neighbours,
    newton_fedprox,
    newton_ifca,
    noise_model,
    one_shot,
    preparation,
    random_effects,
    row_mixture,
    serving,
    starts,
)
from coterie.engines.flower.registry import register_step, register_value
from coterie.local import Training
from coterie.methods.personal import measure
from coterie.models import Dense, Network, Split
from coterie.models.mixtures import Gaussian, Regression

__all__ = ["STEPS", "VALUES"]

STEPS = (
    anchors.introduce, anchors.swapped, copies.answer_to, em.em_step, evaluate.measure, evaluate.measure_own, evaluate.place,
    evaluate.target_sums, fedavg.products, fedavg.train_private, fedavg.train_shared, fedgmm.describe, fedgmm.joint_step,
    fedgrem.gradient_em, fedrep.train_in_turn, ifca.assign_and_train, judging.judge,
    linear_representation.improve_representation, linear_representation.multiply_squares, maml.meta_train,
    measure.fit_personal, measure.judge_personal, mixture_starts.fit_locally, mixture_starts.renumber,
    moments.descend, moments.multiply_moments, neighbours.take_centre, one_shot.fit_once, one_shot.join,
    one_shot.train_member, preparation.column_sums, preparation.curvature, preparation.monomial_sums,
    preparation.squared_length, serving.about_centre, serving.adopt, serving.squared_errors, starts.attract,
    starts.fit_alone, starts.potential, starts.serve,
    newton_fedprox.fedprox_step, newton_ifca.candidate_gain, newton_ifca.cluster_step, newton_ifca.judge_clusters,
    newton_ifca.loss_gap, newton_ifca.own_model, noise_model.expect_noise, noise_model.judge_noise, noise_model.widen_noise,
    random_effects.adapt_effects, random_effects.expect_effects, random_effects.judge_effects, row_mixture.expect_rows,
    row_mixture.judge_mixed,
)  # fmt: skip
VALUES = (
    Dense,
    Gaussian,
    Network,
    Regression,
    Split,
    Training,
    preparation.Scaling,
    linear_by_fold.Problem,
    newton_ifca.ByLabel,
)

for _step in STEPS:
    register_step(_step)
for _value in VALUES:
    register_value(_value)
