"""Files of carbon intensity in public layouts. Expected: values [g/kWh], step [s], estimates; or words."""

from tests.public_reports.report import Report

KIND = "carbon file"
HOURS = ("2022-01-01 00:00:00", "2022-01-01 01:00:00", "2022-01-01 02:00:00")


def row(source: str, header: str, rows: tuple[str, ...], expected: object, **options: object) -> Report:
    return Report(KIND, source, (header + "\n" + "".join(f"{one}\n" for one in rows), options), expected)


def hourly(source: str, column: str, values: tuple[object, ...], expected: object, **options: object) -> Report:
    rows = tuple(f"{at},{value}" for at, value in zip(HOURS, values, strict=False))
    return row(source, f"datetime_utc,{column}", rows, expected, **options)


def read(*values: float, step_s: float = 3600.0, estimates: tuple[int, ...] = ()) -> tuple:
    return values, step_s, frozenset(estimates)


MAPS = (
    "Datetime (UTC),Country,Zone Id,Carbon Intensity gCO₂eq/kWh (direct),Carbon Intensity gCO₂eq/kWh (LCA),"
    "Low Carbon Percentage,Data Source,Data Estimated,Data Estimation Method"
)
MAPS_ROWS = (
    "2022-01-01 00:00:00,USA,US-X,209.5,273.7,55.3,a,false,",
    "2022-01-01 01:00:00,USA,US-X,225.0,290.6,52.7,a,true,TIME_SLICER_AVERAGE",
)
MAPS_2024 = (
    "Datetime (UTC),Country,Zone name,Zone id,Carbon intensity gCO₂eq/kWh (direct),"
    "Carbon intensity gCO₂eq/kWh (Life cycle),Carbon-free energy percentage (CFE%),Renewable energy percentage (RE%),"
    "Data source,Data estimated,Data estimation method"
)
MAPS_ROWS_2024 = (
    "2022-01-01 00:00:00,USA,X,US-X,209.5,273.7,55.3,40.1,a,false,",
    "2022-01-01 01:00:00,USA,X,US-X,225.0,290.6,52.7,40.2,a,true,TIME_SLICER_AVERAGE",
)
LOCAL = ("2022-01-01 01:00,2022-01-01 00:00,10", "2022-01-01 02:00,2022-01-01 01:00,20")
READ = (
    hourly("pounds per megawatt hour", "carbon_intensity_lb_per_mwh", (1000, 870), read(453.59237, 394.6253619)),
    hourly("pounds with CO2 in between", "lbs_co2_per_mwh", (1000, 870), read(453.59237, 394.6253619)),
    hourly("kilograms per kilowatt hour", "carbon_intensity (kgCO2eq/kWh)", (0.4, 0.25), read(400.0, 250.0)),
    hourly("kilograms per megawatt hour", "Carbon Intensity [kg/MWh]", (400, 250), read(400.0, 250.0)),
    hourly("tonnes per megawatt hour", "tCO2/MWh", (0.4, 0.25), read(400.0, 250.0)),
    hourly("grams with subscript", "Carbon intensity gCO₂eq/kWh (Life cycle)", (40, 25), read(40.0, 25.0)),
    hourly("grams to the power of -1", "intensity g kWh-1", (40, 25), read(40.0, 25.0)),
    hourly("megagrams per megawatt hour", "Carbon intensity (Mg/MWh)", (0.4, 0.25), read(400.0, 250.0)),
    hourly("milligrams per kilowatt hour", "carbon_intensity_mg_per_kwh", (400, 250), read(0.4, 0.25)),
    hourly(
        "CO2 beside other gases",
        "NOx lb/MWh,CO₂ lb/MWh,CH4 lb/MWh",
        ("1,1000,2", "1,870,2"),
        read(453.59237, 394.6253619),
    ),
    hourly("CO2 of generation", "CO2 per net generation (kg/MWh)", (400, 250), read(400.0, 250.0)),
    hourly("intensity of generation", "generation_intensity_g_per_kwh", (400, 250), read(400.0, 250.0)),
    hourly("grams per megajoule", "intensity_g_per_mj", (100, 50), read(360.0, 180.0)),
    hourly("unit by setting", "carbon_intensity", (0.4, 0.25), read(400.0, 250.0), unit="kg/kWh"),
    hourly("unit by setting as by header", "intensity_kg_per_mwh", (40, 25), read(40.0, 25.0), unit="g/kWh"),
    row(
        "unit in a comment",
        "# unit: lb/MWh\ntime,intensity",
        tuple(f"{at},1000" for at in HOURS),
        read(*[453.59237] * 3),
    ),
    row(
        "WattTime: MOER in its documented unit",
        "timestamp,MOER,MOER version,frequency",
        ("2022-01-01T00:00:00+00:00,1000,3.0,300", "2022-01-01T00:05:00+00:00,870,3.0,300"),
        read(453.59237, 394.6253619, step_s=300.0),
        method="marginal",
    ),
    hourly("AOER beside MOER", "MOER,AOER", ("1,1000", "1,870"), read(453.59237, 394.6253619)),
    row("Electricity Maps: an estimate stays one", MAPS, MAPS_ROWS, read(273.7, 290.6, estimates=(1,))),
    row("Electricity Maps since 2024", MAPS_2024, MAPS_ROWS_2024, read(273.7, 290.6, estimates=(1,))),
    row(
        "Electricity Maps since 2024: direct",
        MAPS_2024,
        MAPS_ROWS_2024,
        read(209.5, 225.0, estimates=(1,)),
        factors="direct",
    ),
    row(
        "Electricity Maps' API, JSON lines",
        '{"zone":"DE","carbonIntensity":300,"datetime":"2022-01-01T00:00:00.000Z","isEstimated":true}',
        ('{"zone":"DE","carbonIntensity":310,"datetime":"2022-01-01T01:00:00.000Z","isEstimated":false}',),
        read(300.0, 310.0, estimates=(0,)),
        unit="g/kWh",
    ),
    row(
        "NESO's generation mix",
        "DATETIME,GAS,COAL,CARBON_INTENSITY,LOW_CARBON_perc",
        ("2009-01-01 00:00:00,8369.0,15037.0,529.0,24.7", "2009-01-01 00:30:00,8498.0,15089.0,528.0,24.1"),
        read(529.0, 528.0, step_s=1800.0),
        unit="g/kWh",
    ),
    row("Electricity Maps: direct", MAPS, MAPS_ROWS, read(209.5, 225.0, estimates=(1,)), factors="direct"),
    row(
        "Electricity Maps: estimates are missing rows",
        MAPS,
        (*MAPS_ROWS, "2022-01-01 02:00:00,USA,US-X,1,300,5,a,false,", "2022-01-01 03:00:00,USA,US-X,1,310,5,a,no,"),
        read(273.7, 273.7, 300.0, 310.0),
        estimates=False,
        gaps="hold",
    ),
    row(
        "estimates as pandas writes them beside empty cells",
        "datetime_utc,intensity_g_per_kwh,is_estimated",
        tuple(f"{at},{value},{mark}" for at, value, mark in zip(HOURS, (1, 2, 3), ("1.0", "0.0", ""), strict=True)),
        read(1.0, 2.0, 3.0, estimates=(0,)),
    ),
    row("UTC before local", "datetime_local,datetime_utc,intensity_g_per_kwh", LOCAL, read(10.0, 20.0)),
    row(
        "UTC behind local",
        "datetime_local,intensity_g_per_kwh,time_utc",
        ("2022-01-01 05:00,1,2022-01-01T00:00Z", "2022-01-01 04:00,2,2022-01-01T01:00Z"),
        read(1.0, 2.0),
    ),
    row(
        "start before end",
        "End time (UTC),Start time (UTC),intensity_g_per_kwh",
        ("2022-01-01 03:00,1640995200,1", "2022-01-01 02:00,1640998800,2"),
        read(1.0, 2.0),
    ),
    *(
        row(name, f"{other},{at},intensity_g_per_kwh", (f"7,{HOURS[0]},1", f"7,{HOURS[1]},2"), read(1.0, 2.0))
        for name, other, at in (
            ("an hour of the day", "hour_of_day", "timestamp"),
            ("a date of change", "updated_date", "datetime"),
            ("a date of change in UTC", "createdDateTimeUTC", "time"),
            ("an end", "End Date", "Start Date"),
            ("an end in one word", "endtime", "starttime"),
            ("a zone", "timezone", "hour"),
            ("a rate by the hour", "hourly_load", "hour"),
            ("UTC as part of a word", "time", "UTCtime"),
        )
    ),
    row(
        "local by setting",
        "local_time,intensity_g_per_kwh",
        ("2022-03-13 01:00,1", "2022-03-13 03:00,2"),
        read(1.0, 2.0),
        timezone="America/Los_Angeles",
    ),
    row(
        "a night of summer time",
        "local_time,intensity_g_per_kwh",
        ("2024-11-03 00:00,1", "2024-11-03 01:00,2", "2024-11-03 01:00,3", "2024-11-03 02:00,4"),
        read(1.0, 2.0, 3.0, 4.0),
        timezone="America/Los_Angeles",
    ),
    row(
        "milliseconds since 1970",
        "timestamp,intensity_g_per_kwh",
        ("1640995200000,1", "1640998800000,2"),
        read(1.0, 2.0),
    ),
    row("minutes", "minute_time,intensity_g_per_kwh", ("0,1", "30,2"), read(1.0, 2.0, step_s=1800.0), time_unit="min"),
    row("semicolons", "datetime;intensity_g_per_kwh", ("2022-01-01 00:00;1", "2022-01-01 01:00;2"), read(1.0, 2.0)),
    row(
        "a gap by setting",
        "hour,intensity_g_per_kwh",
        ("0,10", "1,", "2,30", "3,40"),
        read(10.0, 20.0, 30.0, 40.0),
        gaps="linear",
    ),
    hourly("negative marginal intensities", "moer", (-100, 200), read(-45.359237, 90.718474), method="marginal"),
)
REFUSED = (
    hourly("no unit", "carbon_intensity", (400, 250), r"unit of column 'carbon_intensity' is not known.*unit"),
    *(
        hourly("micrograms", f"carbon_intensity {unit}/kWh", (400, 250), r"unit of column .* is not known")
        for unit in ("\u00b5g", "\u03bcg", "µgCO2eq", "MG")
    ),
    *(
        hourly("no carbon", column, (1, 2), r"no column has a name that tells.*set trace.value_column")
        for column in (
            "NOx lb/MWh",
            "SO2 g/kWh",
            "CH4 lb/MWh",
            "n2o_lb_per_mwh",
            "generation t/MWh",
            "intensity NOₓ (g/kWh)",
            "CO lb/MWh",
            "carbon monoxide g/kWh",
        )
    ),
    hourly("a ton of which kind", "intensity_tons_per_mwh", (0.4, 0.25), r"unit of column .* is not known"),
    hourly(
        "header against setting",
        "intensity_lb_per_mwh",
        (400, 250),
        r"is in lb/MWh by its name, and in g/kWh",
        unit="g/kWh",
    ),
    hourly(
        "kilograms called grams",
        "intensity_g_per_kwh",
        (400, 250),
        r"is in g/kWh by its name, and in kg/kWh",
        unit="kg/kWh",
    ),
    row(
        "comment against header",
        "# unit: lb/MWh\ntime,intensity_g_per_kwh",
        (f"{HOURS[0]},1", f"{HOURS[1]},2"),
        r"is in lb/MWh by a comment, and in g/kWh by its name",
    ),
    row(
        "a comment that is not a unit",
        "# unit: percent\ntime,intensity",
        (f"{HOURS[0]},1", f"{HOURS[1]},2"),
        r"# unit = 'percent'",
    ),
    hourly(
        "pounds read as kilograms", "carbon_intensity", (870, 900), r"above 1500 g/kWh.*read in kg/kWh", unit="kg/kWh"
    ),
    row(
        "local times of an unknown zone",
        "local_time,intensity_g_per_kwh",
        ("2022-01-01 01:00,1", "2022-01-01 02:00,2"),
        r"trace.timezone: .*local times of an unknown zone",
    ),
    row(
        "times of an abbreviated zone",
        "time (EST),intensity_g_per_kwh",
        ("2022-01-01 01:00,1", "2022-01-01 02:00,2"),
        r"local times of an unknown zone",
    ),
    *(
        row(
            f"times of a zone in words: {name}",
            f"{name},intensity_g_per_kwh",
            ("2022-01-01 01:00,1", "2022-01-01 02:00,2"),
            r"trace.timezone: .*local times of an unknown zone",
        )
        for name in (
            "localtime",
            "Time (PT)",
            "Time (Pacific)",
            "Hour Ending ET",
            "Time (Europe/Berlin)",
            "time (SGT)",
            "time_msk",
            "Time (Etc/GMT+8)",
            "Time (US/Eastern)",
            "Datetime (CPT)",
            "TimeLocal",
        )
    ),
    row(
        "an offset against setting",
        "time (UTC+1),intensity_g_per_kwh",
        ("2022-01-01 01:00,1", "2022-01-01 02:00,2"),
        r"is in UTC.01:00 by its name",
        timezone="Europe/Berlin",
    ),
    *(
        row(
            f"several times: {names}",
            f"{names},intensity_g_per_kwh",
            (f"{HOURS[0]},{HOURS[0]},1",),
            r"trace.time_column = .*several columns could be meant",
        )
        for names in ("valid_time,issue_time", "date_from,date_valid", "time_utc,start_time_utc")
    ),
    row(
        "UTC against setting",
        "datetime_utc,intensity_g_per_kwh",
        ("2022-01-01 01:00,1", "2022-01-01 02:00,2"),
        r"is in UTC by its name",
        timezone="Europe/London",
    ),
    row("times of no unit", "time,intensity_g_per_kwh", ("0,1", "1,2"), r"unit of these times is not known"),
    row(
        "estimates by an unknown word",
        "datetime_utc,intensity_g_per_kwh,estimated",
        tuple(f"{at},1,{mark}" for at, mark in zip(HOURS, ("A", "E", "A"), strict=True)),
        r"estimated = .A.: .*line 2: no mark of an estimate",
    ),
    row(
        "estimates by a share",
        "datetime_utc,intensity_g_per_kwh,estimated",
        (f"{HOURS[0]},1,0.5", f"{HOURS[1]},2,0"),
        r"estimated = '0.5': .*no mark of an estimate",
    ),
    row(
        "Energinet: decimal commas",
        "Minutes5UTC;Minutes5DK;PriceArea;CO2Emission",
        ("2024-01-01 00:00;2024-01-01 01:00;DK1;85,00", "2024-01-01 00:05;2024-01-01 01:05;DK1;86,00"),
        r"CO2Emission = '85,00': .*decimals with a point",
        time_column="Minutes5UTC",
        value_column="CO2Emission",
        unit="g/kWh",
    ),
    row("date and hour apart", "date,hour,g/kWh", ("2024-01-01,0,2", "2024-01-01,1,1"), r"date and hour in one column"),
    row(
        "two zones", "datetime_utc,zone,g/kWh", (f"{HOURS[0]},DE,1", f"{HOURS[0]},FR,2"), r"one row a time: of one zone"
    ),
    row(
        "ENTSO-E: times from and to", "MTU time (UTC),g/kWh", ("01.01.2023 00:00 - 01.01.2023 01:00,2",), r"not a time"
    ),
    row("WattTime v3 without its unit", "point_time,value", (f"{HOURS[0]},870",), r"set trace.value_column"),
    row("estimates that nothing stands for", MAPS, MAPS_ROWS, r"line 3: an estimate.*gaps", estimates=False),
    hourly("direct only", "intensity gCO₂eq/kWh (direct)", (40, 25), r"factors = 'lifecycle'.*is direct by its name"),
    hourly("LCA only", "intensity g/kWh (LCA)", (40, 25), r"factors = 'direct'.*is lifecycle", factors="direct"),
    hourly("MOER of an average", "MOER", (1000, 870), r"method = 'average': .*'MOER' is marginal by its name"),
    hourly("marginal", "marginal_carbon_intensity_g_per_kwh", (40, 25), r"method = 'average': .*is marginal"),
    hourly("AOER of a margin", "AOER", (1000, 870), r"method = 'marginal': .*is average", method="marginal"),
    hourly("negative averages", "intensity_g_per_kwh", (-1, 2), r"line 2: negative.*marginal"),
)
