"""Whatever JSON a provider answers, an adapter says an observation or a named failure, and the ladder judges it."""

import asyncio
import copy

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from carbon_feed.core.fallback import FallbackLadder, FallbackView, ProviderAnswer
from carbon_feed.core.observation import Observation
from carbon_feed.core.validation import check_forecast
from carbon_feed.providers.base import ProviderFailure
from carbon_feed.providers.electricity_maps import ElectricityMapsProvider
from carbon_feed.providers.neso import NesoProvider
from carbon_feed.providers.watttime import WattTimeProvider
from carbon_feed.settings import ElectricityMapsSettings, WattTimeSettings
from tests.support.carbon_answers import EM_DOC, EM_DOC_S, NESO_DOC, NESO_DOC_S, WT_DOC, WT_DOC_S, em_series, neso
from trefoil.core.carbon import Factors, Method, Series

LEAVES = (
    st.none()
    | st.booleans()
    | st.floats()
    | st.integers()
    | st.just(10**400)
    | st.sampled_from(
        ["", "GB", "FR", "hourly", "direct", "2018-01-20T12:00Z", "9999-12-31T23:59:59-14:00", "0001-01-01"]
    )
)
ANY = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner))


class Told:
    """In the place of `HttpClient`: answers what it is told."""

    def __init__(self, answer):
        self.answer = answer

    async def get(self, path, **_):
        return {"token": "t"} if path == "/login" else self.answer


def places(document, at=()):
    """Every path into a document."""
    yield at
    inner = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in inner:
        yield from places(value, (*at, key))


def put(document, at, value):
    """A copy with another value at a path."""
    if not at:
        return value
    made = copy.deepcopy(document)
    holder = made
    for key in at[:-1]:
        holder = holder[key]
    holder[at[-1]] = value
    return made


DOCUMENTS = {
    "neso": (NESO_DOC, neso(2, regionid=13)),
    "electricity_maps": (EM_DOC, em_series(count=2)),
    "watttime": (WT_DOC,),
}
NOW_S = {"neso": NESO_DOC_S, "electricity_maps": EM_DOC_S, "watttime": WT_DOC_S}


def provider(name, answer):
    if name == "neso":
        return NesoProvider(Told(answer), 300.0, 13)
    if name == "electricity_maps":
        made = ElectricityMapsSettings.model_validate({"token": "env:CARBON_TEST_SECRET"})
        return ElectricityMapsProvider(Told(answer), made, "FR", Factors.DIRECT)
    secret = {"username": "env:CARBON_TEST_SECRET", "password": "env:CARBON_TEST_SECRET"}
    return WattTimeProvider(Told(answer), WattTimeSettings.model_validate(secret), "CAISO_NORTH", Method.MARGINAL)


@pytest.mark.parametrize("name", DOCUMENTS)
@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_answer_is_a_crash_and_none_is_believed_that_is_no_intensity(name, data, monkeypatch):
    monkeypatch.setenv("CARBON_TEST_SECRET", "x")
    document = data.draw(st.sampled_from(DOCUMENTS[name]))
    answer = put(document, data.draw(st.sampled_from(list(places(document)))), data.draw(ANY))
    asked, now_s = provider(name, answer), NOW_S[name]
    series = Series("z", Method.MARGINAL if name == "watttime" else Method.AVERAGE, Factors.DIRECT)

    async def ask():
        try:
            said = ProviderAnswer(name, await asked.read(now_s))
        except ProviderFailure as failure:
            said = ProviderAnswer(name, refusal=failure.refusal)
        try:
            points = await asked.forecast(now_s, 48 * 3600.0)
        except ProviderFailure:
            points = ()
        return said, points

    said, points = asyncio.run(ask())
    assert check_forecast(points, series, now_s, 48 * 3600.0) is not None, "two points are not a forecast"
    decision = FallbackLadder().decide(FallbackView(now_s, series, (said,)))
    if decision.reading is not None:
        assert isinstance(said.observation, Observation)
        assert 0 <= decision.reading.intensity_g_per_kwh <= 1500
        assert decision.reading.rung == 0 or decision.refusals
