# SPDX-License-Identifier: Apache-2.0
"""What help says that studies' options are chosen among: names, without what they stand for, which takes long to import."""

__all__ = [
    "BAD_CLIENTS", "CASES", "CONTAMINATIONS", "DATASETS", "FACTORS", "IMAGE_METHODS", "LINEAR_METHODS", "MIXED_METHODS",
    "MIXED_PAPER", "MIXTURE_METHODS", "PRIVATE_METHODS", "REAL_DATA", "SPEEDS", "VARIABLE", "VARIANTS",
]  # fmt: skip

VARIABLE = "COTERIE_CHECKPOINT"  # of the environment: a folder for checkpoints

MIXED_METHODS = (
    "moment-descent-fedavg", "moment-descent-fedprox", "ifca-random", "ifca-spread", "one-shot", "fedavg",
    "oracle", "oracle-fedprox",
)  # fmt: skip
MIXED_PAPER = "moment-descent-paper"
FACTORS = ("clients", "rows", "dimension", "clusters", "noise", "covariance", "law", "anchor_noise")
VARIANTS = (
    "default", "no-swaps", "no-further", "neither", "few-anchors", "few-and-neither", "known-delta", "plain-step",
    "half-step", "halves", "two", "orthogonal", "svd", "everyone", "moment-descent-paper",
)  # fmt: skip

MIXTURE_METHODS = (
    "fedgrem", "fedgrem-paper", "fedgrem-exact", "local-em", "local-grem", "pooled-em", "pooled-grem",
    "pooled-components", "fedem", "tgmm", "tgmm-mutual", "fedgmm",
)  # fmt: skip
CONTAMINATIONS = ("noise", "far", "copied", "constant", "permuted", "flipped", "huge")

LINEAR_METHODS = ("srpfl", "fedrep", "fastest", "srpfl-random", "fedrep-random")
IMAGE_METHODS = ("srpfl", "fedrep", "lg-srpfl", "lg-fedavg", "flanp", "flanp-ft", "fedavg", "fedavg-ft", "hf-maml")
DATASETS = ("mnist", "fashion", "cifar", "emnist", "femnist")
SPEEDS = ("fixed", "dynamic")

CASES = (
    "one group", "2 groups", "3 groups", "5 groups", "low-rank heads", "independent clients",
    "mixture within clients", "3 groups and outliers", "deviations from a common model", "own intercepts of 5 %",
    "own intercepts of 15 %", "own intercepts of 40 %", "own intercepts with 2 % positives", "one group of small clients",
    "counts with own intercepts", "counts in 2 groups", "costs with own intercepts", "costs in 2 groups",
)  # fmt: skip
REAL_DATA = (
    "school", "bdf", "radon", "computer survey", "heart", "eICU", "landmine", "vowel", "pen digits", "sleepstudy",
    "Oxford boys", "Beijing air",
)  # fmt: skip
PRIVATE_METHODS = ("fedavg", "ifca")  # that are audited
BAD_CLIENTS = ("fedavg", "ifca", "fedrep", "lg-fedavg", "moment-descent", "shrunk", "compare")
