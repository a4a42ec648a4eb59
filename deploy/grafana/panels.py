"""Panels and dashboards as Grafana reads them, from the metric table (trefoil/runtime/metrics.py).

A panel is a title, expressions and a unit; what it means is taken from the table. An expression with a name that is
neither there nor recorded by deploy/prometheus/rules ends this program.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from trefoil.runtime.metrics import METRICS, TRITON_METRICS

HERE: Final = Path(__file__).parent
RULES: Final = HERE.parent / "prometheus" / "rules"
DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
TABLE: Final = {metric.name: metric for metric in (*METRICS, *TRITON_METRICS)}
OTHERS: Final = {
    "ALERTS": "Alerts of deploy/prometheus/rules/alerts.yml.",
    "process_cpu_seconds_total": "CPU time of a service.",
    "process_resident_memory_bytes": "Memory of a service.",
    "redis_memory_used_bytes": "Memory that Redis uses.",
    "redis_memory_max_bytes": "Its maxmemory: at this limit it refuses writes. 0: none.",
    "redis_commands_processed_total": "Commands that Redis has carried out.",
    "redis_connected_clients": "Connections to Redis.",
    "redis_rejected_connections_total": "Connections that Redis turned away: maxclients.",
    "redis_evicted_keys_total": "Keys that Redis dropped for want of memory.",
    "redis_up": "Whether the exporter reaches Redis.",
    "redis_rdb_last_bgsave_status": "Whether Redis' last snapshot was written.",
    "redis_aof_last_write_status": "Whether Redis' log of commands was written.",
    "redis_aof_last_bgrewrite_status": "Whether that log was rewritten.",
}
"""Metrics of Prometheus, of its client library and of Redis' exporter."""
NAME: Final = re.compile(r"\b(?:trefoil[_:][a-z0-9_:]+|nv_[a-z_]+|process_[a-z_]+|redis_[a-z_]+|ALERTS)\b")
LEADS: Final = 'trefoil_lease_epoch{role="controller"} > 0'
WIDTH: Final = 24


def leader(metric: str) -> str:
    """A gauge of the controller that leads: one that stands by shows what it knew once."""
    return f"({metric} and on (instance) {LEADS})"


def metric_names(expression: str) -> Iterator[str]:
    """Names of the metrics in an expression, histograms by their own name."""
    for name in NAME.findall(expression):
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        yield base if base in TABLE and TABLE[base].kind == "histogram" else name


def of_cluster(expression: str) -> str:
    """The expression for the chosen clusters: series that a Prometheus of several clusters labels by `cluster`."""
    chosen = 'cluster=~"$cluster"'
    named = NAME.sub(lambda found: f"{found[0]}{{{chosen}}}", expression)
    return named.replace(f"{{{chosen}}}{{", f"{{{chosen},").replace(f"{chosen},}}", f"{chosen}}}")


def recorded() -> Mapping[str, str]:
    """Names that recording rules make, and the expression of each."""
    groups = yaml.safe_load((RULES / "recording.yml").read_text())["groups"]
    return {rule["record"]: rule["expr"] for group in groups for rule in group["rules"]}


RECORDED: Final = recorded()


@dataclass(frozen=True)
class Panel:
    """A panel. `targets`: (expression, legend); `w` of 24 columns, `h` rows."""

    kind: str
    title: str
    targets: Sequence[tuple[str, str]]
    unit: str = "short"
    w: int = 8
    h: int = 8
    says: str = ""  # before what the table says of its metrics
    stacked: bool = False
    steps: bool = False
    least: float | None = 0.0
    most: float | None = None
    decimals: int | None = None
    thresholds: Sequence[tuple[str, float | None]] = (("green", None),)
    text: str = "value"  # of a stat: value, name or value_and_name
    mappings: Sequence[Any] = ()
    no_value: str = ""  # shown where the expression has none
    value: str = ""  # how a table's column of values is called; "" = it has none
    dashed: Sequence[str] = ()  # legends that are limits
    colors: Mapping[str, str] = field(default_factory=dict)  # by legend
    soft_most: float | None = None  # least top of the axis: a line at 0 has no scale of its own

    def meaning(self) -> str:
        """What is shown, by the metric table."""
        names = dict.fromkeys(name for expression, _ in self.targets for name in metric_names(expression))
        for name in list(names):
            names |= dict.fromkeys(metric_names(RECORDED.get(name, "")))
        helps = []
        for name in names:
            if name not in TABLE and name not in RECORDED and name not in OTHERS:
                raise SystemExit(f"panel {self.title!r}: nobody writes {name}. Remedy: declare it in the metric table")
            if name in TABLE and (name != "trefoil_lease_epoch" or len(names) == 1):
                helps.append(f"{name}: {TABLE[name].help}")
            if name in OTHERS:
                helps.append(f"{name}: {OTHERS[name]}")
        return "\n\n".join(filter(None, (self.says, *helps)))

    def json(self, number: int, x: int, y: int) -> dict[str, Any]:
        """The panel as Grafana reads it."""
        instant = self.kind in ("stat", "table")
        targets = [
            {
                "refId": chr(ord("A") + i),
                "datasource": DATASOURCE,
                "expr": of_cluster(expression),
                "legendFormat": legend,
                "instant": instant,
                "range": not instant,
                "format": "table" if self.kind == "table" else "time_series",
            }
            for i, (expression, legend) in enumerate(self.targets)
        ]
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.meaning(),
            "datasource": DATASOURCE,
            "gridPos": {"x": x, "y": y, "w": self.w, "h": self.h},
            "targets": targets,
            "fieldConfig": {"defaults": self._defaults(), "overrides": self._overrides()},
            "options": OPTIONS[self.kind] | ({"textMode": self.text} if self.kind == "stat" else {}),
            **({"transformations": [_columns(self.value)]} if self.kind == "table" else {}),
        }

    def _defaults(self) -> dict[str, Any]:
        steps = [{"color": color, "value": value} for color, value in self.thresholds]
        defaults: dict[str, Any] = {
            "unit": self.unit,
            "color": {"mode": "thresholds" if self.kind == "stat" else "palette-classic"},
            "thresholds": {"mode": "absolute", "steps": steps},
            "mappings": list(self.mappings),
        }
        limits = {"min": self.least, "max": self.most, "decimals": self.decimals, "noValue": self.no_value or None}
        defaults |= {name: value for name, value in limits.items() if value is not None}
        if self.kind == "timeseries":
            defaults["custom"] = {
                "drawStyle": "line",
                "lineWidth": 1 if self.stacked else 2,
                "fillOpacity": 60 if self.stacked else 8,
                "lineInterpolation": "stepAfter" if self.steps else "linear",
                "showPoints": "never",
                "spanNulls": 60_000,
                "stacking": {"mode": "normal" if self.stacked else "none", "group": "A"},
                **({"axisSoftMax": self.soft_most} if self.soft_most is not None else {}),
            }
        return defaults

    def _overrides(self) -> list[dict[str, Any]]:
        limit = [
            {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [8, 6]}},
            {"id": "custom.fillOpacity", "value": 0},
            {"id": "color", "value": {"mode": "fixed", "fixedColor": "red"}},
        ]
        painted = {
            name: [{"id": "color", "value": {"mode": "fixed", "fixedColor": color}}]
            for name, color in self.colors.items()
        }
        overridden = dict.fromkeys(self.dashed, limit) | painted
        return [{"matcher": {"id": "byName", "options": name}, "properties": each} for name, each in overridden.items()]


def _columns(value: str) -> dict[str, Any]:
    hidden = ["Time", *([] if value else ["Value"])]
    return {
        "id": "organize",
        "options": {"excludeByName": dict.fromkeys(hidden, True), "renameByName": {"Value": value}},
    }


LAST: Final = {"calcs": ["lastNotNull"], "fields": "", "values": False}
OPTIONS: Final[Mapping[str, dict[str, Any]]] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {"reduceOptions": LAST, "colorMode": "value", "graphMode": "none", "justifyMode": "center"},
    "table": {"showHeader": True, "cellHeight": "sm"},
}


def stat(title: str, expression: str, unit: str = "short", legend: str = "", **more: Any) -> Panel:
    """One number, or a few."""
    return Panel("stat", title, [(expression, legend)], unit, **({"w": 4, "h": 4} | more))


def lines(title: str, targets: Sequence[tuple[str, str]], unit: str = "short", **more: Any) -> Panel:
    """Lines over time."""
    return Panel("timeseries", title, targets, unit, **more)


def line(title: str, expression: str, legend: str, unit: str = "short", **more: Any) -> Panel:
    """Lines of one expression."""
    return lines(title, [(expression, legend)], unit, **more)


def by_state(title: str, metric: str, colors: Mapping[str, str]) -> Panel:
    """How many are in which state."""
    of = [(f"sum by (state) ({metric}) > 0", "{{state}}")]
    return lines(title, of, stacked=True, steps=True, colors=colors, decimals=0)


def current(title: str, label: str, metric: str, w: int) -> Panel:
    """The one value of a label that holds now, by its name."""
    return stat(title, f"max by ({label}) {metric} == 1", "short", f"{{{{{label}}}}}", text="name", w=w)


def counted(title: str, expression: str, legend: str, says: str = "") -> Panel:
    """Counts that are 0 where all is well."""
    return line(title, expression, legend, soft_most=1, decimals=0, steps=True, says=says)


def table(title: str, expression: str, value: str = "", **more: Any) -> Panel:
    """A row for each series, its labels as columns."""
    return Panel("table", title, [(expression, "")], value=value, **more)


@dataclass(frozen=True)
class Dashboard:
    """A dashboard: `rows` of panels, each filling up to 24 columns; `variables` that Grafana asks for."""

    name: str
    title: str
    says: str
    rows: Sequence[Sequence[Panel]]
    variables: Sequence[Mapping[str, Any]] = field(default_factory=tuple)

    def json(self) -> dict[str, Any]:
        """The dashboard as Grafana reads it."""
        panels, y = [], 0
        for row in self.rows:
            x = 0
            for panel in row:
                assert x + panel.w <= WIDTH, panel.title
                panels.append(panel.json(len(panels) + 1, x, y))
                x += panel.w
            y += max(panel.h for panel in row)
        return {
            "uid": f"trefoil-{self.name}",
            "title": f"Trefoil: {self.title}",
            "description": self.says,
            "tags": ["trefoil"],
            "schemaVersion": 39,
            "version": 1,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "10s",
            "time": {"from": "now-1h", "to": "now"},
            "timezone": "",
            "templating": {"list": [*EVERYWHERE, *self.variables]},
            "links": [{"type": "dashboards", "tags": ["trefoil"], "title": "Trefoil", "asDropdown": True}],
            "annotations": {"list": [PLANS]},
            "panels": panels,
        }


PLANS: Final = {
    "name": "New plans",
    "datasource": DATASOURCE,
    "enable": True,
    "iconColor": "blue",
    "expr": of_cluster(f"changes(trefoil_plan_revision_number[$__rate_interval]) > 0 and on (instance) {LEADS}"),
    "titleFormat": "new plan",
}


def variable(name: str, query: str, regex: str = "") -> dict[str, Any]:
    """A variable whose values are those of a label."""
    return {
        "name": name,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": of_cluster(query), "refId": name},
        "definition": of_cluster(query),
        "regex": regex,
        "refresh": 2,
        "sort": 1,
    }


CLUSTER: Final = "label_values(trefoil_lease_epoch, cluster)"
EVERYWHERE: Final = (
    {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "refresh": 1},
    variable("cluster", CLUSTER)
    | {"query": {"query": CLUSTER, "refId": "cluster"}, "definition": CLUSTER, "includeAll": True, "allValue": ".*"}
    | {"current": {"text": "All", "value": "$__all"}},
)
"""Variables of every dashboard. A series without the label `cluster` is of all of them."""


def rate(metric: str, by: str, matching: str = "") -> str:
    """Rate of a counter, summed by labels."""
    inside = f"{metric}{{{matching}}}" if matching else metric
    return f"sum by ({by}) (rate({inside}[$__rate_interval]))" if by else f"sum(rate({inside}[$__rate_interval]))"


def quantile(q: float, histogram: str, matching: str, by: str = "") -> str:
    """Quantile of a histogram, of series that were observed at all: without `>= 0` the others would be NaN."""
    labels = f"le, {by}" if by else "le"
    rates = f"sum by ({labels}) (rate({histogram}_bucket{{{matching}}}[$__rate_interval]))"
    return f"histogram_quantile({q}, {rates}) >= 0"
