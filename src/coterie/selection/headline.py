# SPDX-License-Identifier: Apache-2.0
"""The answer of a comparison in one sentence."""

from coterie.selection.facts import Facts
from coterie.selection.result import Comparison, Structure
from coterie.selection.words import capital, listed, noun, number, one_for_all

__all__ = ["headline"]


def headline(found: Comparison, known: Facts) -> str:
    """The answer in a sentence: what is not clear "may" be so, and where another structure would do as well it says so."""
    chosen, model = known.chosen, noun(found)
    if chosen.name == "global":
        return f"One {model} for all is enough: other structures bring {_little(known)}."
    if known.either:
        return _either(found, known)
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
    """Several structures do: which of them was chosen is a matter of chance."""
    several = [one for one in found.structures if one is known.chosen or one in known.either]
    if any(one.name == "global" for one in several):
        return f"{capital(one_for_all(found))} will do: whether clients differ is not clear."
    between = f"Between {listed([_kind(one) for one in several])}, {'either' if len(several) == 2 else 'any'} will do"
    signs = [known.over_global, *(other.over_global for other in known.others if other.would_do)]
    if all(sign == "better" for sign in signs):
        return f"{between}: {'both' if len(several) == 2 else 'all'} are clearly better than {one_for_all(found)}."
    return f"{between}; they may be better than {one_for_all(found)}."


def _kind(one: Structure) -> str:
    """A structure whatever its setting, but for own intercepts."""
    if "n_components" in one.setting and one.name != "mixture":
        return one.label
    names = {"clusters": "groups", "local": "local models", "shrunk": "models shrunk towards a common one"}
    names |= {"representation": "models that differ in a few directions", "mixture": "mixtures within clients"}
    return "own intercepts" if one.setting.get("prior") == "intercept" else names.get(one.name, one.label)
