"""Reading: the API in chunks and only by GET, pages, exports; and each wrong source in one line with a remedy."""

import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.metric_pages import BEGIN_S, World, joules, long_csv
from tests.support.prometheus_api import Api, reply, serving
from trefoil.assess import prometheus
from trefoil.assess.finding import find
from trefoil.assess.given import read_csv, scrape
from trefoil.assess.prometheus import Prometheus, open_client
from trefoil.assess.series import MetricSeries
from trefoil.core.errors import InvalidInput, SettingError, TrefoilError, Unavailable, Untrusted

SPAN_S = 3600.0


@pytest.fixture(scope="module")
def series():
    return World().series(SPAN_S, 120.0)


def read(api, span_s=SPAN_S, step_s=0.0, path="", **access):
    with serving(api) as url:
        source = Prometheus(url + path, open_client(**access))
        return source.read(BEGIN_S, BEGIN_S + span_s, step_s), source


@pytest.mark.parametrize("suffix", ["", "_total"])
def test_a_prometheus_says_what_its_pages_say(suffix, series):
    """Also where it stores counters under the names of the text format, without OpenMetrics' `_total`."""
    found, source = read(Api([replace(one, name=one.name.removesuffix(suffix)) for one in series]))
    world = World()
    assert find(found).models["resnet50:3"].count("requests").sum() == pytest.approx(
        sum(world.requests(n, SPAN_S) for n in (0, 1)), rel=0.04
    )
    assert joules(find(found)) == pytest.approx(sum(world.joules(n, SPAN_S) for n in (0, 1)), rel=0.04)
    assert source.asked["samples"] == sum(one.times_s.size for one in found)
    assert not [note for note in find(found).notes if "left out" in note], "NaN of a summary is not a sample"


def test_only_get_is_used_and_no_query_asks_for_more_points_than_it_may(series):
    api = Api(series)
    read(api, span_s=40 * 86_400.0, step_s=60.0)
    assert {method for method, *_ in api.asked} == {"GET"}
    ranges = [query for _, path, query, _ in api.asked if path.endswith("query_range")]
    assert len(ranges) > len({one.name for one in series})  # in chunks
    for query in ranges:
        assert (float(query["end"]) - float(query["start"])) / float(query["step"]) <= 2_000


def test_chunks_neither_overlap_nor_leave_out(series):
    whole, _ = read(Api(series), step_s=60.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prometheus, "CHUNK_POINTS", 7)
        chunked, _ = read(Api(series), step_s=60.0)
    for a, b in zip(whole, chunked, strict=True):
        np.testing.assert_array_equal(a.times_s, b.times_s)
        np.testing.assert_array_equal(a.values, b.values)


def test_a_year_is_read_by_the_hour_and_too_much_is_refused_with_the_step_that_is_not(series):
    api = Api(series)
    read(api, span_s=365 * 86_400.0)
    assert {query["step"] for _, path, query, _ in api.asked if path.endswith("query_range")} == {"3600"}
    api.asked.clear()
    with pytest.raises(InvalidInput, match="give --step 70"):
        read(api, span_s=365 * 86_400.0, step_s=15.0)
    assert [path for _, path, *_ in api.asked] == ["/api/v1/series"]


def test_token_headers_and_prefix_are_sent_and_a_wrong_token_is_said_without_it(series):
    api = Api(series, prefix="/mimir/prometheus", token="right")
    read(api, path="/mimir/prometheus/", token="right", headers={"X-Scope-OrgID": "team"})
    assert api.asked[0][3]["X-Scope-OrgID"] == "team"
    with pytest.raises(InvalidInput, match="answered 401") as raised:
        read(api, path="/mimir/prometheus", token="wrong-secret")
    assert "--token-file" in str(raised.value)
    assert "wrong-secret" not in str(raised.value)
    with pytest.raises(InvalidInput, match="path prefix"):
        read(api, token="right")


def test_over_tls_its_authority_has_to_be_known(series):
    keys = Path(__file__).parents[2] / "support"
    with serving(Api(series), keys) as url:
        found = Prometheus(url, open_client(tls_ca=keys / "localhost.crt")).read(BEGIN_S, BEGIN_S + SPAN_S)
        assert find(found).devices
        with pytest.raises(Untrusted, match="--tls-ca"):
            Prometheus(url, open_client()).read(BEGIN_S, BEGIN_S + SPAN_S)


def test_two_clusters_are_refused_until_one_is_named(series, tmp_path):
    two = [
        *series,
        *(MetricSeries(s.name, {**s.labels, "cluster": c}, s.times_s, s.values) for s in series for c in "ab"),
    ]
    with pytest.raises(InvalidInput) as raised:
        read(Api(two))
    assert str(raised.value).startswith("cluster = 'a, b'")
    assert """--selector 'cluster="a"'""" in str(raised.value)
    (tmp_path / "two.csv").write_text(long_csv(two))
    with pytest.raises(InvalidInput, match="series of several clusters"):
        read_csv([tmp_path / "two.csv"])
    api = Api(series)
    with serving(api) as url:
        Prometheus(url, open_client(), 'cluster="a"').read(BEGIN_S, BEGIN_S + SPAN_S)
    assert all('cluster="a"' in (query.get("query") or query["match[]"]) for _, _, query, _ in api.asked)


def test_two_replicas_of_a_prometheus_are_one(series):
    two = [
        MetricSeries(s.name, {**s.labels, "prometheus_replica": r}, s.times_s, s.values) for s in series for r in "ab"
    ]
    assert joules(find(read(Api(two))[0])) == pytest.approx(joules(find(read(Api(series))[0])))


def test_a_partial_answer_is_said(series):
    _, source = read(Api(series, warnings=["store x did not answer"]))  # Thanos
    assert source.warnings == {"store x did not answer"}
    _, source = read(Api(series, partial=True))  # VictoriaMetrics
    assert source.warnings == {"the answer is partial"}


def html(handler):
    reply(handler, 200, "text/html", "<html>log in</html>")


def elsewhere(handler):
    handler.send_response(302)
    handler.send_header("Location", "http://localhost/login")
    handler.end_headers()


def saying(body: str):
    """Answer with this JSON to every request."""
    return lambda handler: reply(handler, 200, "application/json", body)


def ranged(result: str, **more: object):
    """Answer with one series, and with this result to its query."""

    def answer(handler):
        data = '[{"__name__":"nv_energy_consumption"}]' if "/series" in handler.path else f'{{"result":{result}}}'
        keys = "".join(f',"{name}":{value}' for name, value in more.items())
        reply(handler, 200, "application/json", f'{{"status":"success","data":{data}{keys}}}')

    return answer


NO_NAMES, NO_MATRIX = "series without names", "nv_energy_consumption: no matrix of numbers"


@pytest.mark.parametrize(
    ("other", "wanted"),
    [
        (html, "text/html, not with Prometheus' JSON"),
        (elsewhere, "answered 302"),
        (saying("[" * 200_000), "not with Prometheus' JSON"),
        (saying('{"status":"success","data":[1,2]}'), NO_NAMES),
        (saying('{"status":"success","data":null}'), NO_NAMES),
        (saying('{"status":"success","data":[{"job":"a"}]}'), NO_NAMES),
        (saying('{"status":"success","data":[{"__name__":["a"]}]}'), NO_NAMES),
        (saying('{"status":"success","data":[{"__name__":"x","cluster":1},{"__name__":"x","cluster":"a"}]}'), NO_NAMES),
        (ranged('[{"metric":{"a":{}},"values":[[1,"1"]]}]'), NO_MATRIX),
        (ranged('[{"metric":{},"values":[[1,"1"],[2]]}]'), NO_MATRIX),
        (ranged('[{"metric":{},"values":[[1,"many"]]}]'), NO_MATRIX),
        (ranged(f'[{{"metric":{{}},"values":[[1,1{"0" * 400}]]}}]'), NO_MATRIX),
        (ranged('[{"metric":{},"value":[1,"1"]}]'), NO_MATRIX),
        (ranged("5"), NO_MATRIX),
        (ranged("[]"), "no sample within five minutes of any step of 5 s. Remedy: give a smaller --step"),
    ],
)
def test_another_service_is_told_from_a_prometheus(other, wanted):
    with pytest.raises(InvalidInput) as raised:
        read(Api(other=other))
    assert wanted in str(raised.value)
    assert "Remedy" in str(raised.value)


@pytest.mark.parametrize("warnings", ["5", '"no list"', '["store \\u001b[31m down", 7]', '{"a":1}'])
def test_warnings_of_any_shape_are_kept_without_control_characters(warnings):
    values = f'[{{"metric":{{}},"values":[[{BEGIN_S},"1"]]}}]'
    _, source = read(Api(other=ranged(values, warnings=warnings)))
    assert source.warnings
    assert all(one.isprintable() for one in source.warnings)


def test_times_that_were_not_asked_for_are_left_out():
    values = ",".join(f'[{at},"{at}"]' for at in (5, BEGIN_S, BEGIN_S + 60, 9e10))
    found, _ = read(Api(other=ranged(f'[{{"metric":{{}},"values":[{values}]}}]')))
    assert found[0].times_s.tolist() == [BEGIN_S, BEGIN_S + 60]


def test_silence_ends(monkeypatch):
    monkeypatch.setattr(prometheus, "TIMEOUT_S", 0.3)
    done = threading.Event()
    try:
        with pytest.raises(Unavailable, match="no whole answer within"):
            read(Api(other=lambda _: done.wait(20)))
    finally:
        done.set()


def test_drops_of_an_answer_end_too(monkeypatch):
    monkeypatch.setattr(prometheus, "TIMEOUT_S", 0.4)
    done = threading.Event()

    def drip(handler):
        handler.send_response(200)
        handler.end_headers()
        while not done.wait(0.05):
            handler.wfile.write(b" ")
            handler.wfile.flush()

    try:
        with pytest.raises(Unavailable, match="no whole answer within"):
            read(Api(other=drip))
    finally:
        done.set()


@pytest.mark.parametrize(
    "url", ["localhost:9090", "ftp://x", "http://", "http://[x", "http://me:secret@host:9090", "http://x/?key=secret"]
)
def test_what_is_no_url_is_refused_without_its_password(url):
    with pytest.raises(SettingError) as raised:
        Prometheus(url, open_client()).read(0.0, 3600.0)
    assert "secret" not in str(raised.value)


def test_a_token_loses_its_newline_and_words_of_several_lines_are_refused_unsaid(series):
    api = Api(series, token="right")
    read(api, token="right\n")
    for access in ({"token": "sec\nret"}, {"headers": {"X-Scope-OrgID": "sec\r\nret"}}):
        with pytest.raises(SettingError, match="--token-file, --user, --header: not ASCII") as raised:
            open_client(**access)
        assert "sec" not in str(raised.value).replace("--", "")


@pytest.mark.parametrize(("name", "value"), [("all_proxy", "socks5://me:hidden@h:1"), ("NO_PROXY", "10.0.0.0/8,[::1]")])
def test_a_proxy_is_not_asked_for_internal_hosts_and_a_wrong_one_is_named(series, name, value, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv(name, value)
    with serving(Api(series)) as url:
        assert Prometheus(url, open_client(urls=[url])).read(BEGIN_S, BEGIN_S + SPAN_S)
        open_client(urls=["http://prometheus:9090", "http://10.1.2.3:9090", "https://[fd00::1]/x", "http://a.svc:80"])
        with pytest.raises(SettingError, match=f"{name}.*Remedy: ") as caught:
            open_client(urls=[url, "https://prometheus.example.com"])
        assert "hidden" not in str(caught.value)
        monkeypatch.delenv(name)
        client = open_client(urls=[url, "http://prometheus.example.com"])
        assert Prometheus(url, client).read(BEGIN_S, BEGIN_S + SPAN_S)
        with pytest.raises(Unavailable, match="Connection refused"):  # by the proxy, which is not there
            Prometheus("http://prometheus.example.com", client).read(BEGIN_S, BEGIN_S + SPAN_S)


def test_nothing_listens_there():
    with pytest.raises(Unavailable, match="cannot be reached"):
        Prometheus("http://127.0.0.1:9", open_client()).read(0.0, 3600.0)


def test_pages_are_scraped_and_one_that_fails_later_is_a_gap():
    world, asked, said, count = World(servers=1), Counter(), [], [0]

    def page(handler):
        count[0] += 1
        at_s = 10.0 * count[0]
        if count[0] == 3:
            reply(handler, 503, "text/plain", "")
        else:
            reply(handler, 200, "text/plain", world.triton(0, at_s))

    with serving(Api(other=page)) as url:
        found = scrape([f"{url}/metrics"], 0.5, 0.1, open_client(), asked, said.append)
    assert asked["requests"] == 6
    assert len(said) == 1
    assert "503" in said[0]
    assert {one.labels["instance"] for one in found} == {url.removeprefix("http://")}
    assert max(one.times_s.size for one in found) == 5


def test_a_page_that_is_none_is_refused():
    with serving(Api(other=html)) as url, pytest.raises(InvalidInput, match="is not a page of metrics"):
        scrape([url], 0.1, 0.1, open_client(), Counter(), print)


def exports(folder: Path, series) -> tuple[Path, Path]:
    """The same series in both forms of CSV."""
    long, wide = folder / "long.csv", folder / "wide.csv"
    long.write_text(long_csv(series))
    heads = [
        "Time",
        *('"{}{{{}}}"'.format(s.name, ",".join(f'{k}=""{v}""' for k, v in s.labels.items())) for s in series),
    ]
    times = sorted({t for one in series for t in one.times_s})
    known = [dict(zip(one.times_s, one.values.tolist(), strict=True)) for one in series]
    lines = [f"{1e3 * t:.0f}," + ",".join(str(one.get(t, "")) for one in known) for t in times]
    wide.write_text("\n".join([",".join(heads), *lines]))
    return long, wide


def test_exports_in_both_forms_say_what_the_pages_say(series, tmp_path):
    wanted = find(series)
    for path in exports(tmp_path, series):
        found = find(read_csv([path]))
        assert joules(found) == pytest.approx(joules(wanted))
        assert found.models["resnet50:3"].count("requests").sum() == pytest.approx(
            wanted.models["resnet50:3"].count("requests").sum()
        )


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("metric,value\nnv_inference_count,1", "timestamp or time"),
        ("metric,timestamp,value,model\nnv_inference_count,then,1,m", "line 2: no time"),
        ("metric,timestamp,value,model\nnv_inference_count,17e8,3 W,m", "line 2: no number"),
        ("metric,timestamp,value,model\nnv_inference_count,inf,3,m", "line 2: no time"),
        (f"metric,timestamp,value,model\nnv_inference_count,17e8,3,{'m' * 200_000}", "field larger than field limit"),
    ],
)
def test_a_wrong_export_is_refused_by_line_and_column(text, wanted, tmp_path):
    path = tmp_path / "export.csv"
    path.write_text(text)
    with pytest.raises(TrefoilError) as raised:
        read_csv([path])
    assert wanted in str(raised.value)
    assert "Remedy" in str(raised.value)
