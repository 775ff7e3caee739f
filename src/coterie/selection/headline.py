# SPDX-License-Identifier: Apache-2.0
"""The answer of a comparison in one sentence."""

from coterie.selection.facts import Facts, Kind, kind
from coterie.selection.result import Comparison, Structure
from coterie.selection.words import capital, listed, noun, number, one_for_all

__all__ = ["headline"]

_KINDS: dict[Kind, str] = {
    "own intercepts": "own intercepts", "groups": "groups", "own models": "a {0} for every client",
    "mixtures": "mixtures within clients",
}  # fmt: skip


def headline(found: Comparison, known: Facts) -> str:
    """The answer in a sentence: what is not clear "may" be so, and where clients may as well differ otherwise it says so.

    Which of several models of their own serve clients best is left to the evidence.
    """
    chosen, model = known.chosen, noun(found)
    if chosen.name == "global":
        return f"One {model} for all is enough: other structures bring {_little(known)}."
    if known.rivals:
        return _either(found, known)
    if known.kin:
        return f"Every client {'needs' if known.sure else 'may need'} its own {model}."
    if chosen.name == "local":
        be = "are" if known.sure else "may be"
        return f"Local {model}s {be} enough: learning from each other brings clients {_little(known)}."
    return _of_structure(chosen, model, known)


def _little(known: Facts) -> str:
    """What others gain over what was chosen."""
    more = known.standing("better")
    return f"more only with {more[0].label}" if more else "little, or nothing that is clear"


def _of_structure(chosen: Structure, model: str, known: Facts) -> str:
    """What groups, models around a common one, directions and mixtures say of clients."""
    sure = known.sure
    if chosen.name == "shrunk" and chosen.setting.get("prior") == "intercept":
        return f"Clients share one {model}, but {'' if sure else 'may '}have their own intercepts."
    if chosen.name == "shrunk":
        need = "Every client needs its" if sure else "Every client may need its"
        return f"{need} own {model}, shrunk towards a common one."
    if chosen.name == "clusters":
        return _in_groups(number(chosen.setting.get("n_clusters"), "group"), known)
    if chosen.name == "mixture":
        components = number(chosen.setting.get("n_components"), "component")
        return f"Each client's rows {'' if sure else 'may '}mix {components}, in its own proportions."
    return _in_common(chosen, sure)


def _in_groups(groups: str, known: Facts) -> str:
    """Groups are spoken of where they bring something, and named where they would come out again."""
    if not known.sure:
        return f"Clients may fall into {groups}, with one model per group."
    if known.groups == "unstable":
        return f"Models of {groups} serve clients better than one for all, but who is in which group is uncertain."
    return f"Clients fall into {groups}, with one model per group."


def _in_common(chosen: Structure, sure: bool) -> str:
    """What a representation is: a subspace of models, or the body of a network."""
    may = "" if sure else "may "
    if "rank" in chosen.setting:
        many = "one direction" if chosen.setting["rank"] == 1 else "a few directions"
        return f"Clients' models {may}differ in {many} only; the rest is shared."
    return (
        f"Clients {may}share features but map them to different outcomes: only the last layer of their models differs."
    )


def _either(found: Comparison, known: Facts) -> str:
    """Clients may differ in several ways: which of them was chosen is a matter of chance."""
    if "one for all" in known.rivals:
        return f"{capital(one_for_all(found))} will do: whether clients differ is not clear."
    several = [*({kind(known.chosen)} | known.rivals.keys())]
    said = [_KINDS[one].format(noun(found)) for one in _KINDS if one in several]
    between = f"Between {listed(said)}, {'either' if len(several) == 2 else 'any'} will do"
    signs = [known.over_global, *(other.over_global for some in known.rivals.values() for other in some)]
    if all(sign == "better" for sign in signs):
        return f"{between}: {'both' if len(several) == 2 else 'all'} are clearly better than {one_for_all(found)}."
    return f"{between}; they may be better than {one_for_all(found)}."
