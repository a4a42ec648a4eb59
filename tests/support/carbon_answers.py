"""What providers answer: their documents' own examples, verbatim, and longer ones of the same shape."""

import datetime
import json
from dataclasses import dataclass

from carbon_feed.settings import CarbonFeedSettings
from tests.support.carbon_server import Reply

NESO_DOC = json.loads(
    '{"data":[{"from":"2018-01-20T12:00Z","to":"2018-01-20T12:30Z",'
    '"intensity":{"forecast":266,"actual":263,"index":"moderate"}}]}'
)
NESO_DOC_S = datetime.datetime(2018, 1, 20, 12, 10, tzinfo=datetime.UTC).timestamp()
NESO_ERROR = json.loads('{"error":{"code":"400 Bad Request","message":"Please enter a valid start date"}}')
NESO_500 = json.loads('{"error":{"code":"500 Internal Server Error","message":"Requested resource not found"}}')

EM_DOC = json.loads(
    '{"zone":"FR","carbonIntensity":67,"datetime":"2025-01-15T12:00:00.000Z","updatedAt":"2025-01-15T11:51:02.892Z",'
    '"createdAt":"2025-01-15T11:54:01.319Z","emissionFactorType":"lifecycle","isEstimated":false,'
    '"estimationMethod":null,"temporalGranularity":"hourly"}'
)
EM_DOC_S = datetime.datetime(2025, 1, 15, 12, 20, tzinfo=datetime.UTC).timestamp()
EM_FORECAST_DOC = json.loads(
    '{"zone":"FR","forecast":[{"carbonIntensity":326,"datetime":"2022-05-20T08:00:00.000Z"}],'
    '"updatedAt":"2022-05-20T07:45:00.000Z"}'
)
EM_NO_DATA = json.loads('{"status":"error","message":"No recent data available for this zone"}')

WT_DOC = json.loads(
    '{"data":[{"point_time":"2022-07-15T00:00:00+00:00","value":870,"last_updated":"2023-10-01T00:00:00+00:00",'
    '"imputed_data_used":true}],"meta":{"data_point_period_seconds":300,"region":"CAISO_NORTH","warnings":['
    '{"type":"EXAMPLE_WARNING","message":".."}],"signal_type":"co2_moer","model":{"type":"binned_regression",'
    '"date":"2023-03-01"},"units":"lbs_co2_per_mwh"}}'
)
WT_DOC_S = datetime.datetime(2022, 7, 15, 0, 2, tzinfo=datetime.UTC).timestamp()
WT_LOGIN = json.loads('{"token":"first-token"}')


def neso(count=97, now_s=NESO_DOC_S, value=266, actual=None, step_s=1800, start_s=None, **region):
    """`count` half hours from the one that holds now; with `region` in the shape of a region's range."""
    start_s = now_s // step_s * step_s if start_s is None else start_s
    rows = []
    for k in range(count):
        at_s = start_s + k * step_s
        intensity = {"forecast": value, "index": "moderate"}
        rows.append({"from": minute(at_s), "to": minute(at_s + step_s), "intensity": intensity})
        if not region:
            intensity["actual"] = actual
    return {"data": {**region, "data": rows}} if region else {"data": rows}


def em_series(key="forecast", count=73, now_s=EM_DOC_S, value=67, zone="FR"):
    """An Electricity Maps list under one of its three names."""
    start_s = now_s // 3600 * 3600
    rows = [{"carbonIntensity": value, "datetime": iso(start_s + 3600 * k)} for k in range(count)]
    return {"zone": zone, key: rows, "updatedAt": iso(now_s - 600), "temporalGranularity": "hourly"}


def watttime(count=289, now_s=WT_DOC_S, value=870.0, **meta):
    """A WattTime forecast."""
    start_s = now_s // 300 * 300
    rows = [{"point_time": iso(start_s + 300 * k), "value": value} for k in range(count)]
    said = {**WT_DOC["meta"], "warnings": [], "generated_at": iso(start_s), **meta}
    return {"data": rows, "meta": said}


def minute(at_s):
    return datetime.datetime.fromtimestamp(at_s, datetime.UTC).strftime("%Y-%m-%dT%H:%MZ")


def iso(at_s):
    return datetime.datetime.fromtimestamp(at_s, datetime.UTC).isoformat()


def http_date(at_s):
    return datetime.datetime.fromtimestamp(at_s, datetime.UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")


EVERYWHERE = {
    "500 with an error body": Reply(NESO_500, 500),
    "502 with a page": Reply("<html>bad gateway</html>", 502),
    "503 with Retry-After": Reply("", 503, {"retry-after": "120"}),
    "429 with Retry-After": Reply({"error": "too many"}, 429, {"retry-after": "90"}),
    "429 without": Reply({"error": "too many"}, 429),
    "401": Reply({"error": "Invalid auth-token"}, 401),
    "403": Reply({"error": "not subscribed"}, 403),
    "404 NoDataError": Reply(EM_NO_DATA, 404),
    "400": Reply(NESO_ERROR, 400),
    "410": Reply("", 410),
    "302 elsewhere": Reply("", 302, {"location": "https://example.org/"}),
    "200, empty body": Reply(b""),
    "200 {}": Reply({}),
    "200 null": Reply("null"),
    '200 {"data": []}': Reply({"data": []}),
    "200, not JSON": Reply("<html>maintenance</html>"),
    "200, other shape": Reply({"hello": "world"}),
    "connection cut": Reply(b'{"data": [', cut=60),
    "no answer in time": Reply(hang=True),
    "endless answer": Reply(b'"' + b"x" * 70_000 + b'"'),
}
CAUSES = {
    "500 with an error body": "server_error",
    "502 with a page": "server_error",
    "503 with Retry-After": "server_error",
    "429 with Retry-After": "rate_limited",
    "429 without": "rate_limited",
    "401": "unauthorised",
    "403": "forbidden",
    "404 NoDataError": "no_data",
    "400": "bad_request",
    "410": "gone",
    "302 elsewhere": "redirected",
    "200, empty body": "empty",
    "200 {}": "empty",
    "200 null": "empty",
    '200 {"data": []}': "empty",
    "200, not JSON": "not_json",
    "200, other shape": "wrong_shape",
    "connection cut": "connection",
    "no answer in time": "timeout",
    "endless answer": "too_large",
}


@dataclass(frozen=True)
class Case:
    """One provider as the suite sees it."""

    name: str
    now_s: float
    path: str
    document: dict
    whole: dict
    value_g: float
    settings: dict


CASES = {
    case.name: case
    for case in (
        Case("neso", NESO_DOC_S, "/intensity", NESO_DOC, neso(), 263.0, {"zone": "GB", "factors": "direct"}),
        Case("electricity_maps", EM_DOC_S, "/v4/carbon-intensity/", EM_DOC, em_series(), 67.0, {"zone": "FR"}),
        Case(
            "watttime",
            WT_DOC_S,
            "/v3/",
            WT_DOC,
            watttime(),
            870 * 453.59237 / 1000,
            {"zone": "US-CAL-CISO", "method": "marginal", "factors": "direct"},
        ),
    )
}


def settings_of(case: Case, url: str, **more) -> CarbonFeedSettings:
    named = {"token": "env:CARBON_TEST_SECRET"} if case.name == "electricity_maps" else {}
    if case.name == "watttime":
        named = {"username": "env:CARBON_TEST_SECRET", "password": "env:CARBON_TEST_SECRET"}
    own = {**named, "base_url": url, **more.pop(case.name, {})}
    reached = {"timeout_s": 5.0, "gap_s": 0, **more.pop("web", {})}
    return CarbonFeedSettings.model_validate(
        {**case.settings, "provider": case.name, case.name: own, "web": reached, **more}
    )


def replaced(case: Case, **fields):
    """The documented answer with other values."""
    if case.name == "neso":
        row = case.document["data"][0]
        return {"data": [{**row, "intensity": {**row["intensity"], **fields}}]}
    if case.name == "watttime":
        return {**case.document, "data": [{**case.document["data"][0], **fields}]}
    return {**case.document, **fields}
