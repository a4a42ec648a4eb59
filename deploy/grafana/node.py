"""Dashboard of one node, with the services and the Redis beside it."""

from typing import Final

from panels import Dashboard, counted, line, lines, rate, table, variable

NO_EXPORTER: Final = "no exporter of Redis' metrics is scraped"
ON_NODE: Final = 'device=~"$node/.+"'
SLICES: Final = 'slice=~"$node-(gpu[0-9]+|cpu)-.+"'


def short(expression: str) -> str:
    """The same, with slices named without their node."""
    return f'label_replace({expression}, "slice", "$1", "slice", "$node-(.+)")'


NODE: Final = Dashboard(
    "node",
    "node",
    "One node: its devices, its slices and their Tritons, and its agent.",
    [
        [
            line(
                "Power",
                f"sum by (device) (trefoil_device_power_watts{{{ON_NODE}}})",
                "{{device}}",
                "watt",
                stacked=True,
            ),
            line(
                "SM clock",
                f"max by (device) (trefoil_device_clock_hertz{{{ON_NODE}}})",
                "{{device}}",
                "hertz",
                steps=True,
            ),
            line(
                "Temperature",
                f"max by (device) (trefoil_device_temperature_celsius{{{ON_NODE}}})",
                "{{device}}",
                "celsius",
            ),
        ],
        [
            table("Slices", short(f"max by (slice, state, simulated) (trefoil_slice_state{{{SLICES}}}) == 1")),
            line(
                "Active power by slice",
                short(rate("trefoil_slice_energy_joules_total", "slice", SLICES)),
                "{{slice}}",
                "watt",
                stacked=True,
            ),
            line(
                "Requests on slices",
                short(f"sum by (slice) (trefoil_in_flight_requests{{{SLICES}}})"),
                "{{slice}}",
                stacked=True,
            ),
        ],
        [
            line(
                "Triton: requests answered",
                short(rate("nv_inference_request_success", "slice, variant", SLICES)),
                "{{slice}} {{variant}}",
                "reqps",
            ),
            line(
                "Triton: time in the model, per batch",
                short(
                    f"{rate('nv_inference_compute_infer_duration_us', 'slice, variant', SLICES)} / 1e6 / "
                    f"({rate('nv_inference_exec_count', 'slice, variant', SLICES)} > 0)"
                ),
                "{{slice}} {{variant}}",
                "s",
            ),
            line(
                "Triton: requests that wait in it",
                short(f"sum by (slice) (nv_inference_pending_request_count{{{SLICES}}})"),
                "{{slice}}",
                soft_most=1,
            ),
        ],
        [
            lines(
                "Tritons that tell their metrics",
                [(f"sum(trefoil_triton_up{{{SLICES}}})", "tell"), (f"count(trefoil_triton_up{{{SLICES}}})", "slices")],
                dashed=["slices"],
                decimals=0,
                steps=True,
            ),
            counted(
                "Differences from the plan",
                f"max by (device, kind) (trefoil_device_drift{{{ON_NODE}}})",
                "{{device}} {{kind}}",
            ),
            line(
                "Steps",
                f"60 * {rate('trefoil_steps_total', 'verb, outcome')}",
                "{{verb}} {{outcome}}",
                "suffix:/min",
                says="Of all nodes.",
            ),
        ],
        [
            counted(
                "Refused plans",
                "max by (job, instance) (trefoil_plan_refused)",
                "{{job}} {{instance}}",
                "1 while a dispatcher or an agent refuses a plan; `trefoil status` says why.",
            ),
            counted(
                "Not proven to be the agent's",
                "sum by (instance, kind) (trefoil_unproven)",
                "{{instance}} {{kind}}",
                "Tritons and GPU instances; `trefoil node show` names them.",
            ),
            lines(
                "Values set aside",
                [
                    ("sum by (kind) (increase(trefoil_set_aside_total[$__rate_interval]))", "{{kind}}"),
                    ("sum by (job) (increase(trefoil_state_unreadable_total[$__rate_interval]))", "key, by {{job}}"),
                ],
                soft_most=1,
                says="What stood in Redis and was not used; `trefoil status` names keys and reasons.",
            ),
        ],
        [
            line(
                "CPU of services",
                "sum by (job) (rate(process_cpu_seconds_total[$__rate_interval]))",
                "{{job}}",
                "percentunit",
                says="Of one core.",
            ),
            line("Memory of services", "sum by (job) (process_resident_memory_bytes)", "{{job}}", "bytes"),
            line(
                "Clocks against that of Redis",
                "max by (job) (abs(trefoil_clock_offset_seconds))",
                "{{job}}",
                "s",
                soft_most=1,
            ),
        ],
        [
            lines(
                "Redis: memory",
                [
                    ("sum by (instance) (redis_memory_used_bytes)", "{{instance}}"),
                    ("sum by (instance) (redis_memory_max_bytes) > 0", "{{instance}}, limit"),
                ],
                "bytes",
                no_value=NO_EXPORTER,
            ),
            line(
                "Redis: commands",
                rate("redis_commands_processed_total", "instance"),
                "{{instance}}",
                "ops",
                no_value=NO_EXPORTER,
            ),
            lines(
                "Redis: what it refuses, and does not save",
                [
                    ("sum by (instance) (increase(redis_rejected_connections_total[$__rate_interval]))", "connections"),
                    ("sum by (instance) (increase(redis_evicted_keys_total[$__rate_interval]))", "evicted keys"),
                    ("1 - min by (instance) (redis_aof_last_write_status)", "log not written"),
                    ("1 - min by (instance) (redis_rdb_last_bgsave_status)", "snapshot not written"),
                ],
                soft_most=1,
                no_value=NO_EXPORTER,
            ),
        ],
    ],
    [variable("node", "label_values(trefoil_device_power_watts, device)", "/(.+)\\/[^\\/]+/")],
)
