"""Whatever the feed is asked, it answers or says which field is wrong; it never fails by a bug of its own."""

import asyncio

from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from carbon_feed.serving.servicer import CarbonFeedServicer
from protos.carbon_feed.v1 import carbon_feed_pb2 as pb
from protos.types.v1 import carbon_pb2
from tests.unit.carbon_feed.test_servicer import NOW_S, Feed, filled, forecast
from trefoil.core import errors
from trefoil.core.carbon import CarbonRatio
from trefoil.runtime.clock import ManualClock

INT64 = 2**63
ZONES = st.sampled_from(["", "GB", "UK", "FR", "DE", "gcp/europe-west2", "\x00", "é" * 50])
NUMBERS = st.floats(width=64) | st.sampled_from([0.0, 300.0, 900.0, 3600.0, 86_400.0])
TIMES = st.builds(
    Timestamp,
    seconds=st.integers(-INT64, INT64 - 1) | st.integers(int(NOW_S) - 86_400, int(NOW_S) + 86_400),
    nanos=st.integers(-(2**31), 2**31 - 1) | st.integers(0, 999_999_999),
)
SERIES = st.builds(
    carbon_pb2.Series, zone=ZONES, method=st.integers(-(2**31), 3), factors=st.integers(0, 2) | st.just(2**31 - 1)
)
MODELS = st.sampled_from(["", "blend", "persistence", "x"])


def some(message, **fields):
    """A message of which each field may be unset."""
    made = st.fixed_dictionaries({}, optional=fields)
    return made.map(lambda chosen: message(**chosen))


REQUESTS = st.one_of(
    some(pb.GetManyRequest, zones=st.lists(ZONES, max_size=3), series=st.lists(SERIES, max_size=3)),
    some(
        pb.GetHistoryRequest,
        zone=st.just("GB"),
        from_at=TIMES,
        to_at=TIMES,
        as_of_at=TIMES,
        limit=st.integers(0, 2**32 - 1) | st.integers(0, 60),
        revisions=st.booleans(),
    ),
    some(pb.GetForecastRequest, zone=st.sampled_from(["GB", "FR"]), horizon_s=NUMBERS, step_s=NUMBERS, model=MODELS),
    some(pb.GetRatioRequest, zone=ZONES, window=st.sampled_from(["", "expanding", "30d", "same_hour", "7d"])),
    some(pb.GetScoresRequest, zone=ZONES, model=MODELS),
    some(pb.ListZonesRequest, polled_only=st.booleans(), name=ZONES),
    some(pb.GetZoneHealthRequest, zone=ZONES),
    some(pb.WatchIntensityRequest, zone=ZONES, change_ratio=NUMBERS, hysteresis_ratio=NUMBERS),
)


async def asked(servicer, request):
    """The answers, or the complaint."""
    method = getattr(servicer, type(request).__name__.removesuffix("Request"))
    made = method(type(request).FromString(request.SerializeToString()), None)
    try:
        return [one async for one in made] if hasattr(made, "__aiter__") else [await made]
    except errors.TrefoilError as error:
        return error


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(REQUESTS)
def test_any_question_is_answered_or_refused_by_name(request):
    feeds = [Feed("GB"), Feed("FR")]
    filled(feeds[0], 60)
    feeds[0].told = [feeds[0].reading]
    feeds[0].forecasts.forecast = forecast(feeds[0].series, "blend")
    feeds[0].forecasts.archive.add(feeds[0].forecasts.forecast)
    feeds[0].forecasts.ratio = lambda window, now_s: CarbonRatio(feeds[0].series, 200.0, 0.9, window, 48, now_s)
    answer = asyncio.run(asked(CarbonFeedServicer(feeds, clock=ManualClock(NOW_S)), request))
    if isinstance(answer, errors.TrefoilError):
        assert "Remedy: " in str(answer), str(answer)
        if isinstance(answer, errors.InvalidInput):
            assert answer.field
    else:
        for one in answer:
            one.SerializeToString()
