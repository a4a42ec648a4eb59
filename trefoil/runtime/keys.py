"""Keys of Redis, built here and nowhere else. Writer, bound and loss of each: docs/state.md."""

from dataclasses import dataclass

from trefoil.core.carbon import Series


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of one cluster. `<series>` is zone:method:factors in lower case."""

    cluster: str

    @property
    def prefix(self) -> str:
        """Prefix of every key of the cluster."""
        return f"trefoil:{self.cluster}:"

    def changed(self) -> str:
        """Pub/sub channel that carries key names as a hint."""
        return f"{self.prefix}changed"

    def epoch(self, role: str) -> str:
        """Key of a role's last epoch."""
        return f"{self.prefix}epoch:{role}"

    def lease(self, role: str) -> str:
        """Key of a role's lease."""
        return f"{self.prefix}lease:{role}"

    def writes(self, role: str) -> str:
        """Key of a role's stream of writes, for audit."""
        return f"{self.prefix}writes:{role}"

    def carbon_now(self, series: Series) -> str:
        """Key of the reading in force."""
        return f"{self.prefix}carbon:now:{series_name(series)}"

    def carbon_history(self, series: Series) -> str:
        """Key of the stream of readings."""
        return f"{self.prefix}carbon:history:{series_name(series)}"

    def carbon_forecast(self, series: Series) -> str:
        """Key of the forecast in force."""
        return f"{self.prefix}carbon:forecast:{series_name(series)}"

    def carbon_ratio(self, series: Series, window: str = "") -> str:
        """Key of the carbon ratio over a window; empty = `expanding`."""
        return f"{self.prefix}carbon:ratio:{series_name(series)}{window and ':' + window}"

    def carbon_scores(self, series: Series, model: str = "") -> str:
        """Key of a model's scores; empty = of the model whose forecast is in force."""
        return f"{self.prefix}carbon:scores:{series_name(series)}{model and ':' + model}"

    def carbon_now_prefix(self) -> str:
        """Prefix of the readings in force."""
        return f"{self.prefix}carbon:now:"

    def objective(self, family: str) -> str:
        """Key of a family's objective."""
        return f"{self.objective_prefix()}{family}"

    def objective_prefix(self) -> str:
        """Prefix of all objectives."""
        return f"{self.prefix}objective:"

    def tenant_rungs(self) -> str:
        """Key of the rungs of tenants' budgets."""
        return f"{self.prefix}tenant_rungs"

    def plan(self) -> str:
        """Key of the plan."""
        return f"{self.prefix}plan"

    def plan_node(self, node: str) -> str:
        """Key of a node's plan."""
        return f"{self.plan_node_prefix()}{node}"

    def plan_node_prefix(self) -> str:
        """Prefix of all node plans."""
        return f"{self.prefix}plan:node:"

    def rollout(self) -> str:
        """Key of the rollout."""
        return f"{self.prefix}rollout"

    def kept(self, name: str) -> str:
        """Key of a copy of one of the controller's files."""
        return f"{self.kept_prefix()}{name}"

    def kept_prefix(self) -> str:
        """Prefix of all copies of the controller's files."""
        return f"{self.prefix}kept:"

    def decisions(self) -> str:
        """Key of the stream of decision records."""
        return f"{self.prefix}decisions"

    def node(self, node: str) -> str:
        """Key of a node's status."""
        return f"{self.node_prefix()}{node}"

    def node_prefix(self) -> str:
        """Prefix of all node statuses."""
        return f"{self.prefix}node:"

    def scale_signal(self, device: str) -> str:
        """Key of a device's signal that its governor wants capacity."""
        return f"{self.scale_signal_prefix()}{device}"

    def scale_signal_prefix(self) -> str:
        """Prefix of all signals of governors."""
        return f"{self.prefix}signal:scale:"

    def energy(self, node: str) -> str:
        """Key of a node's stream of energy samples."""
        return f"{self.prefix}energy:{node}"

    def energy_minutes(self, node: str) -> str:
        """Key of a node's stream of energy by the minute."""
        return f"{self.prefix}energy:minutes:{node}"

    def receipts(self) -> str:
        """Key of the rates of receipts."""
        return f"{self.prefix}receipts"

    def load(self, dispatcher: str, worker: int) -> str:
        """Key of a worker's stream of load windows."""
        return f"{self.load_prefix()}{dispatcher}:{worker}"

    def load_prefix(self) -> str:
        """Prefix of all streams of load windows."""
        return f"{self.prefix}load:"

    def ack(self, dispatcher: str, worker: int) -> str:
        """Key of a worker's acknowledgement of its table."""
        return f"{self.ack_prefix()}{dispatcher}:{worker}"

    def ack_prefix(self) -> str:
        """Prefix of all acknowledgements."""
        return f"{self.prefix}ack:"

    def demand(self, family: str) -> str:
        """Key of a family's stream of arrivals per second."""
        return f"{self.prefix}demand:{family}"

    def forecast_load(self, family: str) -> str:
        """Key of a family's load forecast."""
        return f"{self.prefix}forecast:load:{family}"

    def jobs_open(self, folder: str) -> str:
        """Key of the open jobs of a folder."""
        return f"{self.jobs_open_prefix()}{folder}"

    def jobs_open_prefix(self) -> str:
        """Prefix of the open jobs of all folders."""
        return f"{self.prefix}jobs:open:"

    def jobs_plan(self) -> str:
        """Key of the plan of jobs."""
        return f"{self.prefix}jobs:plan"

    def accounted(self) -> str:
        """Key of how far each node's energy stream is in the totals."""
        return f"{self.prefix}accounted"

    def totals(self, family: str, hour: str) -> str:
        """Key of a family's totals of an hour."""
        return f"{self.totals_prefix()}{family}:{hour}"

    def totals_prefix(self) -> str:
        """Prefix of all totals."""
        return f"{self.prefix}totals:"


def series_name(series: Series) -> str:
    """Name of a series as it stands in keys, labels and logs."""
    return f"{series.zone}:{series.method.name.lower()}:{series.factors.name.lower()}"
