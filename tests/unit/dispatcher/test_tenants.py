"""Tenants and their limits: who is who, and never more than rate and burst allow, however requests come."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.fronts import access_control
from dispatcher.fronts.access_control import AccessControl, Limits
from dispatcher.request.admission import StatusError
from dispatcher.request.core.tenants import (
    ADMIN,
    DEBT_MAX_S,
    EVERYBODY,
    INFER,
    Tenant,
    Tenants,
    admit,
    digest,
)
from dispatcher.settings import DispatcherSettings
from trefoil.core.errors import SettingError
from trefoil.runtime.clock import ManualClock
from trefoil.runtime.rpc import check_listener
from trefoil.runtime.telemetry import Metrics

GAPS = st.lists(st.floats(0, 3), min_size=1, max_size=30)


@given(GAPS, st.floats(0.1, 50), st.integers(1, 20))
def test_no_stretch_of_time_admits_more_than_its_rate_and_the_burst(gaps, rate, burst):
    tenant, paid, admitted = Tenant("a", rate_per_s=rate, burst=burst), [0.0, 0.0], []
    for now_s in itertools.accumulate(gaps):
        if admit(tenant, paid, 1, now_s) is None:
            admitted.append(now_s)
    for first, last in itertools.combinations_with_replacement(range(len(admitted)), 2):
        assert last - first + 1 <= burst + rate * (admitted[last] - admitted[first]) + 1e-3


@given(GAPS, st.floats(0.1, 50), st.integers(1, 20))
def test_whoever_waits_as_told_is_admitted_and_not_before(gaps, rate, burst):
    tenant, paid = Tenant("a", rate_per_s=rate, burst=burst), [0.0, 0.0]
    for now_s in itertools.accumulate(gaps):
        excess = admit(tenant, paid, 1, now_s)
        if excess is not None:
            assert (excess.limit, excess.unit) == (rate, "requests")
            assert admit(tenant, list(paid), 1, now_s + excess.wait_s * 0.99 - 1e-5) is not None
            assert admit(tenant, list(paid), 1, now_s + excess.wait_s + 1e-6) is None


def test_a_steady_stream_at_the_rate_is_never_refused():
    tenant, paid = Tenant("a", rate_per_s=10, burst=1), [0.0, 0.0]
    assert all(admit(tenant, paid, 1, 5 + i / 10 + 1e-9) is None for i in range(1000))


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=60), st.floats(0, 0.5))
def test_bytes_are_paid_for_after_a_request_that_was_larger_than_the_burst(sizes, gap_s):
    tenant, paid, now_s, taken = Tenant("a", bytes_per_s=1000, burst_bytes=500), [0.0, 0.0], 100.0, 0
    for size in sizes:
        if admit(tenant, paid, size, now_s) is None:
            taken += size
            largest = max(sizes)
            assert taken <= 500 + largest + 1000 * (now_s - 100.0) + 1e-6
        now_s += gap_s


def test_a_refused_request_costs_nothing_of_either_limit():
    tenant, paid = Tenant("a", rate_per_s=100, burst=100, bytes_per_s=10, burst_bytes=10), [0.0, 0.0]
    assert admit(tenant, paid, 100, 50.0) is None
    before = list(paid)
    excess = admit(tenant, paid, 1, 50.0)
    assert (excess.unit, paid) == ("bytes", before)


def test_one_huge_request_keeps_its_tenant_waiting_for_a_bounded_time():
    tenant, paid = Tenant("a", bytes_per_s=1, burst_bytes=1), [0.0, 0.0]
    assert admit(tenant, paid, 10**9, 0.0) is None
    assert admit(tenant, paid, 1, 0.0).wait_s <= DEBT_MAX_S


def test_times_of_before_the_machine_started_again_do_not_lock_a_tenant_out():
    tenant, paid = Tenant("a", rate_per_s=5, burst=5), [1e6, 1e6]
    assert admit(tenant, paid, 1, 12.0) is None


def test_two_workers_share_one_limit(tmp_path):
    tenant = Tenant("a", rate_per_s=1, burst=10)
    workers = [Limits(tmp_path / "limits").state_of("a") for _ in range(2)]
    admitted = [admit(tenant, workers[i % 2], 1, 1000.0) is None for i in range(40)]
    assert sum(admitted) == 10
    assert (tmp_path / "limits" / "a").stat().st_mode & 0o777 == 0o600


def test_a_folder_that_cannot_be_had_leaves_a_worker_counting_alone(tmp_path):
    (tmp_path / "limits").write_text("a file")
    cells = Limits(tmp_path / "limits").state_of("a")
    assert admit(Tenant("a", rate_per_s=1), cells, 1, 5.0) is None
    assert admit(Tenant("a", rate_per_s=1), cells, 1, 5.0) is not None


@pytest.mark.parametrize("given_", ["Bearer secret", "bearer secret", b"Bearer secret", "Bearer  secret "])
def test_a_token_is_known_by_its_digest(given_):
    tenant = Tenant("a")
    assert Tenants({digest("secret"): tenant}).authenticate(given_) is tenant


@pytest.mark.parametrize(
    "given_", ["", "Bearer", "Bearer ", "secret", "Basic secret", "Bearer Secret", "Bearer secret2"]
)
def test_anything_else_is_not(given_):
    assert Tenants({digest("secret"): Tenant("a")}).authenticate(given_) is None


# Access control

FILE = """
[[tenant]]
name = "alpha"
token_sha256 = "{sha}"
rate_per_s = 2

[[tenant]]
name = "ops"
token_env = "OPS_TOKEN"
roles = ["infer", "admin"]

[[tenant]]
name = "filed"
token_file = "{file}"
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("OPS_TOKEN", "ops-secret")
    (tmp_path / "token").write_text("filed-secret\n")
    (tmp_path / "token").chmod(0o600)
    text = FILE.format(sha=digest("alpha-secret"), file=tmp_path / "token")
    (tmp_path / "tenants.toml").write_text(text)
    return tmp_path


def gate(folder, clock=None, metrics=None, **more):
    settings = DispatcherSettings(state_dir=folder / "state", tenants_file=folder / "tenants.toml", **more)
    return AccessControl(settings, clock or ManualClock(), metrics)


def test_each_way_to_say_a_token_names_its_tenant(place):
    made = gate(place, token="cluster")
    assert not made.open
    names = {made.authenticate(f"Bearer {token}").name for token in ("alpha-secret", "ops-secret", "filed-secret")}
    assert names == {"alpha", "ops", "filed"}
    assert made.authenticate("Bearer cluster") is EVERYBODY
    assert made.authenticate("Bearer alpha-secret").roles == {INFER}
    assert made.authenticate("Bearer ops-secret").roles == {INFER, ADMIN}


def test_without_file_and_token_everybody_may_do_everything(tmp_path):
    made = AccessControl(DispatcherSettings(state_dir=tmp_path), ManualClock())
    assert made.open
    assert made.authenticate("") is EVERYBODY
    made.admit(EVERYBODY, 10**9)
    assert made.scope(()) == "open"


def test_an_open_front_asks_for_no_token_though_the_admin_port_does(tmp_path):
    settings = DispatcherSettings(state_dir=tmp_path, token="cluster", front_open=True)
    assert AccessControl(settings, ManualClock()).open
    with pytest.raises(SettingError, match="needs TLS and a token"):
        check_listener(settings.front(), "0.0.0.0:8001")
    with pytest.raises(
        SettingError, match=r"front_open = True: tenants_file already names the callers\. Remedy: drop one"
    ):
        DispatcherSettings(state_dir=tmp_path, tenants_file=tmp_path / "tenants.toml", front_open=True)


def test_refusals_say_whom_what_and_what_to_do_and_are_counted(place):
    metrics = Metrics("dispatcher")
    clock = ManualClock()
    made = gate(place, clock, metrics)
    with pytest.raises(StatusError, match=r"no valid token\. Remedy") as refused:
        made.authenticate("Bearer wrong")
    assert refused.value.code.name == "UNAUTHENTICATED"
    alpha = made.authenticate("Bearer alpha-secret")
    with pytest.raises(StatusError, match="tenant alpha has no role 'admin'") as refused:
        made.require_role(alpha, ADMIN)
    assert refused.value.code.name == "PERMISSION_DENIED"
    made.admit(alpha, 1)
    made.admit(alpha, 1)
    with pytest.raises(
        StatusError, match=r"tenant alpha may send 2 requests per second.*try again in 0\.500 s"
    ) as refused:
        made.admit(alpha, 1)
    assert refused.value.code.name == "RESOURCE_EXHAUSTED"
    assert dict(refused.value.trailers) == {"grpc-retry-pushback-ms": "501"}
    clock.move(0.501)
    made.admit(alpha, 1)
    made.refresh()
    shown = [line for line in metrics.text().splitlines() if line.startswith("trefoil_refused_requests_total{")]
    assert len(shown) == 3
    assert any('"RESOURCE_EXHAUSTED"' in line and '"alpha"' in line and line.endswith(" 1.0") for line in shown)


def test_scopes_of_the_admin_port(place):
    made = gate(place)
    scopes = [made.scope((("authorization", f"Bearer {t}"),)) for t in ("ops-secret", "alpha-secret", "wrong")]
    assert scopes == ["control", "denied", ""]
    assert made.scope(()) == ""


def test_a_changed_file_is_in_force_and_a_broken_one_is_not(place):
    made = gate(place)
    (place / "token").write_text("another-secret")
    made.refresh()
    assert made.authenticate("Bearer another-secret").name == "filed"
    with pytest.raises(StatusError):
        made.authenticate("Bearer filed-secret")
    whole = (place / "tenants.toml").read_text()
    (place / "tenants.toml").write_text(whole.replace("rate_per_s", "rate_per_sec"))
    made.refresh()
    assert made.authenticate("Bearer another-secret").name == "filed", "the last good one stays in force"
    (place / "tenants.toml").write_text(whole.replace('"alpha"', '"beta"'))
    made.refresh()
    assert made.authenticate("Bearer alpha-secret").name == "beta"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("rate_per_s = 2", "rate_per_s = -1", ("rate_per_s", "-1")),
        ("rate_per_s", "rate", ("rate", "unknown setting")),
        ('name = "alpha"', 'name = "../alpha"', ("name", "../alpha")),
        ('name = "alpha"', 'name = "ops"', ("second tenant", "ops")),
        ('roles = ["infer", "admin"]', 'roles = ["root"]', ("roles", "root")),
        ("token_env", 'token_file = "x"\ntoken_env', ("needs one of",)),
        ("OPS_TOKEN", "NO_SUCH_VARIABLE", ("token_env", "NO_SUCH_VARIABLE", "holds no token")),
        ("/token", "/nothing", ("token_file", "cannot be read")),
        ("[[tenant]]", "[[tenants]]", ("tenant",)),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_at_the_start(place, old, new, words):
    path = place / "tenants.toml"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(SettingError) as refused:
        gate(place)
    assert all(word in str(refused.value) for word in (*words, "Remedy"))
    assert "secret" not in str(refused.value)


def test_more_tenants_than_are_counted_apart_are_refused(place, monkeypatch):
    monkeypatch.setattr(access_control, "TENANTS_MAX", 2)
    with pytest.raises(SettingError, match="have at most 2 of them"):
        gate(place)


def test_a_flow_is_the_tenant_or_the_host_and_then_the_connection(tmp_path):
    made = AccessControl(DispatcherSettings(state_dir=tmp_path), ManualClock())
    header = lambda: [("x-forwarded-for", "10.9.9.9")]  # noqa: E731
    vision = Tenant("vision")
    assert made.flow(vision, "ipv4:10.0.0.1:5000", header) == ("vision", "ipv4:10.0.0.1:5000")
    assert made.flow(EVERYBODY, "ipv4:10.0.0.1:5000", header) == ("ipv4:10.0.0.1", "ipv4:10.0.0.1:5000")
    assert made.flow(EVERYBODY, "ipv6:[::1]:5000", header) == ("ipv6:[::1]", "ipv6:[::1]:5000")
    assert made.flow(EVERYBODY, "unix:", header)[0] == "unix"
    assert made.flow(EVERYBODY, "ipv6:[fe80::1%eth0]:5000", header)[0] == "ipv6:fe80::/64"
    hosts = {
        made.flow(EVERYBODY, f"ipv6:{address}:5000", header)[0] for address in ("[2001:db8::1]", "%5B2001:db8::2%5D")
    }
    assert hosts == {"ipv6:2001:db8::/64"}, "a host of IPv6 gives itself as many addresses as it likes"


@pytest.mark.parametrize(
    ("peer", "header", "flow"),
    [
        ("ipv4:10.0.0.1:5000", "10.9.9.9", ("10.9.9.9", "10.9.9.9")),
        ("ipv6:[fd00::1]:5000", "1.1.1.1, 10.9.9.9 ", ("10.9.9.9", "10.9.9.9")),
        ("ipv6:%5Bfd00::1%5D:5000", "10.9.9.9", ("10.9.9.9", "10.9.9.9")),
        ("ipv6:[::ffff:10.0.0.1]:5000", "10.9.9.9", ("10.9.9.9", "10.9.9.9")),  # of a listener of both
        ("ipv4:10.0.0.1:5000", "2001:db8::1", ("ipv6:2001:db8::/64", "2001:db8::1")),
        ("ipv4:10.0.0.1:5000", "", ("ipv4:10.0.0.1", "ipv4:10.0.0.1:5000")),
        ("ipv4:10.1.0.1:5000", "10.9.9.9", ("ipv4:10.1.0.1", "ipv4:10.1.0.1:5000")),
        ("unix:", "10.9.9.9", ("unix", "unix:")),
    ],
)
def test_only_a_trusted_proxy_names_the_client_that_it_speaks_for(tmp_path, peer, header, flow):
    settings = DispatcherSettings(state_dir=tmp_path, trusted_proxies=("10.0.0.0/24", "fd00::1"))
    made = AccessControl(settings, ManualClock())
    metadata = [("x-forwarded-for", header)] if header else []
    assert made.flow(EVERYBODY, peer, lambda: metadata) == flow
    assert made.flow(Tenant("vision"), peer, lambda: metadata)[0] == "vision"


def test_a_proxy_that_is_no_address_is_refused(tmp_path):
    with pytest.raises(SettingError, match=r"trusted_proxies = .*'my-proxy' does not appear to be an IPv4"):
        DispatcherSettings(state_dir=tmp_path, trusted_proxies=("my-proxy",))


def test_the_weight_of_a_tenant_is_read_and_bounded(place):
    tenants = place / "tenants.toml"
    tenants.write_text(tenants.read_text().replace("[[tenant]]", "[[tenant]]\nweight = 3", 1))
    made = gate(place)
    assert made.authenticate("Bearer alpha-secret").weight == 3.0
    assert made.authenticate("Bearer ops-secret").weight == 1.0
    tenants.write_text(tenants.read_text().replace("weight = 3", "weight = 0"))
    with pytest.raises(SettingError, match="weight"):
        gate(place)
