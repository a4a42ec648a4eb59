"""Both exact ends (M/D/c, M/M/c), the table that the planner's capacity rests on, then the kernel against theory."""

import dataclasses
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trefoil.core.common import ProfileRow
from trefoil.core.queueing import (
    ServerClass,
    ServiceTime,
    arrivals_s,
    erlang_c,
    rate_max,
    serve_shared,
    serve_weighted,
    service_time,
    utilisation_max,
    within,
    within_all,
)

ROW = ProfileRow(
    device_type="A100-SXM4-40GB",
    slice_type="3g.20gb",
    family="digits",
    variant="digits-m",
    stage=0,
    batch=1,
    clock_mhz=1410,
    cohosted=(),
    latency_ms_p50=20.0,
    latency_ms_p95=20.0,
    latency_ms_p99=20.0,
    throughput_per_s=50.0,
    energy_active_j_per_batch=2.0,
    power_w=100.0,
    memory_mib=100,
)


def kernel_missed(servers, utilisation, cv, slack, gap_scv, requests, seed=7):
    """Share of requests later than `slack` service times, by simulation (service time: 1 s)."""
    rng = np.random.default_rng(seed)
    at = arrivals_s(servers * utilisation, gap_scv, requests, rng)
    served = serve_weighted([ServerClass(servers, ServiceTime(1000.0, cv))], at, rng)
    return 1 - served.attainment(slack * 1000.0)


@pytest.mark.parametrize(
    ("servers", "utilisation"), [(1, 0.26), (2, 0.52), (4, 0.71), (7, 0.82), (14, 0.91), (70, 0.985)]
)
def test_design_table_is_the_95th_percentile_at_service_cv_0_1_and_poisson_arrivals(servers, utilisation):
    # "at L = 2 service times, utilisation .26/.52/.71/.82/.91/.985"; p99, or CV 0, 0.05, 0.2 do not give these numbers.
    assert utilisation_max(ServiceTime(10.0, 0.1), 20.0, 0.95, 1.0, servers) == pytest.approx(utilisation, abs=0.01)


@pytest.mark.parametrize("quantile", [0.9, 0.95, 0.99])
def test_one_deterministic_server_is_the_md1_formula(quantile):
    # P(wait <= 1 service time) = (1 - rho) e^rho, so at L = 2 the limit solves (1 - rho) e^rho = quantile.
    rho = utilisation_max(ServiceTime(1.0, 0.0), 2.0, quantile, 1.0, 1)
    assert (1 - rho) * math.exp(rho) == pytest.approx(quantile, abs=0.002)


@pytest.mark.parametrize("servers", [1, 2, 7, 28])
@pytest.mark.parametrize("slack", [4.0, 6.0])
def test_exponential_service_is_mmc(servers, slack):
    rho = utilisation_max(ServiceTime(1.0, 1.0), slack, 0.95, 1.0, servers)
    # response time of M/M/c: service (rate 1) plus, with probability C, a wait of rate c (1 - rho)
    delayed, drain = erlang_c(servers, rho), servers * (1 - rho)
    if math.isclose(drain, 1.0, abs_tol=1e-6):
        tail = (1 + delayed * slack) * math.exp(-slack)
    else:
        tail = math.exp(-slack) * (1 - delayed / (1 - drain)) + delayed / (1 - drain) * math.exp(-drain * slack)
    assert tail == pytest.approx(0.05, rel=0.12)


def test_erlang_c_of_textbooks():
    assert erlang_c(1, 0.5) == pytest.approx(0.5)
    assert erlang_c(2, 0.5) == pytest.approx(1 / 3)
    assert erlang_c(10, 0.8) == pytest.approx(0.4092, abs=1e-4)


@pytest.mark.parametrize("servers", [1, 2, 4, 7])
@pytest.mark.parametrize("cv", [0.05, 0.3, 0.7])
@pytest.mark.parametrize("slack", [2.0, 3.0])
def test_capacity_agrees_with_the_kernel_under_poisson_arrivals(servers, cv, slack):
    rho = utilisation_max(ServiceTime(1.0, cv), slack, 0.95, 1.0, servers)
    if (cv, slack) == (0.7, 2.0):  # a single service is already too slow for this percentile
        assert rho == 0
        assert kernel_missed(servers, 0.01, cv, slack, 1.0, 20_000) > 0.05
        return
    assert kernel_missed(servers, min(1.0, rho * 1.03), cv, slack, 1.0, 60_000) > 0.04
    assert kernel_missed(servers, rho * 0.97, cv, slack, 1.0, 60_000) < 0.06


@pytest.mark.parametrize("gap_scv", [0.25, 0.5])
def test_regular_arrivals_are_never_overestimated(gap_scv):
    for servers in (1, 4):
        rho = utilisation_max(ServiceTime(1.0, 0.1), 2.0, 0.95, gap_scv, servers)
        assert kernel_missed(servers, rho, 0.1, 2.0, gap_scv, 40_000) < 0.06


@pytest.mark.parametrize("gap_scv", [1.25, 1.5, 2.0])
@pytest.mark.parametrize("servers", [2, 5, 14])
@pytest.mark.parametrize("slack", [1.5, 2.0, 3.0])
def test_bursty_arrivals_are_close_to_the_kernel(gap_scv, servers, slack):
    rho = utilisation_max(ServiceTime(1.0, 0.1), slack, 0.95, gap_scv, servers)
    assert kernel_missed(servers, rho, 0.1, slack, gap_scv, 60_000) < 0.065


@given(
    cv=st.floats(0.0, 1.2),
    slack=st.floats(0.5, 12.0),
    quantile=st.sampled_from([0.9, 0.95, 0.99]),
    gap_scv=st.sampled_from([0.5, 1.0, 2.0]),
    servers=st.integers(1, 30),
)
@settings(max_examples=60, deadline=None)
def test_larger_pools_looser_limits_and_calmer_arrivals_never_hurt(cv, slack, quantile, gap_scv, servers):
    service = ServiceTime(1.0, cv)
    rho = utilisation_max(service, slack, quantile, gap_scv, servers)
    assert 0 <= rho < 1
    assert utilisation_max(service, slack, quantile, gap_scv, servers + 1) >= rho - 0.005
    assert utilisation_max(service, slack * 1.3, quantile, gap_scv, servers) >= rho - 0.005
    assert utilisation_max(service, slack, quantile, gap_scv * 1.5, servers) <= rho + 0.005
    assert utilisation_max(service, slack, quantile - 0.05, gap_scv, servers) >= rho - 0.005


LARGE_POOLS = """
import time, numpy as np
from trefoil.core.queueing import ServiceTime, within_all
began_s = time.process_time() - time.thread_time()
laws = [within_all(ServiceTime(20.0, 0.1), np.linspace(20, 60, 9), 0.9, 1.0, servers) for servers in (60, 100, 200)]
print(np.concatenate(laws).tobytes().hex(), time.process_time() - time.thread_time() - began_s)
"""


def test_a_large_pool_costs_one_thread_and_is_the_same_to_the_last_bit_however_many_cores_a_machine_has():
    def played(cores):
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": str(cores)}
        done = subprocess.run([sys.executable, "-c", LARGE_POOLS], env=environment, capture_output=True, check=True)
        law, others_s = done.stdout.decode().split()
        return law, float(others_s)

    (alone, _), (many, others_s) = played(1), played(8)
    assert many == alone
    assert others_s < 1e-3


def test_nothing_can_be_served_faster_than_its_service_time():
    assert utilisation_max(ServiceTime(10.0, 0.05), 9.0, 0.95, 1.0, 7) == 0.0
    assert utilisation_max(ServiceTime(10.0, 0.0), 10.0, 0.95, 1.0, 0) == 0.0


def test_rate_max_is_the_rate_of_the_whole_pool():
    one, four = rate_max(ROW, 40.0, 0.95, 1.0, 1), rate_max(ROW, 40.0, 0.95, 1.0, 4)
    assert one == pytest.approx(50.0 * 0.287, rel=0.02)  # M/D/1 at L = 2, p95
    assert 4 * 50.0 > four > 4 * one


@given(mean_ms=st.floats(1.0, 500.0), cv=st.floats(0.02, 1.0))
@settings(max_examples=40, deadline=None)
def test_mean_and_cv_come_back_from_the_percentiles_of_a_gamma_law(mean_ms, cv):
    draws = np.random.default_rng(1).gamma(1 / cv**2, cv**2 * mean_ms, 200_000)
    p50, p95, p99 = (float(x) for x in np.quantile(draws, [0.5, 0.95, 0.99]))
    row = dataclasses.replace(ROW, latency_ms_p50=p50, latency_ms_p95=p95, latency_ms_p99=p99)
    fitted = service_time(row)
    assert fitted.mean_ms == pytest.approx(mean_ms, rel=0.03)
    assert fitted.cv == pytest.approx(cv, rel=0.06, abs=0.005)


# ------------------------------------------------------------------------------------------------ the kernel


def test_kernel_reproduces_mm1_and_md1_means():
    rng = np.random.default_rng(11)
    at = arrivals_s(0.5, 1.0, 300_000, rng)
    exponential = serve_weighted([ServerClass(1, ServiceTime(1000.0, 1.0))], at, rng)
    fixed = serve_weighted([ServerClass(1, ServiceTime(1000.0, 0.0))], at, rng)
    assert np.mean(exponential.latency_ms) == pytest.approx(2000.0, rel=0.03)  # 1 / (1 - rho)
    assert np.mean(fixed.latency_ms) == pytest.approx(1500.0, rel=0.02)  # 1 + rho / (2 (1 - rho))


def test_kernel_reproduces_the_erlang_c_delay_probability():
    rng = np.random.default_rng(5)
    at = arrivals_s(3.2, 1.0, 200_000, rng)
    served = serve_shared([ServerClass(4, ServiceTime(1000.0, 1.0))], at, rng)
    expected_ms = 1000.0 * (1 + erlang_c(4, 0.8) / (4 * 0.2))
    assert np.mean(served.latency_ms) == pytest.approx(expected_ms, rel=0.05)


def test_weights_bind_between_classes_at_any_load_but_a_shared_queue_follows_speed():
    fast, slow = ServerClass(1, ServiceTime(10.0, 0.05), 0.5), ServerClass(1, ServiceTime(50.0, 0.05), 0.5)
    shares = {}
    for load_per_s in (5.0, 30.0):
        rng = np.random.default_rng(3)
        at = arrivals_s(load_per_s, 1.0, 40_000, rng)
        assert np.mean(serve_weighted([fast, slow], at, rng).chosen) == pytest.approx(0.5, abs=0.01)
        shares[load_per_s] = float(np.mean(serve_shared([fast, slow], at, rng).chosen))
    assert shares[30.0] < shares[5.0]


def test_same_generator_same_answer():
    def run():
        rng = np.random.default_rng(42)
        classes = [ServerClass(2, ServiceTime(10.0, 0.1), 0.3), ServerClass(3, ServiceTime(20.0, 0.1), 0.7)]
        return serve_weighted(classes, arrivals_s(100.0, 1.2, 5000, rng), rng)

    first, second = run(), run()
    assert np.array_equal(first.latency_ms, second.latency_ms)
    assert np.array_equal(first.chosen, second.chosen)


@given(gap_scv=st.sampled_from([0.0, 0.3, 1.0, 3.0]), rate=st.floats(0.5, 200.0))
@settings(max_examples=15, deadline=None)
def test_arrivals_have_the_rate_and_variation_that_was_asked_for(gap_scv, rate):
    gaps = np.diff(arrivals_s(rate, gap_scv, 60_000, np.random.default_rng(2)))
    assert np.mean(gaps) == pytest.approx(1 / rate, rel=0.05)
    assert np.var(gaps) / np.mean(gaps) ** 2 == pytest.approx(gap_scv, rel=0.12, abs=0.01)


@pytest.mark.parametrize("cv", [0.0, 0.05, 0.4, 1.2])
@pytest.mark.parametrize(("gap_scv", "servers", "utilisation"), [(1.0, 1, 0.5), (1.0, 14, 0.9), (2.5, 4, 0.7)])
def test_a_law_at_once_is_the_law_point_by_point(cv, gap_scv, servers, utilisation):
    service, limits_ms = ServiceTime(20.0, cv), np.linspace(0.0, 120.0, 41)
    each = [within(service, x, utilisation, gap_scv, servers) for x in limits_ms.tolist()]
    assert within_all(service, limits_ms, utilisation, gap_scv, servers) == pytest.approx(each, abs=1e-12)
