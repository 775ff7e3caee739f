# SPDX-License-Identifier: Apache-2.0
"""The answer of a comparison in one sentence."""

from coterie.selection.facts import Facts
from coterie.selection.result import Comparison, Structure
from coterie.selection.words import listed, noun, number, one_for_all

__all__ = ["headline"]


def headline(found: Comparison, known: Facts) -> str:
    """The answer in a sentence: what is not clear "may" be so, and where another structure would do as well it says so."""
    if known.either:
        return _either(found, known)
    chosen, model = known.chosen, noun(found)
    if chosen.name == "global":
        gains = any(other.over_global == "better" and other.standing != "barred" for other in known.others)
        why = (
            "what other structures gain is clear, but too small to matter"
            if gains
            else "no other structure fits clients clearly better"
        )
        return f"One {model} for all is enough: {why}."
    if chosen.name == "local":
        if known.something_gains:
            return (
                f"Local {model}s are nearly as good as any: what clients gain by learning from each other is clear, but "
                "small."
            )
        be = "are" if known.sure else "may be"
        return f"Local {model}s {be} enough: clients gain nothing that is clear by learning from each other."
    return _of_structure(chosen, model, known)


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
        return f"Clients' models {may}differ in {number(chosen.setting['rank'], 'direction')} only; the rest is shared."
    return (
        f"Clients {may}share features but map them to different outcomes: only the last layer of their models differs."
    )


def _either(found: Comparison, known: Facts) -> str:
    """Several structures do: which of them was chosen is a matter of chance."""
    names = [known.chosen.label, *(one.label for one in known.either)]
    between = f"Between {listed(names)}, {'either' if len(names) == 2 else 'any'} will do"
    if known.chosen.name == "global" or any(one.name == "global" for one in known.either):
        return f"{between}: whether clients differ is not clear."
    signs = [known.over_global, *(other.over_global for other in known.others if other.would_do)]
    if all(sign == "better" for sign in signs):
        return f"{between}: {'both' if len(names) == 2 else 'all'} are clearly better than {one_for_all(found)}."
    return f"{between}; they may be better than {one_for_all(found)}."
