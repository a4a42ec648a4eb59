"""Metrics of every service, declared once, in base units."""

from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["counter", "gauge", "histogram"]

ALL: Final = ("carbon_feed", "controller", "dispatcher", "power_agent")
CARBON_FEED: Final = ("carbon_feed",)
CONTROLLER: Final = ("controller",)
DISPATCHER: Final = ("dispatcher",)
POWER_AGENT: Final = ("power_agent",)

# 1 ms to 33 s in steps of sqrt(2): fine enough to read a p95 off a plot; the exact quantiles are in load windows.
LATENCY_BUCKETS_S: Final = tuple(round(0.001 * 2 ** (i / 2), 6) for i in range(31))
SOLVE_BUCKETS_S: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
STEP_BUCKETS_S: Final = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """Metric declaration. Names of counters end in _total, units stand before that."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    services: tuple[str, ...] = ALL
    buckets: tuple[float, ...] = ()


METRICS: Final[tuple[Metric, ...]] = (
    # Every service
    Metric("trefoil_build_info", "gauge", "Always 1; the labels tell what runs.", ("service", "version")),
    Metric("trefoil_rpc_requests_total", "counter", "Admin RPCs, by status code.", ("method", "code")),
    Metric(
        "trefoil_rpc_duration_seconds", "histogram", "Time in an admin RPC.", ("method",), buckets=LATENCY_BUCKETS_S
    ),
    Metric("trefoil_state_errors_total", "counter", "Calls that Redis did not answer in time, or refused."),
    Metric("trefoil_state_unreadable_total", "counter", "Keys found in Redis that could not be read, each once."),
    Metric("trefoil_writes_fenced_total", "counter", "Writes and commands refused for an old epoch.", ("role",)),
    Metric("trefoil_lease_epoch", "gauge", "Epoch under which a role is held; 0 = not held.", ("role",)),
    Metric(
        "trefoil_clock_offset_seconds",
        "gauge",
        "Least time by which the service's clock is ahead of that of Redis; NaN = not known yet.",
    ),
    Metric(
        "trefoil_tls_expiry_timestamp_seconds",
        "gauge",
        "UTC at which the first certificate of the service itself, for another zone, or of an agent's Tritons ends.",
        ("whose",),
    ),
    Metric(
        "trefoil_changed_file_refused",
        "gauge",
        "1 while a changed file of secrets or certificates cannot be used and the one before is in force, by setting.",
        ("field",),
    ),
    Metric(
        "trefoil_plan_refused",
        "gauge",
        "1 while a dispatcher refuses the plan in Redis, or a power agent the plan of its controller.",
        (),
        (*DISPATCHER, *POWER_AGENT),
    ),
    Metric("trefoil_disk_trouble", "gauge", "1 while this file of the service cannot be written.", ("file",)),
    Metric(
        "trefoil_state_files_set_aside_total",
        "counter",
        "State files that could not be understood.",
        ("file",),
        CARBON_FEED + CONTROLLER + POWER_AGENT,
    ),
    # Carbon feed
    Metric(
        "trefoil_carbon_intensity_grams_per_kwh",
        "gauge",
        "Carbon intensity of the grid, the last accepted reading.",
        ("zone", "method", "factors"),
        CARBON_FEED,
    ),
    Metric(
        "trefoil_carbon_reading_age_seconds", "gauge", "Time since the reading was observed.", ("zone",), CARBON_FEED
    ),
    Metric(
        "trefoil_carbon_readings_total",
        "counter",
        "Readings published, by quality and rung.",
        ("zone", "quality", "rung"),
        CARBON_FEED,
    ),
    Metric(
        "trefoil_carbon_provider_errors_total",
        "counter",
        "Polls of a provider without an accepted reading.",
        ("zone", "provider", "cause"),
        CARBON_FEED,
    ),
    Metric("trefoil_carbon_rung", "gauge", "1 for what the reading rests on.", ("zone", "rung"), CARBON_FEED),
    Metric(
        "trefoil_carbon_leading", "gauge", "1 where this process asks and writes for the zone.", ("zone",), CARBON_FEED
    ),
    Metric(
        "trefoil_carbon_rows_left_out_total",
        "counter",
        "Rows without a value in a provider's answers; the other rows are used.",
        ("zone", "provider"),
        CARBON_FEED,
    ),
    Metric(
        "trefoil_carbon_requests_total",
        "counter",
        "Requests sent to a provider: what a quota counts.",
        ("zone", "provider"),
        CARBON_FEED,
    ),
    Metric(
        "trefoil_carbon_quota_left_requests",
        "gauge",
        "What quota_per_day still allows until 00:00 UTC.",
        ("zone", "provider"),
        CARBON_FEED,
    ),
    Metric(
        "trefoil_carbon_breaker",
        "gauge",
        "1 for the state of the breaker: closed, open (nothing is asked), half_open (one probe).",
        ("zone", "provider", "state"),
        CARBON_FEED,
    ),
    Metric("trefoil_carbon_trace_speedup_ratio", "gauge", "Trace seconds per wall second.", ("zone",), CARBON_FEED),
    Metric(
        "trefoil_carbon_history_intervals", "gauge", "Intervals of the past that are known.", ("zone",), CARBON_FEED
    ),
    Metric(
        "trefoil_carbon_ratio", "gauge", "Current over average intensity, by window.", ("zone", "window"), CARBON_FEED
    ),
    Metric(
        "trefoil_carbon_forecasts_issued_total",
        "counter",
        "Forecasts issued, or taken from a provider.",
        ("zone", "model"),
        CARBON_FEED,
    ),
    Metric(
        "trefoil_carbon_forecast_age_seconds", "gauge", "Time since the forecast was issued.", ("zone",), CARBON_FEED
    ),
    Metric(
        "trefoil_carbon_forecast_mae_grams_per_kwh",
        "gauge",
        "Mean error of kept forecasts, either way, by day ahead.",
        ("zone", "model", "day"),
        CARBON_FEED,
    ),
    Metric(
        "trefoil_carbon_forecast_mape_ratio",
        "gauge",
        "The same as a share of what came.",
        ("zone", "model", "day"),
        CARBON_FEED,
    ),
    Metric(
        "trefoil_carbon_forecast_coverage_ratio",
        "gauge",
        "Share of what came that lay inside the 10 to 90 % band; 0.8 is meant.",
        ("zone", "model", "day"),
        CARBON_FEED,
    ),
    # Dispatcher
    Metric("trefoil_requests_total", "counter", "Requests finished, by status.", ("family", "code"), DISPATCHER),
    Metric(
        "trefoil_requests_within_slo_total",
        "counter",
        "Requests answered within the SLO's latency.",
        ("family",),
        DISPATCHER,
    ),
    Metric(
        "trefoil_requests_served_total",
        "counter",
        "Requests executed, by the variant that answered.",
        ("family", "variant"),
        DISPATCHER,
    ),
    Metric("trefoil_items_total", "counter", "Items (rows of the batch dimension) answered.", ("family",), DISPATCHER),
    Metric(
        "trefoil_requests_unanswered_total",
        "counter",
        "Requests that a slice executed without an answer: client gone, deadline passed, or failed there.",
        ("family", "variant"),
        DISPATCHER,
    ),
    Metric(
        "trefoil_tokens_total",
        "counter",
        "Tokens of generative families (answers of any stream), however their requests ended.",
        ("family", "variant"),
        DISPATCHER,
    ),
    Metric(
        "trefoil_prompt_tokens_total",
        "counter",
        "Tokens of the prompts of streams that ended, where the engine counts them.",
        ("family", "variant"),
        DISPATCHER,
    ),
    Metric(
        "trefoil_ttft_seconds",
        "histogram",
        "Arrival to a stream's first token.",
        ("family",),
        DISPATCHER,
        LATENCY_BUCKETS_S,
    ),
    Metric(
        "trefoil_tpot_seconds",
        "histogram",
        "A stream's mean time from one token to the next.",
        ("family", "variant"),
        DISPATCHER,
        LATENCY_BUCKETS_S,
    ),
    Metric(
        "trefoil_token_slo_streams_total",
        "counter",
        "Streams that ended and had an objective of their tokens (ttft, tpot).",
        ("family", "objective"),
        DISPATCHER,
    ),
    Metric(
        "trefoil_token_slo_within_total",
        "counter",
        "Streams of those that met it.",
        ("family", "objective"),
        DISPATCHER,
    ),
    Metric(
        "trefoil_request_duration_seconds",
        "histogram",
        "Arrival to answer.",
        ("family",),
        DISPATCHER,
        LATENCY_BUCKETS_S,
    ),
    Metric(
        "trefoil_queue_duration_seconds",
        "histogram",
        "Arrival to dispatch.",
        ("family",),
        DISPATCHER,
        LATENCY_BUCKETS_S,
    ),
    Metric(
        "trefoil_service_duration_seconds",
        "histogram",
        "Dispatch to the slice's answer.",
        ("family", "variant"),
        DISPATCHER,
        LATENCY_BUCKETS_S,
    ),
    Metric("trefoil_queue_requests", "gauge", "Requests waiting for a credit.", ("family",), DISPATCHER),
    Metric("trefoil_queue_bytes", "gauge", "Payload bytes waiting for a credit.", ("family",), DISPATCHER),
    Metric("trefoil_in_flight_requests", "gauge", "Requests on a slice.", ("slice",), DISPATCHER),
    Metric("trefoil_open_sequences", "gauge", "Sequences that live on a slice.", ("slice",), DISPATCHER),
    Metric("trefoil_open_streams", "gauge", "Streams that clients hold open.", (), DISPATCHER),
    Metric("trefoil_workers", "gauge", "Workers of all dispatchers that share credits.", (), DISPATCHER),
    Metric(
        "trefoil_requests_forwarded_total", "counter", "Requests that another worker answered.", ("family",), DISPATCHER
    ),
    Metric(
        "trefoil_zone_requests_total",
        "counter",
        "Requests that went to another zone: answered there; returned (refused or not taken there) or repeated "
        "(perhaps executed there), then served here; or left by their client.",
        ("family", "zone", "outcome"),
        DISPATCHER,
    ),
    Metric("trefoil_credits", "gauge", "Requests that this worker may have on a slice.", ("slice",), DISPATCHER),
    Metric("trefoil_slice_ejected", "gauge", "1 while a slice is out, whole or for one model.", ("slice",), DISPATCHER),
    Metric("trefoil_ejections_total", "counter", "Slices taken out after failures.", ("slice", "cause"), DISPATCHER),
    Metric(
        "trefoil_outliers_kept_total",
        "counter",
        "Outliers that stayed since half of a family was out as outliers already.",
        ("slice", "cause"),
        DISPATCHER,
    ),
    Metric(
        "trefoil_retries_total",
        "counter",
        "Requests that no slice took, offered to another one (retried) or not any more (refused).",
        ("family", "outcome"),
        DISPATCHER,
    ),
    Metric(
        "trefoil_dispatcher_rung",
        "gauge",
        "1 while something is away and the dispatcher serves on a named rung (redis, disk, controller, agent, feed, "
        "lengths).",
        ("cause",),
        DISPATCHER,
    ),
    Metric(
        "trefoil_length_predictions_total",
        "counter",
        "Requests of queues by length: predicted, taken from the cache (cached), or first come, first served as the "
        "predictor was late, absent or gave no number (invalid).",
        ("outcome",),
        DISPATCHER,
    ),
    Metric(
        "trefoil_refused_requests_total",
        "counter",
        "Callers turned away: without token, role, or over their tenant's limit.",
        ("tenant", "code"),
        DISPATCHER,
    ),
    Metric(
        "trefoil_budget_refusals_total",
        "counter",
        "Requests refused because a budget is spent, by the tenant and family that asked.",
        ("tenant", "family"),
        DISPATCHER,
    ),
    Metric(
        "trefoil_jobs",
        "gauge",
        "Jobs of the folder that the worker owns: running, waiting for a reason, or ended and kept.",
        ("state",),
        DISPATCHER,
    ),
    Metric("trefoil_job_items_total", "counter", "Items of jobs: answered, failed.", ("family", "outcome"), DISPATCHER),
    Metric("trefoil_table_revision_epoch", "gauge", "Epoch of the plan routed by.", (), DISPATCHER),
    Metric("trefoil_table_revision_number", "gauge", "Number of the plan routed by.", (), DISPATCHER),
    # Controller
    Metric(
        "trefoil_jobs_planned",
        "gauge",
        "Jobs that are planned: in_time, or in_danger of missing their deadline.",
        ("state",),
        CONTROLLER,
    ),
    Metric(
        "trefoil_jobs_planned_grams",
        "gauge",
        "Grams of the items that are planned: planned, and if they ran at_once or evenly.",
        ("rule",),
        CONTROLLER,
    ),
    Metric("trefoil_plan_revision_epoch", "gauge", "Epoch of the plan in force.", (), CONTROLLER),
    Metric("trefoil_plan_revision_number", "gauge", "Number of the plan in force.", (), CONTROLLER),
    Metric(
        "trefoil_decisions_total",
        "counter",
        "Planner calls, by trigger and outcome (new_plan, unchanged, degraded, failed, candidate).",
        ("trigger", "outcome"),
        CONTROLLER,
    ),
    Metric("trefoil_replans_total", "counter", "Plans put in force, by cause.", ("cause",), CONTROLLER),
    Metric(
        "trefoil_reconfigurations_total",
        "counter",
        "Plans that changed slices, variants or sleeping devices, by cause.",
        ("cause",),
        CONTROLLER,
    ),
    Metric(
        "trefoil_solve_duration_seconds", "histogram", "Time in the planner.", ("planner",), CONTROLLER, SOLVE_BUCKETS_S
    ),
    Metric("trefoil_optimality_gap_ratio", "gauge", "Proven gap of the plan, of its model.", (), CONTROLLER),
    Metric("trefoil_plan_degraded", "gauge", "1 while the plan stands on a named rung.", ("rung",), CONTROLLER),
    Metric("trefoil_rollout_state", "gauge", "1 for the state that the rollout is in.", ("state",), CONTROLLER),
    Metric(
        "trefoil_rollout_duration_seconds", "histogram", "Start to done of a rollout.", (), CONTROLLER, STEP_BUCKETS_S
    ),
    Metric("trefoil_act_mode", "gauge", "1 for the mode of operation.", ("mode",), CONTROLLER),
    Metric("trefoil_node_stale", "gauge", "1 while a node's status is older than its limit.", ("node",), CONTROLLER),
    Metric(
        "trefoil_set_aside_total",
        "counter",
        "Values read from Redis and not used: they contradict their writer, or what is possible.",
        ("kind",),
        (*CONTROLLER, *POWER_AGENT),
    ),
    Metric(
        "trefoil_carbon_refused",
        "gauge",
        "1 for the rung in force that carbon.rungs_refused keeps from being planned by.",
        ("rung",),
        CONTROLLER,
    ),
    Metric("trefoil_carbon_forecast", "gauge", "1 for what becomes of the feed's forecast.", ("state",), CONTROLLER),
    Metric("trefoil_slo_latency_seconds", "gauge", "Latency that the objective asks for.", ("family",), CONTROLLER),
    Metric(
        "trefoil_slo_quantile_ratio",
        "gauge",
        "Share of requests that the objective wants answered within it.",
        ("family",),
        CONTROLLER,
    ),
    Metric("trefoil_accuracy_floor_ratio", "gauge", "Accuracy that the objective asks for.", ("family",), CONTROLLER),
    Metric("trefoil_demand_requests_per_second", "gauge", "Demand planned for.", ("family", "quantile"), CONTROLLER),
    Metric("trefoil_capacity_requests_per_second", "gauge", "Capacity of the plan.", ("family",), CONTROLLER),
    Metric("trefoil_latency_seconds", "gauge", "Measured latency.", ("family", "quantile"), CONTROLLER),
    Metric("trefoil_slo_attainment_ratio", "gauge", "Answered within the SLO over arrived.", ("family",), CONTROLLER),
    Metric(
        "trefoil_token_slo_seconds",
        "gauge",
        "Time to the first token (ttft), or from one to the next (tpot), that the objective asks for.",
        ("family", "objective"),
        CONTROLLER,
    ),
    Metric(
        "trefoil_token_slo_quantile_ratio",
        "gauge",
        "Share of streams that the objective wants within it.",
        ("family", "objective"),
        CONTROLLER,
    ),
    Metric(
        "trefoil_token_slo_attainment_ratio",
        "gauge",
        "Streams within it over those that ended.",
        ("family", "objective"),
        CONTROLLER,
    ),
    Metric(
        "trefoil_accuracy_ratio", "gauge", "Request-weighted mean accuracy of the variants.", ("family",), CONTROLLER
    ),
    Metric(
        "trefoil_emissions_grams_total", "counter", "All grams: active, idle, sleep and moves.", ("zone",), CONTROLLER
    ),
    Metric(
        "trefoil_base_emissions_grams_total",
        "counter",
        "Grams that BASE would have emitted for the same answers in the same time, by profile and device type.",
        ("zone",),
        CONTROLLER,
    ),
    Metric("trefoil_grams_per_request", "gauge", "Grams over answered requests.", ("family",), CONTROLLER),
    Metric(
        "trefoil_active_joules_total",
        "counter",
        "Metered active energy of slices whose answers were reported for the same time.",
        ("family",),
        CONTROLLER,
    ),
    Metric("trefoil_receipt_joules_total", "counter", "What the receipts of that time say.", ("family",), CONTROLLER),
    Metric(
        "trefoil_unanswered_joules_total",
        "counter",
        "What the receipts say of requests that were executed without an answer, in the sum of all receipts too.",
        ("family",),
        CONTROLLER,
    ),
    Metric(
        "trefoil_budget_rung",
        "gauge",
        "Rung of a budget: 0 within, 1 jobs wait, 2 lower accuracy, 3 refused. Empty tenant or family: all.",
        ("tenant", "family"),
        CONTROLLER,
    ),
    Metric(
        "trefoil_budget_used_ratio",
        "gauge",
        "Part of a budget that is spent since its day began; of several limits the largest.",
        ("tenant", "family"),
        CONTROLLER,
    ),
    Metric(
        "trefoil_receipt_residual_ratio",
        "gauge",
        "Receipts over metered active energy, less 1, of the last ten minutes; absent where nothing is metered.",
        ("family",),
        CONTROLLER,
    ),
    Metric("trefoil_exploring", "gauge", "1 while candidates are measured on the running system.", (), CONTROLLER),
    Metric(
        "trefoil_explorations_total",
        "counter",
        "Explorations that ended, by how (decided, interrupted).",
        ("outcome",),
        CONTROLLER,
    ),
    Metric(
        "trefoil_evaluations_total",
        "counter",
        "Candidates of explorations, by outcome (measured, refused, halted, broken_off, interrupted).",
        ("outcome",),
        CONTROLLER,
    ),
    Metric("trefoil_exploration_seconds_total", "counter", "Time spent exploring.", (), CONTROLLER),
    Metric("trefoil_exploration_joules_total", "counter", "Energy drawn while exploring.", (), CONTROLLER),
    Metric(
        "trefoil_exploration_violations_total",
        "counter",
        "Requests that missed the SLO while exploring, rejected and failed ones included.",
        (),
        CONTROLLER,
    ),
    Metric("trefoil_energy_unknown_seconds_total", "counter", "Gaps in the energy stream.", ("node",), CONTROLLER),
    # Power agent
    Metric("trefoil_device_power_watts", "gauge", "Power of a device.", ("device",), POWER_AGENT),
    Metric(
        "trefoil_device_energy_joules_total",
        "counter",
        "Energy of a device by share (active, idle, unallocated); they add up to the counter.",
        ("device", "share"),
        POWER_AGENT,
    ),
    Metric(
        "trefoil_slice_energy_joules_total",
        "counter",
        "Active energy attributed to a slice and variant.",
        ("slice", "family", "variant"),
        POWER_AGENT,
    ),
    Metric("trefoil_energy_uncertainty_ratio", "gauge", "Stated error of attribution.", ("device",), POWER_AGENT),
    Metric("trefoil_device_baseline_watts", "gauge", "Idle power that is booked as idle.", ("device",), POWER_AGENT),
    Metric(
        "trefoil_energy_samples_total",
        "counter",
        "Energy samples, by how joules were read and how they were split between slices.",
        ("device", "method", "attribution"),
        POWER_AGENT,
    ),
    Metric(
        "trefoil_energy_counter_resets_total", "counter", "Energy counters that restarted.", ("device",), POWER_AGENT
    ),
    Metric("trefoil_device_clock_hertz", "gauge", "SM clock.", ("device",), POWER_AGENT),
    Metric("trefoil_device_temperature_celsius", "gauge", "GPU temperature.", ("device",), POWER_AGENT),
    Metric("trefoil_device_state", "gauge", "1 for the state that a device is in.", ("device", "state"), POWER_AGENT),
    Metric("trefoil_slice_state", "gauge", "1 for the state that a slice is in.", ("slice", "state"), POWER_AGENT),
    Metric(
        "trefoil_unproven",
        "gauge",
        "Tritons and GPU instances on the node that are not proven to be its agent's; it leaves them as they are.",
        ("kind",),
        POWER_AGENT,
    ),
    Metric(
        "trefoil_device_drift",
        "gauge",
        "Differences between hardware and plan: foreign instances, clocks or power limits that others changed or that "
        "do not hold.",
        ("device", "kind"),
        POWER_AGENT,
    ),
    Metric("trefoil_device_xids_total", "counter", "Errors that a GPU reported.", ("device", "xid"), POWER_AGENT),
    Metric("trefoil_steps_total", "counter", "Reconfiguration steps.", ("verb", "outcome"), POWER_AGENT),
    Metric("trefoil_step_duration_seconds", "histogram", "Time in a step.", ("verb",), POWER_AGENT, STEP_BUCKETS_S),
    Metric("trefoil_slice_restarts_total", "counter", "Tritons or stubs healed.", ("slice", "cause"), POWER_AGENT),
    Metric(
        "trefoil_triton_up",
        "gauge",
        "1 where the slice's Triton served its metrics.",
        ("slice",),
        POWER_AGENT,
    ),
)

OF_MODELS: Final = ("slice", "family", "variant", "model", "version")
TRITON_METRICS: Final[tuple[Metric, ...]] = (
    Metric("nv_inference_request_success", "counter", "Requests that it answered.", OF_MODELS, POWER_AGENT),
    Metric("nv_inference_request_failure", "counter", "Requests that failed in it, by reason.", OF_MODELS, POWER_AGENT),
    Metric("nv_inference_count", "counter", "Items (rows of the batch dimension).", OF_MODELS, POWER_AGENT),
    Metric("nv_inference_exec_count", "counter", "Batches that it executed.", OF_MODELS, POWER_AGENT),
    Metric("nv_inference_request_duration_us", "counter", "Time of requests in it [us].", OF_MODELS, POWER_AGENT),
    Metric("nv_inference_queue_duration_us", "counter", "... waiting for an instance [us].", OF_MODELS, POWER_AGENT),
    Metric("nv_inference_compute_infer_duration_us", "counter", "... in the model [us].", OF_MODELS, POWER_AGENT),
    Metric("nv_inference_pending_request_count", "gauge", "Requests that wait in it.", OF_MODELS, POWER_AGENT),
)
"""Metrics of Triton itself that dashboards rest on; the agent passes on all others that begin with nv_ as well."""
