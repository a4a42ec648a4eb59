"""A proxy that httpx refuses stops the start with one line, and ends no zone's loop."""

import pytest

from carbon_feed.core.polling import PollLimits
from carbon_feed.core.validation import Cause
from carbon_feed.providers import PolledProvider, ProviderFailure, make_providers
from carbon_feed.settings import CarbonFeedSettings
from tests.unit.carbon_feed.test_poller import NOW_S, Metered, Told
from trefoil.core.errors import SettingError
from trefoil.direct import PROXY_VARIABLES


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in PROXY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def make(proxy, tmp_path):
    neso = {"provider": "neso", "zone": "GB", "factors": "direct", "state_dir": tmp_path}
    return make_providers(CarbonFeedSettings.model_validate({**neso, "web": {"proxy": proxy}}), NOW_S)


@pytest.mark.parametrize(
    ("proxy", "shown"),
    [
        ("socks5://me:hid@den@h:1", "socks5://h:1"),
        ("socks://h:1", "socks://h:1"),
        ("proxy.corp:3128", "proxy.corp:3128"),
        ("me:hidden@proxy.corp:3128", "'proxy.corp:3128"),
        ("http://me:hidden@h:port", "http://h:port"),
    ],
)
def test_a_proxy_that_cannot_be_used_stops_the_start_without_its_password(proxy, shown, tmp_path):
    with pytest.raises(SettingError, match=r"^web.proxy = .*Remedy: ") as caught:
        make(proxy, tmp_path)
    assert shown in str(caught.value)
    assert "hid" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("ALL_PROXY", "socks5://h:1"), ("https_proxy", "socks://h:1"), ("NO_PROXY", "10.0.0.0/8,[::1]")],
)
def test_of_the_environment_the_variable_is_named(name, value, monkeypatch, tmp_path):
    monkeypatch.setenv("http_proxy", "http://me:hidden@h:1")
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingError, match=r"^web.proxy = ") as caught:
        make("environment", tmp_path)
    assert f"{name}={value}" in str(caught.value)
    assert "hidden" not in str(caught.value)
    assert make("", tmp_path)


@pytest.mark.parametrize("error", [ImportError, ValueError, KeyError, OSError])
async def test_an_adapter_that_fails_in_its_own_way_costs_one_answer(error):
    class Broken(Metered):
        async def read(self, now_s):
            raise error("unforeseen")

        forecast = past = lambda self, *_: self.read(0.0)

    polled = PolledProvider(Broken(Told()), PollLimits(300.0))
    for _ in range(2):
        with pytest.raises(ProviderFailure):
            await polled.read(NOW_S)
        await polled.wait_answered()
    assert polled.refusal.cause is Cause.UNAVAILABLE
    assert error.__name__ in polled.refusal.message
    for asked in (polled.forecast(NOW_S + 999.0, 3600.0), polled.past(NOW_S, NOW_S + 1.0)):
        with pytest.raises(ProviderFailure):
            await asked
