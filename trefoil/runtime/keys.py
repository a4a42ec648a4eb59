"""Every Redis key, built here and nowhere else. Writer, bound and loss of each: docs/state.md."""

from dataclasses import dataclass

from trefoil.core.carbon import Series


@dataclass(frozen=True, slots=True)
class Keys:
    """All key names. `<series>` is zone:method:factors in lower case."""

    cluster: str

    @property
    def prefix(self) -> str:
        return f"trefoil:{self.cluster}:"

    def changed(self) -> str:
        """The pub/sub channel that carries key names as a hint."""
        return f"{self.prefix}changed"

    def epoch(self, role: str) -> str:
        return f"{self.prefix}epoch:{role}"

    def lease(self, role: str) -> str:
        return f"{self.prefix}lease:{role}"

    def writes(self, role: str) -> str:
        return f"{self.prefix}writes:{role}"

    def carbon_now(self, series: Series) -> str:
        return f"{self.prefix}carbon:now:{series_name(series)}"

    def carbon_history(self, series: Series) -> str:
        return f"{self.prefix}carbon:history:{series_name(series)}"

    def carbon_forecast(self, series: Series) -> str:
        return f"{self.prefix}carbon:forecast:{series_name(series)}"

    def carbon_ratio(self, series: Series, window: str = "") -> str:
        """Empty = `expanding`."""
        return f"{self.prefix}carbon:ratio:{series_name(series)}{window and ':' + window}"

    def carbon_scores(self, series: Series, model: str = "") -> str:
        """Empty = of the model whose forecast is in force."""
        return f"{self.prefix}carbon:scores:{series_name(series)}{model and ':' + model}"

    def carbon_now_prefix(self) -> str:
        return f"{self.prefix}carbon:now:"

    def objective(self, family: str) -> str:
        return f"{self.objective_prefix()}{family}"

    def objective_prefix(self) -> str:
        return f"{self.prefix}objective:"

    def plan(self) -> str:
        return f"{self.prefix}plan"

    def plan_node(self, node: str) -> str:
        return f"{self.plan_node_prefix()}{node}"

    def plan_node_prefix(self) -> str:
        return f"{self.prefix}plan:node:"

    def rollout(self) -> str:
        return f"{self.prefix}rollout"

    def decisions(self) -> str:
        return f"{self.prefix}decisions"

    def node(self, node: str) -> str:
        return f"{self.node_prefix()}{node}"

    def node_prefix(self) -> str:
        return f"{self.prefix}node:"

    def energy(self, node: str) -> str:
        return f"{self.prefix}energy:{node}"

    def energy_minutes(self, node: str) -> str:
        return f"{self.prefix}energy:minutes:{node}"

    def receipts(self) -> str:
        return f"{self.prefix}receipts"

    def load(self, dispatcher: str, worker: int) -> str:
        return f"{self.load_prefix()}{dispatcher}:{worker}"

    def load_prefix(self) -> str:
        return f"{self.prefix}load:"

    def ack(self, dispatcher: str, worker: int) -> str:
        return f"{self.ack_prefix()}{dispatcher}:{worker}"

    def ack_prefix(self) -> str:
        return f"{self.prefix}ack:"

    def demand(self, family: str) -> str:
        return f"{self.prefix}demand:{family}"

    def forecast_load(self, family: str) -> str:
        return f"{self.prefix}forecast:load:{family}"

    def signal_scale(self, node: str) -> str:
        return f"{self.signal_scale_prefix()}{node}"

    def signal_scale_prefix(self) -> str:
        return f"{self.prefix}signal:scale:"

    def totals(self, family: str, hour: str) -> str:
        return f"{self.totals_prefix()}{family}:{hour}"

    def totals_prefix(self) -> str:
        return f"{self.prefix}totals:"


def series_name(series: Series) -> str:
    """A series as it stands in keys, labels and logs."""
    return f"{series.zone}:{series.method.name.lower()}:{series.factors.name.lower()}"
