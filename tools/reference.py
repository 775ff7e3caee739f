# SPDX-License-Identifier: Apache-2.0
"""Write docs/api.md from the code: methods, their options, what a round of theirs sends, and all public names."""

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import coterie
from coterie import registry
from coterie.config import options
from coterie.estimators import Estimator
from coterie.local import Training
from coterie.methods.personal.plan import algorithm_of, called
from coterie.models import mlp
from coterie.option_fields import options_in
from coterie.protocol import Ask, Stack
from coterie.registry import METHODS, Method

__all__ = ["page"]

HEAD = """# Methods, options and names

`make docs` writes this page from the code. The names on this page, [the command line](cli.md), [run
folders](run-folder.md), [the protocol of algorithms](engine.md) and [Flower](flower.md) are public; everything else is
internal and may change at any time.
"""
OF_METHODS = """\
Use `coterie fit DATA --method NAME`, or the estimator in Python. `coterie fit --method NAME --help` lists the options
of a method. Structures are those of [`compare`](compare.md); `--method auto` compares them and fits the best. See
[Add a method](add-a-method.md) for your own.
"""
SENT = """\
With personal models, every participating client sends these fields in a round, and the server sees them
summed over clients, unless marked **individually**. Fields that stay never leave the client. [What leaves a
client](privacy.md) covers the other methods.
"""
OPTIONS = """\
Options are listed by group, as in a `--config` file and in `--set GROUP.NAME=VALUE`; estimators take them as parameters
without the group. If the default is `chosen`, the method chooses a value.
"""
PYTHON = """\
The names in `import coterie`. Estimators take the options of their methods as parameters, and also `standardise`,
`baselines` and `random_state`.
"""


def page() -> str:
    """The whole page."""
    methods = table(["`--method`", "Estimator", "For", "Structure", "Proposed by"], map(_method, METHODS.values()))
    sent = table(["`--method`", "Sent", "Stays"], map(_sent, _personal()))
    parts = [
        HEAD, "## Methods", OF_METHODS, methods, "### What a round sends", SENT, sent, "## Options", OPTIONS, *_groups(),
        "## Python", PYTHON, *_names(),
    ]  # fmt: skip
    return "\n\n".join(part.strip() for part in parts) + "\n"


def table(head: list[str], body: Iterable[list[str]]) -> str:
    """Write a table."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _method(method: Method) -> list[str]:
    return [f"`{method.name}`", f"`{method.estimator}`", method.about, method.structure, method.paper]


# -- what leaves clients ----------------------------------------------------------------------------------------------
def _personal() -> Iterator[Method]:
    return (method for method in METHODS.values() if method.family == "personal")


def _sent(method: Method) -> list[str]:
    """The fields of the first question of a small run."""
    model, how = mlp(2, 3, 3, n_outputs=1, loss="squared"), Training()
    arguments: dict[str, Any] = {name: option.default for name, option in options_in(method.options).items()}
    arguments |= {"model": model, "rounds": 1, "seed": 0, "weighting": "clients", "personal": ("2",)}
    arguments |= dict.fromkeys(("step_size", "alpha", "beta"), 0.1) | dict.fromkeys(("training", "body", "head"), how)
    program = called(algorithm_of(method.name)[0], arguments)(None)
    ask = next(wanted for wanted in program if isinstance(wanted, Ask))
    sent = [f"`{name}`" + (" (**individually**)" if isinstance(fold, Stack) else "") for name, fold in ask.fold.items()]
    return [f"`{method.name}`", ", ".join(sent), ", ".join(f"`{name}`" for name in ask.fresh) or "nothing"]


# -- options ----------------------------------------------------------------------------------------------------------
def _groups() -> Iterator[str]:
    plain = options()
    told = {(o.group, o.name): o.about for method in METHODS.values() for o in options_in(method.options).values()}
    for group in dict.fromkeys(group for group, _ in told):
        fields = type(getattr(plain, group))
        yield f"### `{group}`"
        yield (fields.__doc__ or "").strip()
        body = (
            [
                f"`{group}.{name}`",
                _default(getattr(getattr(plain, group), name)),
                told[group, name],
                _whose(group, name),
            ]
            for name in fields.model_fields
        )
        yield table(["Option", "Default", "", "Methods"], body)


def _default(value: Any) -> str:
    return (
        "chosen"
        if value is None
        else "none"
        if value == ()
        else f"`{str(value).lower() if isinstance(value, bool) else value}`"
    )


def _whose(group: str, name: str) -> str:
    return ", ".join(f"`{taker}`" for taker in registry.takers(group, name))


# -- Python -----------------------------------------------------------------------------------------------------------
def _names() -> Iterator[str]:
    for name in coterie.__all__:
        thing = getattr(coterie, name)
        if name != "__version__":
            yield f"### `coterie.{name}`"
            yield _doc(thing)
            if inspect.isclass(thing) and issubclass(thing, Estimator):
                yield "Methods: " + ", ".join(f"`{one}`" for one in _methods(thing)) + "."


def _doc(thing: Any) -> str:
    """A docstring as a block; of estimators without the parameters, which are options."""
    text = inspect.getdoc(thing) or ""
    if inspect.isclass(thing) and issubclass(thing, Estimator):
        head, _, rest = text.partition("\nParameters\n")
        text = f"{head.rstrip()}\n\n{rest[rest.index('Attributes') :] if 'Attributes' in rest else ''}"
    elif inspect.isfunction(thing):
        text = f"{thing.__name__}({', '.join(inspect.signature(thing).parameters)})\n\n{text}"
    first, _, rest = text.partition("\n\n")
    return f"{first}\n\n```text\n{rest.rstrip()}\n```" if rest.strip() else first


def _methods(kind: type) -> list[str]:
    own = (
        name for name, thing in inspect.getmembers(kind, inspect.isfunction) if thing.__module__.startswith("coterie.")
    )
    return [name for name in own if not name.startswith("_")]
