"""Meters as kernels and exporters show them. RAPL: zones (folder, name, joules drawn), expected joules. DCGM: lines,
expected activity by instance."""

from tests.public_reports.report import Report

RAPL = tuple(
    Report("rapl", source, zones, joules)
    for source, zones, joules in (
        ("one package", [("intel-rapl:0", "package-0", 680)], 680),
        ("two packages", [("intel-rapl:0", "package-0", 680), ("intel-rapl:1", "package-1", 20)], 700),
        (
            "a laptop: memory map mirrors registers",
            [("intel-rapl:0", "package-0", 680), ("intel-rapl-mmio:0", "package-0", 680)],
            680,
        ),
        (
            "two drivers of one type",
            [("intel-rapl:0", "package-0", 680), ("intel-rapl:1", "package-0", 680)],
            680,
        ),
        (
            "two drivers, two packages",
            [
                ("intel-rapl:0", "package-0", 300),
                ("intel-rapl:1", "package-1", 380),
                ("intel-rapl:2", "package-0", 300),
                ("intel-rapl:3", "package-1", 380),
            ],
            680,
        ),
        ("registers beside TPMI", [("intel-rapl-tpmi:0", "package-0", 680), ("intel-rapl:0", "package-0", 680)], 680),
        ("memory map alone", [("intel-rapl-mmio:0", "package-0", 680)], 680),
        ("two dies", [("intel-rapl:0", "package-0-die-0", 300), ("intel-rapl:1", "package-0-die-1", 380)], 680),
        (
            "dies beside their package",
            [
                ("intel-rapl:0", "package-0", 680),
                ("intel-rapl:1", "package-0-die-0", 300),
                ("intel-rapl:2", "package-0-die-1", 380),
            ],
            680,
        ),
        ("the platform is not a package", [("intel-rapl:0", "package-0", 680), ("intel-rapl:1", "psys", 900)], 680),
    )
)
"""Zones of one package are one meter."""
SM, ENGINE = "DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_PROF_GR_ENGINE_ACTIVE"
DCGM = tuple(
    Report("dcgm", source, lines, activity)
    for source, lines, activity in (
        ("a share", [(SM, 1, "0.25")], {1: 0.25}),
        ("a little above 1", [(SM, 1, "1.294")], {1: 1.0}),
        ("integer, not supported", [(SM, 1, "9223372036854775794"), (SM, 2, "0.5")], {2: 0.5}),
        ("integer, blank", [(SM, 1, "9.223372036854775792e+18")], {}),
        ("32 bits, blank", [(SM, 1, "2147483632")], {}),
        ("floating point, blank", [(SM, 1, "140737488355328"), (SM, 2, "140737488355330")], {}),
        ("not a number", [(SM, 1, "NaN"), (SM, 2, "+Inf"), (SM, 3, "-Inf")], {}),
        ("negative", [(SM, 1, "-1")], {}),
        ("a percentage", [(SM, 1, "42")], {}),
        ("blank here, a share there", [(SM, 1, "9223372036854775794"), (ENGINE, 1, "0.5")], {1: 0.5}),
        (
            "a value that could not be converted",
            [(SM, 1, "ERROR - FAILED TO CONVERT TO STRING"), (SM, 2, "0.5")],
            {2: 0.5},
        ),
        (
            "another metric with a text for a value",
            [("DCGM_FI_DEV_VGPU_INSTANCE_IDS", 1, "ERROR - FAILED TO CONVERT TO STRING"), (SM, 1, "0.5")],
            {1: 0.5},
        ),
        (
            "another metric with a device for a value",
            [(SM, 1, "0.5"), ("DCGM_FI_DEV_CUDA_VISIBLE_DEVICES_STR", 1, "MIG-GPU-66068b5a/3")],
            {1: 0.5},
        ),
        ("no value at all", [(SM, 1, ""), (SM, 2, "0.5")], {2: 0.5}),
        ("two pods, one of them blank", [(SM, 1, "0.5"), (SM, 1, "9223372036854775794")], {1: 0.5}),
    )
)
"""A value out of range is absent."""
