"""This dispatcher worker: who it is, whether clients should come, and its parts (routing, slice health, accounting)."""

from collections.abc import Mapping

from dispatcher.lengths.asking import Lengths
from dispatcher.routing.core.membership import WorkerId
from dispatcher.routing.core.service_costs import ServiceCosts
from dispatcher.routing.routing_state import Routing
from dispatcher.service.accounting import Accounting
from dispatcher.service.core.tenant_rungs import BudgetLadder
from dispatcher.service.ejector import SliceHealth
from dispatcher.settings import DispatcherSettings
from dispatcher.slice_health.core.ejection import Ejections
from dispatcher.slice_health.core.outliers import SliceEvidence
from trefoil.installation import resolve_path
from trefoil.runtime.clock import Clock
from trefoil.runtime.security.tls import Tls


class LocalWorker:
    """State of this worker, which all of its services share. Belongs to one event loop."""

    def __init__(self, settings: DispatcherSettings, dispatcher: str, clock: Clock) -> None:
        self.settings = settings
        self.clock = clock
        self.id: WorkerId = (dispatcher, settings.worker)
        self.tls = Tls.of(settings)
        ejections = Ejections()
        evidence = SliceEvidence(settings.hang_quiet_s, settings.late_strikes, settings.fault_strikes)
        self.routing = Routing(settings, self.id, clock, ejections, evidence.slow_start, self.tls)
        self.health = SliceHealth(ejections, evidence, self.routing, clock)
        self.accounting = Accounting(dispatcher, settings.worker, clock.now_s(), settings.classes_max)
        self.lengths = Lengths(resolve_path(settings.lengths_folder), clock, self.routing.reads_lengths)
        self.costs = ServiceCosts()
        self.budgets = BudgetLadder()
        self.peer_target = ""  # where other workers reach this one
        self.drained_why = ""  # by an operator
        self.active_rungs: Mapping[str, str] = {}  # what is away, and what serves instead
        self._stopping = False

    @property
    def draining(self) -> bool:
        """Whether clients should go elsewhere: the process is stopping, or an operator drained it."""
        return self._stopping or bool(self.drained_why)

    @draining.setter
    def draining(self, stopping: bool) -> None:
        """The process is stopping."""
        self._stopping = stopping
        self._update_membership()

    def drain(self, why: str) -> None:
        """Drain this worker for a while, or, with "", bring it back. Requests that come all the same are answered."""
        self.drained_why = why
        self._update_membership()

    def not_ready(self) -> str:
        """Reason why clients should not come, "" when they may."""
        if self._stopping:
            return "the dispatcher is stopping"
        if self.drained_why:
            return f"the dispatcher is drained: {self.drained_why}"
        if not self.routing.table.routes:
            return "no plan has been read"
        empty = [family for family in self.routing.table.chains if not self.routing.table.served(family)]
        return f"no live slice for {', '.join(sorted(empty))}" if empty else ""

    @property
    def status_line(self) -> str:
        """Status in a line: what is not as planned, why clients should not come, what is away."""
        said = (
            self.routing.table.summary or self.not_ready(),
            *(self.active_rungs[cause] for cause in sorted(self.active_rungs)),
        )
        return "; ".join(each for each in said if each)

    def _update_membership(self) -> None:
        if self.routing.membership.set_leaving(self.draining):
            self.routing.redivide_credits()
