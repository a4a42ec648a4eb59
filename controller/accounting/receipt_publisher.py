"""Publication of receipt rates to the dispatchers."""

import math

from controller.accounting.core.receipts import Key, Receipts, rates_changed
from controller.role.leadership import Leadership
from controller.settings import ControllerSettings
from trefoil.core.common import Revision
from trefoil.core.energy import ReceiptRates
from trefoil.core.plan import Plan
from trefoil.runtime.clock import Clock
from trefoil.runtime.fenced import Put
from trefoil.runtime.state import Keys

PUBLISH_S = 5.0  # how often receipt rates are published once one of them has moved by PUBLISH_RATIO
PUBLISH_RATIO = 0.005
REPEAT_S = 20.0  # how often they are published all the same: dispatchers call them old after 60 s


class ReceiptPublisher:
    """Publisher of receipt rates to the dispatchers: when a rate has moved, and again before they call it old."""

    def __init__(
        self, settings: ControllerSettings, keys: Keys, receipts: Receipts, leadership: Leadership, clock: Clock
    ) -> None:
        self._settings, self._keys, self._receipts = settings, keys, receipts
        self._leadership, self._clock = leadership, clock
        self._published_ratios: dict[Key, float] = {}
        self._at_s = -math.inf
        self._published_at_s = -math.inf
        self._epoch = 0

    async def publish(self, plan: Plan | None) -> None:
        """Publish the rates if it is time to, and at once under a new epoch: nothing repairs what an old one wrote."""
        now_s, epoch = self._clock.now_s(), self._leadership.epoch
        if epoch != self._epoch:
            self._epoch, self._at_s, self._published_at_s = epoch, -math.inf, -math.inf
        if now_s - self._at_s < PUBLISH_S:
            return
        self._at_s = now_s
        rates = self._receipts.rates(plan)
        if now_s - self._published_at_s < REPEAT_S and not rates_changed(self._published_ratios, rates, PUBLISH_RATIO):
            return
        revision = plan.revision if plan is not None else Revision()
        told = ReceiptRates(rates, now_s, self._settings.carbon.series, self._settings.pue, revision)
        await self._leadership.write([Put(self._keys.receipts(), told)])
        self._published_at_s = now_s
        self._published_ratios = {(rate.slice, rate.family, rate.variant): rate.ratio for rate in rates}
