"""Panels of the dashboards. Every panel has a description: what it shows, and what to do if it looks wrong.

Queries are PromQL with Grafana's variables: ``$namespace``, ``$rljob``, ``$__rate_interval``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import common as options
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

DATASOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="${datasource}")
RATE = "$__rate_interval"
WIDTH = 24
"""Columns of Grafana's grid."""
NUMBER_HEIGHT, GRAPH_HEIGHT = 4, 7
GREEN, ORANGE, RED = "green", "orange", "red"
TAG = "rljob"


@dataclass(frozen=True)
class Query:
    """A query of a panel, and the name of its series: text with {{label}}."""

    expr: str
    legend: str = ""


def over(numerator: str, denominator: str) -> str:
    """Return a ratio that is 0, not NaN, while the denominator is 0."""
    return f"{numerator} / clamp_min({denominator}, 1e-9)"


def rate(metric: str, labels: str) -> str:
    """Return the increase per second of a counter. ``labels``: matchers of PromQL."""
    return f"rate({metric}{{{labels}}}[{RATE}])"


def quantiles(histogram: str, labels: str) -> list[Query]:
    """Return queries of the median, the 95th and the 99th percentile of a histogram."""
    buckets = f"sum by (le) ({rate(f'{histogram}_bucket', labels)})"
    return [Query(f"histogram_quantile({share}, {buckets})", f"{share * 100:.0f} %") for share in (0.5, 0.95, 0.99)]


def number(
    title: str,
    description: str,
    query: Query,
    *,
    unit: str = "short",
    decimals: int | None = None,
    width: int = 3,
    steps: Sequence[tuple[float | None, str]] = ((None, GREEN),),
    named: bool = False,
) -> stat.Panel:
    """Return a panel with the newest value.

    Args:
        title, description: texts of the panel.
        query: one series.
        unit: Grafana's name of the unit.
        decimals: of the value; None: Grafana chooses.
        width: columns.
        steps: (lower bound, color), ascending; the first has no bound.
        named: show the name of the series instead of its value.
    """
    panel = (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .span(width)
        .height(NUMBER_HEIGHT)
        .unit(unit)
        .color_mode(common.BigValueColorMode.VALUE)
        .graph_mode(common.BigValueGraphMode.NONE)
        .text_mode(common.BigValueTextMode.NAME if named else common.BigValueTextMode.VALUE)
        .reduce_options(options.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
        .thresholds(_thresholds(steps))
        .with_target(_target(query).instant())
    )
    return panel if decimals is None else panel.decimals(decimals)


def graph(
    title: str,
    description: str,
    *queries: Query,
    unit: str = "short",
    width: int = 8,
    stacked: bool = False,
    share: bool = False,
) -> timeseries.Panel:
    """Return a panel with lines.

    Args:
        title, description: texts of the panel.
        queries: their series share one axis.
        unit: Grafana's name of the unit.
        width: columns.
        stacked: areas on top of one another.
        share: the axis is from 0 to 1.
    """
    legend = options.VizLegendOptions().show_legend(True).placement(common.LegendPlacement.BOTTOM)
    legend = legend.display_mode(common.LegendDisplayMode.LIST).calcs([])
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .span(width)
        .height(GRAPH_HEIGHT)
        .unit("percentunit" if share else unit)
        .min(0)
        .line_width(1)
        .fill_opacity(40 if stacked else 10)
        .show_points(common.VisibilityMode.AUTO)
        .legend(legend)
        .tooltip(options.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING))
    )
    if share:
        panel = panel.max(1)
    if stacked:
        panel = panel.stacking(options.StackingConfig().mode(common.StackingMode.NORMAL).group("A"))
    for i, query in enumerate(queries):
        panel = panel.with_target(_target(query, i).range())
    return panel


def histogram(title: str, description: str, metric: str, labels: str, width: int = 8) -> heatmap.Panel:
    """Return a panel with the buckets of a histogram over time: the darker a cell, the more values are in it.

    Args:
        title, description: texts of the panel.
        metric: the histogram.
        labels: matchers of PromQL.
        width: columns.
    """
    target = _target(Query(f"sum by (le) ({rate(f'{metric}_bucket', labels)})", "{{le}}"))
    return (
        heatmap.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .span(width)
        .height(GRAPH_HEIGHT)
        .calculate(False)
        .with_target(target.format(PromQueryFormat.HEATMAP).range())
    )


def signed(panel: timeseries.Panel) -> timeseries.Panel:
    """Return ``panel`` with an axis that may be negative."""
    panel._internal.field_config.defaults.min_val = None
    return panel


def rows(
    title: str,
    description: str,
    columns: Mapping[str, Query],
    *,
    by: Sequence[str],
    units: Mapping[str, str] | None = None,
    width: int = WIDTH,
    link: tuple[str, str] | None = None,
) -> table.Panel:
    """Return a table with a row for each combination of the labels ``by``.

    Args:
        title, description: texts of the panel.
        columns: name of the column → query; the legend is not used. A query with one more label shows the label
            instead of its value if the column's name is empty.
        by: labels of the first columns.
        units: column → Grafana's name of the unit.
        width: columns of the grid.
        link: column → path of the dashboard that a click on it opens.
    """
    panel = table.Panel().title(title).description(description).datasource(DATASOURCE).span(width).height(GRAPH_HEIGHT)
    renamed, hidden = {}, {"Time": True}
    for i, (column, query) in enumerate(columns.items()):
        value = f"Value #{_letter(i)}"
        if column:
            renamed[value] = column
        else:
            hidden[value] = True
        panel = panel.with_target(_target(query, i).format(PromQueryFormat.TABLE).instant())
    order = {name: i for i, name in enumerate(by)}
    merged = dashboard.DataTransformerConfig("merge", options={})
    arranged = {"excludeByName": hidden, "renameByName": renamed, "indexByName": order}
    panel = panel.with_transformation(merged)
    panel = panel.with_transformation(dashboard.DataTransformerConfig("organize", options=arranged))
    for column, unit in (units or {}).items():
        panel = panel.override_by_name(column, [dashboard.DynamicConfigValue("unit", unit)])
    if link is not None:
        column, path = link
        target = [{"title": "open", "url": path}]
        panel = panel.override_by_name(column, [dashboard.DynamicConfigValue("links", target)])
    return panel


def board(title: str, uid: str, description: str, variables: Sequence[build.QueryVariable]) -> build.Dashboard:
    """Return a dashboard without panels. ``variables`` follow that of the data source."""
    links = build.DashboardLink("dashboards of rljob").type(dashboard.DashboardLinkType.DASHBOARDS).tags([TAG])
    result = (
        build.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags([TAG])
        .timezone("browser")
        .refresh("30s")
        .time("now-3h", "now")
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .link(links.icon("external link").as_dropdown(False).keep_time(True).include_vars(True))
        .with_variable(build.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
    )
    for variable in variables:
        result = result.with_variable(variable)
    return result


def variable(name: str, label: str, query: str, several: bool = False) -> build.QueryVariable:
    """Return a variable whose values are those of a label: ``label_values(METRIC, LABEL)``."""
    result = (
        build.QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query(query)
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
    )
    return result.multi(True).include_all(True).all_value(".*") if several else result


def section(
    to: build.Dashboard, title: str, *panels: stat.Panel | timeseries.Panel | table.Panel | heatmap.Panel
) -> build.Dashboard:
    """Return ``to`` with one more row of panels."""
    to = to.with_row(build.Row(title))
    for panel in panels:
        to = to.with_panel(panel)
    return to


def _target(query: Query, position: int = 0) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(query.expr).ref_id(_letter(position)).datasource(DATASOURCE)
    return target.legend_format(query.legend) if query.legend else target


def _letter(position: int) -> str:
    return chr(ord("A") + position)


def _thresholds(steps: Sequence[tuple[float | None, str]]) -> build.ThresholdsConfig:
    bounds = [dashboard.Threshold(value, color) for value, color in steps]
    return build.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(bounds)
