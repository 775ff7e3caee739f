# SPDX-License-Identifier: Apache-2.0
"""Models against torch.autograd, one client after the other; written-out gradients and vmap must agree with it."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from coterie.errors import ConfigError
from coterie.models import (
    Dense,
    Loss,
    Model,
    Network,
    lenet,
    linear_regression,
    loss_gradient,
    mlp,
    row_loss,
    softmax_regression,
)

CLIENTS, ROWS, FEATURES, HIDDEN = 4, 6, 5, 7
TIGHT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}  # float64 sums in another order differ by about 1e-15

pytestmark = pytest.mark.filterwarnings("error")


def sequential(n_outputs: int, *, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(FEATURES, HIDDEN, bias=bias), nn.ReLU(), nn.Linear(HIDDEN, n_outputs, bias=bias)
    ).double()


def rows(loss: Loss, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Features, targets and weights; client 1 has two real rows, client 2 none."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(CLIENTS, ROWS, FEATURES, generator=draw, dtype=torch.float64)
    y = torch.randn(CLIENTS, ROWS, generator=draw, dtype=torch.float64)
    weights = torch.full((CLIENTS, ROWS), 1 / ROWS, dtype=torch.float64)
    weights[1] = torch.tensor([0.5, 0.5, 0, 0, 0, 0])
    weights[2] = 0
    return x, (y.abs() * 2).long().clamp(max=2) if loss == "cross_entropy" else y, weights


def models(loss: Loss) -> tuple[Dense, Network, Network]:
    """The same multilayer perceptron three times."""
    n_outputs = 3 if loss == "cross_entropy" else 1
    module = sequential(n_outputs)
    dense = Dense((FEATURES, HIDDEN, n_outputs), loss)
    return dense, Network(module, loss, kernel="vmap"), Network(module, loss, kernel="loop")


def start(model: Model, n: int = CLIENTS, seed: int = 1) -> Tensor:
    return torch.randn(n, model.n_parameters, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def forward(theta: Tensor, x: Tensor, sizes: tuple[int, ...], intercept: bool = True) -> Tensor:
    """The perceptron written out again, for one client.  theta [P], x [N, D] -> [N, O]"""
    at = 0
    for i, (a, b) in enumerate(pairwise(sizes)):
        weight = theta[at : at + a * b].view(b, a)
        at += a * b
        x = x @ weight.T
        if intercept:
            x = x + theta[at : at + b]
            at += b
        if i < len(sizes) - 2:
            x = x.clamp(min=0)
    return x


def objective(theta: Tensor, x: Tensor, y: Tensor, w: Tensor, loss: Loss, sizes: tuple[int, ...]) -> Tensor:
    out = forward(theta, x, sizes)
    each = cross_entropy(out, y, reduction="none") if loss == "cross_entropy" else (out[:, 0] - y) ** 2
    return (w * each).sum()


def gradient_of(function: Callable[[Tensor], Tensor], theta: Tensor) -> Tensor:
    at = theta.clone().requires_grad_()
    (g,) = torch.autograd.grad(function(at), at)
    return g


def descend(
    theta: Tensor,
    gradient: Callable[[Tensor], Tensor],
    *,
    steps: int,
    eta: float,
    momentum: float = 0.0,
    proximal: float = 0.0,
) -> Tensor:
    """One client: v = momentum v + gradient + proximal (theta - start); theta -= eta v."""
    begin, velocity = theta, torch.zeros_like(theta)
    for _ in range(steps):
        velocity = momentum * velocity + gradient(theta) + proximal * (theta - begin)
        theta = theta - eta * velocity
    return theta


# -- losses -----------------------------------------------------------------------------------------------------------
def test_row_losses_and_their_derivatives() -> None:
    out = torch.tensor([[0.5], [2.0]], dtype=torch.float64)
    y = torch.tensor([1.0, -1.0], dtype=torch.float64)
    assert row_loss("squared", out, y).tolist() == [0.25, 9.0]
    half = torch.tensor([0.5, 0.5], dtype=torch.float64)
    assert loss_gradient("squared", out, y, half).tolist() == [[-0.5], [3.0]]

    logits = torch.randn(2, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    label = torch.tensor([0, 2, 1, 1])  # one set of targets, two models
    for s in range(2):
        torch.testing.assert_close(
            row_loss("cross_entropy", logits, label)[s], cross_entropy(logits[s], label, reduction="none")
        )
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    want = gradient_of(lambda o: (weights * cross_entropy(o.mT, label.expand(2, -1), reduction="none")).sum(), logits)
    before = logits.clone()
    torch.testing.assert_close(loss_gradient("cross_entropy", logits, label, weights), want, **TIGHT)
    assert torch.equal(logits, before)


def test_cross_entropy_of_extreme_outputs_is_finite() -> None:
    out = torch.tensor([[1e4, -1e4]], dtype=torch.float32)
    assert row_loss("cross_entropy", out, torch.tensor([1])).tolist() == [2e4]


# -- outputs ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("loss", ["squared", "cross_entropy"])
def test_outputs_agree_with_the_perceptron_written_out(loss: Loss) -> None:
    x = rows(loss)[0]
    for model in models(loss):
        theta = start(model)
        sizes = (FEATURES, HIDDEN, model.n_outputs)
        every, own = model.outputs(theta, x[0]), model.own_outputs(theta, x)
        assert every.shape == own.shape == (CLIENTS, ROWS, model.n_outputs)
        for j in range(CLIENTS):
            torch.testing.assert_close(every[j], forward(theta[j], x[0], sizes), **TIGHT)
            torch.testing.assert_close(own[j], forward(theta[j], x[j], sizes), **TIGHT)


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("n_outputs", [1, 3])
def test_linear_outputs_agree_with_a_product(intercept: bool, n_outputs: int) -> None:
    model = Dense((FEATURES, n_outputs), "squared" if n_outputs == 1 else "cross_entropy", intercept)
    theta, x = start(model), rows("squared")[0]
    assert model.n_parameters == n_outputs * (FEATURES + intercept)
    for j in range(CLIENTS):
        want = forward(theta[j], x[0], model.sizes, intercept)
        torch.testing.assert_close(model.outputs(theta, x[0])[j], want, **TIGHT)
        want = forward(theta[j], x[j], model.sizes, intercept)
        torch.testing.assert_close(model.own_outputs(theta, x)[j], want, **TIGHT)


# -- gradients --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("loss", ["squared", "cross_entropy"])
def test_gradients_agree_with_autograd(loss: Loss) -> None:
    x, y, w = rows(loss)
    for model in models(loss):
        sizes = (FEATURES, HIDDEN, model.n_outputs)
        theta = torch.stack([start(model, seed=1), start(model, seed=2)])  # two runs
        got = model.gradient(theta, x, y, w)
        for s in range(2):
            for c in range(CLIENTS):
                want = gradient_of(lambda t, c=c, z=sizes: objective(t, x[c], y[c], w[c], loss, z), theta[s, c])
                torch.testing.assert_close(got[s, c], want, **TIGHT)
        assert not got[:, 2].any()  # no rows, no gradient


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("loss", ["squared", "cross_entropy"])
def test_linear_gradients_from_given_outputs_agree_with_autograd(loss: Loss, intercept: bool) -> None:
    model = Dense((FEATURES, 3 if loss == "cross_entropy" else 1), loss, intercept, l2=0.7)
    x, y, w = rows(loss)
    theta = torch.stack([start(model, seed=1), start(model, seed=2)])
    outputs = torch.stack([model.own_outputs(run, x) for run in theta])
    given, own = model.linear_gradient(outputs, x, y, w, theta), model.gradient(theta, x, y, w)
    n_weights = FEATURES * model.n_outputs

    def penalised(t: Tensor, c: int) -> Tensor:
        out = forward(t, x[c], model.sizes, intercept)
        each = cross_entropy(out, y[c], reduction="none") if loss == "cross_entropy" else (out[:, 0] - y[c]) ** 2
        return (w[c] * each).sum() + 0.7 / 2 * (t[:n_weights] ** 2).sum()  # biases are not penalised

    for s in range(2):
        for c in range(CLIENTS):
            want = gradient_of(lambda t, c=c: penalised(t, c), theta[s, c])
            torch.testing.assert_close(given[s, c], want, **TIGHT)
            torch.testing.assert_close(own[s, c], want, **TIGHT)


# -- descent ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("momentum", [0.0, 0.8])
@pytest.mark.parametrize("proximal", [0.0, 0.3])
@pytest.mark.parametrize("loss", ["squared", "cross_entropy"])
def test_descent_agrees_with_a_loop_of_autograd_steps(loss: Loss, momentum: float, proximal: float) -> None:
    x, y, w = rows(loss)
    for model in models(loss):
        sizes, theta = (FEATURES, HIDDEN, model.n_outputs), start(model)
        before = theta.clone()
        descent = model.descent(theta, momentum=momentum, proximal=proximal)
        for _ in range(5):
            descent.step(x, y, w, 0.05)
        got = descent.result()
        assert torch.equal(theta, before)
        for c in range(CLIENTS):
            want = descend(
                theta[c],
                lambda t, c=c, z=sizes: gradient_of(lambda u: objective(u, x[c], y[c], w[c], loss, z), t),
                steps=5,
                eta=0.05,
                momentum=momentum,
                proximal=proximal,
            )
            torch.testing.assert_close(got[c], want, **TIGHT)


@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_ridge_penalty_pulls_weights_and_not_biases(momentum: float) -> None:
    model = Dense((FEATURES, HIDDEN, 1), "squared", l2=0.4)
    x, y, w = rows("squared")
    theta = start(model)
    biases = torch.zeros(model.n_parameters, dtype=torch.bool)
    biases[FEATURES * HIDDEN : FEATURES * HIDDEN + HIDDEN] = True
    biases[-1] = True
    descent = model.descent(theta, momentum=momentum)
    for _ in range(4):
        descent.step(x, y, w, 0.05)
    for c in range(CLIENTS):
        want = descend(
            theta[c],
            lambda t, c=c: gradient_of(
                lambda u: (
                    objective(u, x[c], y[c], w[c], "squared", model.sizes) + 0.2 * (u.masked_fill(biases, 0) ** 2).sum()
                ),
                t,
            ),
            steps=4,
            eta=0.05,
            momentum=momentum,
        )
        torch.testing.assert_close(descent.result()[c], want, **TIGHT)


RIDGE = Dense((FEATURES, HIDDEN, 1), "squared", l2=0.2)


@pytest.mark.parametrize("model", [*models("squared"), RIDGE], ids=["dense", "vmap", "loop", "dense-l2"])
@pytest.mark.parametrize(("momentum", "proximal"), [(0.0, 0.0), (0.8, 0.0), (0.0, 0.3), (0.8, 0.3)])
def test_clients_that_sit_out_a_step_are_as_if_it_never_was(model: Model, momentum: float, proximal: float) -> None:
    x, y, w = rows("squared")
    theta = start(model)
    takes = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 0, 1], [0, 1, 0]], dtype=torch.float64)  # [C, steps]
    together = model.descent(theta, momentum=momentum, proximal=proximal)
    for t in range(3):
        together.step(x, y, w, 0.05, takes[:, t])
    for c in range(CLIENTS):
        alone = model.descent(theta[c : c + 1], momentum=momentum, proximal=proximal)
        for _ in range(int(takes[c].sum())):
            alone.step(x[c : c + 1], y[c : c + 1], w[c : c + 1], 0.05)
        torch.testing.assert_close(together.result()[c], alone.result()[0], **TIGHT)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_batches_may_change_width_between_steps(which: int) -> None:
    model = models("squared")[which]
    x, y, w = rows("squared")
    theta = start(model)
    descent = model.descent(theta, momentum=0.0)
    descent.step(x, y, w, 0.05)
    descent.step(x[:, :2], y[:, :2], w[:, :2], 0.05)
    sizes = (FEATURES, HIDDEN, 1)
    t = theta[0]
    for n in (ROWS, 2):
        t = t - 0.05 * gradient_of(lambda u, n=n: objective(u, x[0, :n], y[0, :n], w[0, :n], "squared", sizes), t)
    torch.testing.assert_close(descent.result()[0], t, **TIGHT)


def test_a_common_start_may_be_an_expanded_vector() -> None:
    x, y, w = rows("squared")
    for model in models("squared"):
        one = start(model, 1)
        results = []
        for theta in (one.expand(CLIENTS, -1), one.repeat(CLIENTS, 1)):
            descent = model.descent(theta, momentum=0.5, proximal=0.1)
            for _ in range(2):
                descent.step(x, y, w, 0.05)
            results.append(descent.result())
        assert torch.equal(*results)
        assert not torch.equal(results[0][0], results[0][1])


# -- starts -----------------------------------------------------------------------------------------------------------
def test_dense_starts_are_seeded_and_bounded_as_in_torch() -> None:
    model = mlp(16, 4, n_outputs=3)
    one, same, other = (model.initial(50, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert one.dtype == torch.float32
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    first, second = one[:, : 16 * 4 + 4], one[:, 16 * 4 + 4 :]
    # Uniform within 1/sqrt(fan in): the largest of some thousand draws is close to the bound.
    assert 0.24 < float(first.abs().max()) <= 0.25
    assert 0.48 < float(second.abs().max()) <= 0.5


def test_network_starts_are_seeded_and_leave_module_and_random_state_alone() -> None:
    module = sequential(3)
    module.register_module("norm", nn.LayerNorm(3).double())
    with torch.no_grad():
        module[0].weight.fill_(5.0)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    model = Network(module, "cross_entropy")
    one, same, other = (model.initial(3, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert not torch.equal(one[0], one[1])
    named = model.unpack(one)
    assert torch.equal(named["norm.weight"], torch.ones(3, 3, dtype=torch.float64))
    assert float(named["0.weight"].abs().max()) <= 1 / FEATURES**0.5


def test_tied_weights_are_one_parameter() -> None:
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False)).double()
    module[2].weight = module[0].weight
    model = Network(module, "cross_entropy")
    assert model.n_parameters == 16
    theta = model.initial(2, torch.Generator().manual_seed(0))
    assert theta.shape == (2, 16)
    x = torch.randn(5, 4, dtype=torch.float64)
    w = theta[0].view(4, 4)
    torch.testing.assert_close(model.outputs(theta, x)[0], (x @ w.T).clamp(min=0) @ w.T, **TIGHT)


def test_training_leaves_the_module_untouched() -> None:
    for model in models("squared")[1:]:
        before = {name: value.clone() for name, value in model.module.state_dict().items()}
        descent = model.descent(start(model), momentum=0.5)
        descent.step(*rows("squared"), 0.1)
        assert all(torch.equal(value, before[name]) for name, value in model.module.state_dict().items())
        assert all(p.grad is None for p in model.module.parameters())


# -- layers and other facts -------------------------------------------------------------------------------------------
def test_layers_name_every_parameter_once() -> None:
    dense, network, _ = models("cross_entropy")
    assert list(dense.layers) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert list(network.layers) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    for model in (dense, network):
        covered = torch.zeros(model.n_parameters)
        for part in model.layers.values():
            covered[part] += 1
        assert covered.tolist() == [1.0] * model.n_parameters
    theta = start(dense)
    assert torch.equal(network.unpack(theta)["2.weight"], dense.unpack(theta)[1][0])
    assert network.n_outputs == dense.n_outputs == 3


def test_named_models_have_the_stated_forms() -> None:
    line = linear_regression(4, l2=0.1)
    assert (line.n_parameters, line.is_linear, line.loss, line.dtype) == (5, True, "squared", torch.float64)
    assert linear_regression(4, intercept=False).n_parameters == 4
    logistic = softmax_regression(4, 3)
    assert (logistic.n_parameters, logistic.is_linear, logistic.loss) == (15, True, "cross_entropy")
    net = mlp(784, 200, n_outputs=10)
    assert (net.n_parameters, net.is_linear, net.dtype) == (784 * 200 + 200 + 2010, False, torch.float32)
    assert linear_regression(4) == linear_regression(4)  # equal models may be stacked in lockstep


@pytest.mark.parametrize(
    ("layer", "hint"),
    [(nn.BatchNorm1d(HIDDEN), "GroupNorm"), (nn.Dropout(0.5), "p=0"), (nn.Dropout2d(0.1), "p=0")],
)
def test_layers_that_cannot_be_federated_are_refused_with_a_way_out(layer: nn.Module, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Network(nn.Sequential(nn.Linear(FEATURES, HIDDEN), layer), "squared")
    assert hint in caught.value.hint


def test_dropout_of_nothing_and_layer_norm_are_fine() -> None:
    Network(nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.0), nn.LayerNorm(3)), "cross_entropy")


# -- convolutions -----------------------------------------------------------------------------------------------------
def pictures(n: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(3, n, 64, generator=draw)
    y = torch.randint(4, (3, n), generator=draw)
    return x, y, torch.full((3, n), 1 / n)


def test_lenet_kernels_agree_with_torch_optim() -> None:
    x, y, w = pictures()
    results: dict[str, Tensor] = {}
    for kernel in ("vmap", "loop"):
        model = lenet(1, 8, 4, kernel=kernel)  # type: ignore[arg-type]
        theta = model.initial(3, torch.Generator().manual_seed(0))
        descent = model.descent(theta, momentum=0.9)
        for _ in range(3):
            descent.step(x, y, w, 0.1)
        results[kernel] = descent.result()
    torch.testing.assert_close(results["vmap"], results["loop"], rtol=1e-4, atol=1e-6)  # float32

    module = model.module
    nn.utils.vector_to_parameters(theta[1].clone(), module.parameters())
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimiser.zero_grad()
        cross_entropy(module(x[1].view(-1, 1, 8, 8)), y[1]).backward()
        optimiser.step()
    want = nn.utils.parameters_to_vector(module.parameters()).detach()
    torch.testing.assert_close(results["vmap"][1], want, rtol=1e-4, atol=1e-6)
    assert (results["vmap"][1] - theta[1]).abs().max() > 1e-3


def test_lenet_takes_flat_rows_or_images() -> None:
    x = pictures()[0]
    flat, image = lenet(1, 8, 4), lenet(1, 8, 4, flat=False)
    theta = flat.initial(2, torch.Generator().manual_seed(0))
    assert flat.n_parameters == image.n_parameters
    torch.testing.assert_close(flat.outputs(theta, x[0]), image.outputs(theta, x[0].view(-1, 1, 8, 8)))
    assert flat.outputs(theta, x[0]).shape == (2, 5, 4)


def test_the_measured_kernel_is_one_of_the_two_and_nothing_else_changes() -> None:
    x, y, _ = pictures(2)
    model = lenet(1, 8, 4)
    chosen: Network = model.measured(x, y)
    kernels: tuple[Literal["vmap", "loop"], ...] = ("vmap", "loop")
    assert chosen.kernel in kernels
    assert chosen.module is model.module
    assert chosen.shape == model.shape
