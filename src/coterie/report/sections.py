# SPDX-License-Identifier: Apache-2.0
"""The sections that reports of several methods have; each is None when the run folder does not hold its data."""

from coterie.report import figures, summary, tables
from coterie.report.run_folder import Run
from coterie.report.section import Section, section

__all__ = ["clients", "clusters", "comparison", "events", "settings", "traffic", "training", "use", "why"]


def why(run: Run) -> Section | None:
    """Say why a comparison chose this method."""
    found = run.results.get("why")
    if not found:
        return None
    return section(
        "why", "Why this method", **{name: found[name] for name in ("headline", "evidence", "doubts", "report")}
    )


def comparison(run: Run) -> Section | None:
    """Set the run beside the models that it is compared with."""
    table, gains = summary.comparison(run), figures.gains(run)
    if table is None and gains is None:
        return None
    methods = None if table is None else figures.methods(run, table)
    return section("comparison", "Comparison", run=run, comparison=table, methods=methods, gains=gains)


def training(run: Run) -> Section | None:
    """Draw what happened round by round."""
    found = [f for f in (*figures.training(run), figures.cluster_sizes(run)) if f]
    return section("training", "Training", figures=found) if found else None


def clusters(run: Run) -> Section | None:
    """Show who is in which cluster, how clearly, and where their models differ."""
    table, profiles = tables.cluster_table(run), tables.profiles(run)
    placing = [f for f in (figures.client_map(run), figures.margins(run)) if f]
    if not (table or placing or profiles):
        return None
    return section("clusters", "Clusters", clusters=table, placing=placing, profiles=profiles)


def clients(run: Run) -> Section | None:
    """List the clients."""
    table = tables.client_table(run)
    return section("clients", "Clients", clients=table) if table else None


def traffic(run: Run) -> Section | None:
    """Say how many bytes went up and down, and what secure sums took of them."""
    (drawn, words), secure = figures.bytes_by_round(run), summary.secured(run)
    if not words and not secure:
        return None
    facts = summary.traffic(run)
    return section("traffic", "Communication", run=run, figure=drawn, words=words, facts=facts, secure=secure)


def events(run: Run) -> Section | None:
    """List what happened on the way."""
    found, n_events = tables.events(run)
    return section("events", "Events", events=found, n_events=n_events) if found else None


def use(run: Run) -> Section | None:
    """Show how to use the models."""
    python, shell = tables.how_to_load(run)
    return section("use", "Use the models", python=python, shell=shell) if run.has_models else None


def settings(run: Run) -> Section:
    """List options, data and versions."""
    return section(
        "settings",
        "Settings",
        settings=tables.settings(run.part("config")),
        data=tables.settings(run.part("data")),
        versions=tables.settings({"coterie": run.info.get("coterie"), **run.part("versions")}),
    )
