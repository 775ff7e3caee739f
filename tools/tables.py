# SPDX-License-Identifier: Apache-2.0
"""Tables of docs/studies.md, one function for each kind: results, by name -> lines of Markdown."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from coterie.selection import ORDER

__all__ = ["TABLES"]

Results = Mapping[str, Mapping[str, Any]]
Row = Mapping[str, Any]


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """Lay a table out; the first cell of the head may be empty."""
    lines = [list(head), ["---"] * len(head), *map(list, body)]
    return [f"| {' | '.join(cells)} |" if line != 1 else f"|{'|'.join(cells)}|" for line, cells in enumerate(lines)]


def number(value: float | None, digits: int = 2, missing: str = "") -> str:
    """Write a number with so many decimals."""
    return missing if value is None else f"{value:.{digits}f}"


def percent(value: float | None, digits: int = 0, missing: str = "") -> str:
    """Write a share in percent."""
    return missing if value is None else f"{100 * value:.{digits}f} %"


def code(name: str) -> str:
    """Write a name as on the command line."""
    return f"`{name}`"


def values(rows: Iterable[Row], *fields: str) -> list[Any]:
    """Values of fields in the order in which they come, each once."""
    found = dict.fromkeys(tuple(row[field] for field in fields) for row in rows)
    return [each if len(fields) > 1 else each[0] for each in found]


def where(some: Iterable[Row], /, **fields: Any) -> list[Row]:
    """Rows with these values."""
    return [row for row in some if all(row.get(name) == value for name, value in fields.items())]


def every(results: Results, part: str = "rows") -> list[Row]:
    """Rows of all results."""
    return [row for result in results.values() for row in result[part]]


# -- IFCA -------------------------------------------------------------------------------------------------------------
def rotated(results: Results) -> list[str]:
    """Accuracy of every method at every size, beside the paper's."""
    head = ["Method", "Start", "Clients", "Images each", "Rounds", "Seeds", "Accuracy", "Paper", "Adjusted Rand index"]
    return table(
        head,
        (
            [
                code(row["method"]), code(row["init"]) if row.get("init") else "", str(row["clients"]), str(row["rows"]),
                str(row["rounds"]), str(row["seeds"]), spread(row["accuracy"], row["std"]),
                spread(row["paper"], row["paper_std"]), number(row["adjusted_rand"], 3),
            ]
            for row in every(results)
        ),
    )  # fmt: skip


def spread(mean: float | None, std: float | None) -> str:
    """Write a mean in percent, with its deviation if there is one."""
    return "" if mean is None else number(100 * mean) + ("" if std is None else f" ± {number(100 * std)}")


def synthetic(results: Results) -> list[str]:
    """Success at every point, for every kind of start."""
    rows = every(results)
    inits, points = values(rows, "init"), values(rows, "n_clients", "rows", "r", "sigma")
    head = ["m", "n", "r", "sigma", *(f"{code(init)}: starts, trials, error" for init in inits), "oracle"]
    body = []
    for m, n, r, sigma in points:
        own = {row["init"]: row for row in where(rows, n_clients=m, rows=n, r=r, sigma=sigma)}
        cells = [", ".join((percent(row["start_success"]), percent(row["trial_success"]),
                            number(row["best_error_over_sigma"], 2, "none"))) for row in own.values()]  # fmt: skip
        oracle = number(next(iter(own.values()))["oracle_error_over_sigma"], 2)
        body.append([str(m), str(n), f"{r:g}", f"{sigma:g}", *cells, oracle])
    return table(head, body)


# -- mixed regression -------------------------------------------------------------------------------------------------
def ratios(results: Results) -> list[str]:
    """Every method in every setting: mean ratio to the oracle's error, share of seeds that reach it, largest ratio."""
    lines = [line for line in every(results, "summary") if line["local_steps"] in (5, None)]
    settings = values(lines, "setting")
    body = ([code(method), *(ratio_cell(lines, setting=setting, method=method) for setting in settings)]
            for method in values(lines, "method") if not method.startswith("oracle"))  # fmt: skip
    return table(["", *map(code, settings)], body)


def ratio_cell(lines: Iterable[Row], **fields: Any) -> str:
    """Write mean ratio (share, largest) of the one line that there is."""
    own = where(lines, **fields)
    if not own or own[0]["mean_ratio"] is None:
        return ""
    line = own[0]
    return f"{line['mean_ratio']:.3f} ({percent(line['success'])}, {line['max_ratio']:.3g})"


def ablation(results: Results) -> list[str]:
    """Every variant in every setting, and the median of the rounds."""
    lines = every(results, "summary")
    settings = values(lines, "setting")
    body = []
    for variant in values(lines, "variant"):
        own = where(lines, variant=variant)
        rounds = [number(where(own, setting=setting)[0]["median_rounds"], 0, "never") for setting in settings]
        body.append([code(variant), *(ratio_cell(own, setting=setting) for setting in settings), ", ".join(rounds)])
    return table(["", *map(code, settings), "rounds"], body)


def scaling(results: Results) -> list[str]:
    """Every method at every value of every factor."""
    lines = every(results, "summary")
    methods = [method for method in values(lines, "method") if not method.startswith("oracle")]
    body = ([code(factor), f"{value:g}" if isinstance(value, float) else str(value),
             *(ratio_cell(lines, factor=factor, value=value, method=method) for method in methods)]
            for factor, value in values(lines, "factor", "value"))  # fmt: skip
    return table(["Factor", "Value", *map(code, methods)], body)


def laws(results: Results) -> list[str]:
    """Every method under every law of the features (a result each), and the rounds of the first."""
    methods = [m for m in values(every(results, "summary"), "method") if not m.startswith("oracle")]
    body = []
    for result in results.values():
        problem, lines = result["settings"]["problem"], result["summary"]
        law = f"{problem['features']}, {problem['covariance']} covariance"
        rounds = number(where(lines, method=methods[0])[0]["median_rounds"], 0, "never")
        body.append([law, *(ratio_cell(lines, method=method) for method in methods), rounds])
    return table(["Features", *map(code, methods), f"rounds, {code(methods[0])}"], body)


# -- FedGrEM ----------------------------------------------------------------------------------------------------------
def simulation(results: Results, field: str = "theta_error", digits: int = 2) -> list[str]:
    """Every method at every h, and the paper's FedGrEM."""
    rows = every(results)
    hs = values(rows, "h")
    body = [
        [code(method), *(mean_cell(where(rows, method=method, h=h)[0], field, digits) for h in hs)]
        for method in values(rows, "method")
    ]
    paper = [
        next((row[f"paper_{field}"] for row in where(rows, h=h) if row[f"paper_{field}"] is not None), None) for h in hs
    ]
    if any(value is not None for value in paper):
        body.append(["the paper's FedGrEM", *(number(value, digits) for value in paper)])
    return table(["", *(f"h = {h:g}" for h in hs)], body)


def simulation_weights(results: Results) -> list[str]:
    """The same, of proportions."""
    return simulation(results, "w_error", 3)


def step_sizes(results: Results, field: str = "theta_error", digits: int = 2) -> list[str]:
    """Every method at every C_eta and h, and the paper's FedGrEM."""
    rows = every(results)
    hs = sorted(values(rows, "h"))
    body = []
    for method in values(rows, "method"):
        for c_eta in values(where(rows, method=method), "c_eta"):
            own = {row["h"]: mean_cell(row, field, digits) for row in where(rows, method=method, c_eta=c_eta)}
            body.append([code(method), f"{c_eta:g}", *(own.get(h, "") for h in hs)])
    told = [row for row in rows if row[f"paper_{field}"] is not None]
    for c_eta in values(told, "c_eta"):
        own = {row["h"]: number(row[f"paper_{field}"], digits) for row in where(told, c_eta=c_eta)}
        body.append(["the paper's FedGrEM", f"{c_eta:g}", *(own.get(h, "") for h in hs)])
    return table(["", "C_eta", *(f"h = {h:g}" for h in hs)], body)


def step_sizes_weights(results: Results) -> list[str]:
    """The same, of proportions."""
    return step_sizes(results, "w_error", 3)


def mean_cell(row: Row, field: str, digits: int = 2) -> str:
    """Write a mean with its standard error."""
    error = row[f"{field}_se"]
    return number(row[field], digits) + ("" if error is None else f" ({number(error, digits)})")


def misclustering(results: Results, field: str = "error_percent") -> list[str]:
    """Every method at every contamination."""
    rows = every(results)
    shares = values(rows, "contamination")
    body = ([code(method), *(mean_cell(where(rows, method=method, contamination=share)[0], field)
                             for share in shares)] for method in values(rows, "method"))  # fmt: skip
    return table(["contaminated", *(f"{share:g} %" for share in shares)], body)


def misclustering_own(results: Results) -> list[str]:
    """The same, with every client's components matched to classes for itself."""
    return misclustering(results, "own_percent")


def fit_times(results: Results) -> list[str]:
    """CPU seconds of every method at every contamination, and below them the paper's."""
    rows = every(results)
    methods, body = values(rows, "method"), []
    for share in values(rows, "contamination"):
        own = {row["method"]: row for row in where(rows, contamination=share)}
        body.append([f"{share:g} %", *(mean_cell(own[method], "seconds") for method in methods)])
        body.append([f"{share:g} %, paper", *(number(own[method]["paper_seconds"]) for method in methods)])
    return table(["contaminated", *map(code, methods)], body)


def adversarial(results: Results) -> list[str]:
    """What every kind of bad client costs every method: error with them over error without."""
    rows = every(results)
    shares = values(rows, "bad_percent")
    body = []
    for data, method, kind in values(rows, "data", "method", "kind"):
        own = [where(rows, data=data, method=method, kind=kind, bad_percent=share)[0] for share in shares]
        body.append(
            [code(data), code(method), code(kind), *(f"{row['ratio']:.2f} ({row['error']:.2f})" for row in own)]
        )
    return table(["Data", "Method", "Bad clients", *(f"{share:.0f} %" for share in shares)], body)


def adaptive_summary(results: Results) -> list[str]:
    """Mean errors by D, the share of cells with a ratio of at most 1.05, and the largest ratio."""
    body = ([str(line["d"]), str(line["cells"]), *(number(line[name]) for name in ("fedgrem", "local_em", "fedem")),
             percent(line["within"], 1), number(line["ratio"])] for line in every(results, "summary"))  # fmt: skip
    return table(["D", "cells", "`fedgrem`", "`local-em`", "`fedem`", "ratio at most 1.05", "largest ratio"], body)


def adaptive(results: Results) -> list[str]:
    """Error over the better of local EM and FedEM: the mean and the largest of all n, by size and h."""
    rows = every(results)
    hs = values(rows, "h")
    body = []
    for d, r in values(rows, "d", "r"):
        own = [[row["ratio"] for row in where(rows, d=d, r=r, h=h)] for h in hs]
        body.append([str(d), str(r), *(f"{sum(each) / len(each):.2f} ({max(each):.2f})" for each in own)])
    return table(["D", "R", *(f"h = {h:g}" for h in hs)], body)


# -- SRPFL ------------------------------------------------------------------------------------------------------------
def linear(results: Results) -> list[str]:
    """Distances, rate, and rounds and time until twice FedRep's final distance."""
    return table(
        ["", "start", "final", "ratio, largest", "rate", "R2", "bound", "rounds", "time"],
        (
            [
                code(line["method"]), number(line["start_distance"], 3), number(line["final_distance"], 4),
                number(line["max_ratio"]), number(line["rate"], 3), number(line["rate_r2"], 3),
                number(line["rate_bound"], 3), number(line["rounds_to_2x"], 0, "never"),
                number(line["time_to_2x"], 0, "never"),
            ]
            for line in every(results, "summary")
        ),
    )  # fmt: skip


def linear_times(results: Results) -> list[str]:
    """Time until twice FedRep's final distance, of SRPFL and of FedRep, a result a line."""
    body = []
    for result in results.values():
        said = result["settings"]
        time = {line["method"]: number(line["time_to_2x"], 0, "never") for line in result["summary"]}
        body.append(
            [code(said["stages"]), code(said["speeds"]), f"{said['communication']:g}", time["srpfl"], time["fedrep"]]
        )
    return table(["`--stages`", "`--speeds`", "`--communication`", "`srpfl`", "`fedrep`"], body)


def speedup(results: Results) -> list[str]:
    """Ratios of times by theory, at four N, and the fit against 1 / log N."""
    lines = [line for line in every(results, "summary") if line["stages"] != "trained"]
    rows = every(results)
    ns = values(where(rows, stages="rounds"), "n_clients")
    shown = [ns[round(i * (len(ns) - 1) / 3)] for i in range(4)]
    body = []
    for line in lines:
        key = {name: line[name] for name in ("stages", "communication", "c_hat")}
        found = [number(where(rows, n_clients=n, **key)[0]["ratio"]) for n in shown]
        fit = [number(line["slope"]), number(line["intercept"]), number(line["r2"], 3), number(line["exact_r2"], 3)]
        below = "never" if line["below_one"] is None else str(line["below_one"])
        body.append([code(key["stages"]), f"{key['communication']:g}", f"{key['c_hat']:g}", *found, below, *fit])
    return table(["`stages`", "C", "c", *(f"N = {n}" for n in shown), "below 1 from", "slope", "intercept", "R2",
                  "R2, expected"], body)  # fmt: skip


def speedup_trained(results: Results) -> list[str]:
    """Ratios of times in training, with the theory's in brackets."""
    rows = where(every(results), stages="trained")
    ns = values(rows, "n_clients")
    body = []
    for line in where(every(results, "summary"), stages="trained"):
        key = {name: line[name] for name in ("communication", "c_hat")}
        own = [where(rows, n_clients=n, **key)[0] for n in ns]
        cells = [f"{row['ratio']:.2f} ± {row['ratio_error']:.2f} ({row['expected_ratio']:.2f})" for row in own]
        fit = [number(line["slope"]), number(line["intercept"]), number(line["r2"], 3)]
        body.append([f"{key['communication']:g}", f"{key['c_hat']:g}", *cells, *fit])
    return table(["C", "c", *(f"N = {n}" for n in ns), "slope", "intercept", "R2"], body)


def images(results: Results) -> list[str]:
    """Accuracy, worst tenth, and when FedRep's accuracy was reached; a result after the other."""
    body = []
    for result in results.values():
        for row in result["rows"]:
            body.append([
                code(result["settings"]["dataset"]), code(row["method"]),
                number(row["final_accuracy"], 3) + (f" ± {number(row['std'], 3)}" if row["std"] is not None else ""),
                number(row["worst_decile"], 3), number(row["rounds_to_target"], 0, "never"),
                number(row["time_to_target"], 0), number(row["time_ratio"]), number(row["virtual_time"], 0),
                str(row["left_out"]),
            ])  # fmt: skip
    return table(
        ["Data", "Method", "accuracy", "worst tenth", "rounds", "time", "ratio", "time in all", "left out"], body
    )


# -- comparisons ------------------------------------------------------------------------------------------------------
def planted(results: Results) -> list[str]:
    """How often each truth is found."""
    body = ([line["case"], line["chosen"] if line["case"] != "all" else "", str(line["reps"]), percent(line["correct"]),
             percent(line["correct_size"]), percent(line["share"]), percent(line["worst_excess"], 1)]
            for line in every(results, "summary"))  # fmt: skip
    return table(["Truth", "chosen", "repetitions", "correct", "right size", "sure", "excess"], body)


def bad_clients(results: Results) -> list[str]:
    """The excess of honest clients' error, by attack; what is recommended is bold."""
    attacks = ("nobody", "flip", "scale", "scale back", "constant", "nan")
    body = []
    for line in every(results, "summary"):
        robust = f"**{line['robust']}**" if line["recommended"] else line["robust"]
        cells = [percent(line.get(attack), 1) for attack in (*attacks, "worst")]
        body.append([line["method"], robust, *cells, "holds" if line["holds"] else f"fails: {line['broken']}"])
    return table(["Method", "robust", *attacks, "worst", "bar"], body)


def privacy_audit(results: Results) -> list[str]:
    """What is claimed, and what canaries measure at least."""
    body = [
        [line["method"], f"{line['epsilon']:g}", "as asked" if line["noise"] == 1 else "none" if not line["noise"] else
         f"{line['noise']:g} times", f"{line['claimed']:.2f}", f"{line['measured']:.2f}", percent(line["right"], 1),
         "holds" if line["holds"] else "fails", f"{line['canaries']:,}"]
        for line in every(results, "summary")
    ]  # fmt: skip
    return table(["Method", "epsilon", "noise", "claimed", "measured", "right", "bar", "canaries"], body)


def privacy_utility(results: Results) -> list[str]:
    """What a budget leaves, case by case: a column for each epsilon."""
    lines = list(every(results, "summary"))
    budgets = list(dict.fromkeys(line["epsilon"] for line in lines))
    body = []
    for case in dict.fromkeys(line["case"] for line in lines):
        own = {line["epsilon"]: line for line in lines if line["case"] == case}
        for what, told in (("rmse", "RMSE"), ("right", "right")):
            if all(own[budget][what] is None for budget in budgets):
                continue
            found = [own[one][what] for one in budgets]
            cells = ["diverged" if one is None else f"{one:.3f}" if what == "rmse" else percent(one) for one in found]
            body.append([case, told, *cells])
    heads = ["none" if budget is None else f"{budget:g}" for budget in budgets]
    return table(["Case", "", *heads], body)


def real(results: Results) -> list[str]:
    """How every structure does on every data set, with the first seed; the chosen one is bold. How many headlines agree."""
    body = []
    for line in every(results, "summary"):
        chosen, _, label = line["chosen"].partition(" (")
        digits = 2 if (line["global"] or 0) > 5 else 3
        cells = [number(line.get(name), digits) for name in ORDER]
        cells = [f"**{cell}**" if name == chosen else cell for name, cell in zip(ORDER, cells, strict=True)]
        new = [number(line[name], digits) for name in ("new", "new_global")]
        same, seconds = percent(line.get("same_headline"), 0), number(line["seconds"], 0)
        body.append([line["data"], str(line["clients"]), line["metric"], *cells, number(line["stderr"], 3),
                     label.removesuffix(")"), *new, same, seconds])  # fmt: skip
    return table(["Data", "clients", "metric", *ORDER, "se", "chosen", "new", "new, global", "same", "CPU s"], body)


TABLES: dict[str, Callable[[Results], list[str]]] = {
    "rotated": rotated,
    "synthetic": synthetic,
    "ratios": ratios,
    "ablation": ablation,
    "scaling": scaling,
    "laws": laws,
    "simulation": simulation,
    "simulation-weights": simulation_weights,
    "step-sizes": step_sizes,
    "step-sizes-weights": step_sizes_weights,
    "misclustering": misclustering,
    "misclustering-own": misclustering_own,
    "fit-times": fit_times,
    "adversarial": adversarial,
    "adaptive": adaptive,
    "adaptive-summary": adaptive_summary,
    "linear": linear,
    "linear-times": linear_times,
    "speedup": speedup,
    "speedup-trained": speedup_trained,
    "images": images,
    "bad_clients": bad_clients,
    "planted": planted,
    "privacy_audit": privacy_audit,
    "privacy_utility": privacy_utility,
    "real": real,
}
