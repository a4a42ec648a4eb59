import os
import tomllib
from collections.abc import Mapping
from typing import ClassVar

import pytest
from pydantic import Field, SecretStr

from controller.settings import ControllerSettings
from trefoil.core.errors import SettingError
from trefoil.runtime import config
from trefoil.runtime.config import ServiceSettings, Settings, changed, load, masked, parser_main


class Trace(Settings):
    REMOVED: ClassVar[Mapping[str, str]] = {"pace": "set speedup"}

    speedup: float = Field(1.0, gt=0)
    files: tuple[str, ...] = ()


class Example(ServiceSettings):
    """An example service."""

    zone: str = "GB"
    trace: Trace = Trace()
    traces: dict[str, Trace] = Field(default_factory=dict)
    several: tuple[Trace, ...] = (Trace(), Trace(speedup=7.0))


def write(tmp_path, text):
    path = tmp_path / "example.toml"
    path.write_text(text)
    return path


def test_each_layer_overrides_the_one_before(tmp_path):
    path = write(tmp_path, '\ufeffzone = "toml"\nlog_level = "debug"\n[trace]\nspeedup = 2\n')
    environ = {"TREFOIL_EXAMPLE_ZONE": "environment", "TREFOIL_EXAMPLE_TRACE__SPEEDUP": "3", "OTHER": "x"}
    assert load(Example).zone == "GB"
    assert load(Example, path).zone == "toml"
    settings = load(Example, path, "TREFOIL_EXAMPLE_", environ=environ)
    assert (settings.zone, settings.trace.speedup, settings.log_level) == ("environment", 3.0, "debug")
    settings = load(Example, path, "TREFOIL_EXAMPLE_", {"zone": "flag", "trace.speedup": "4"}, environ)
    assert (settings.zone, settings.trace.speedup) == ("flag", 4.0)


def test_lists_and_tables_in_environment_and_flags_are_toml():
    settings = load(Example, None, "", {"trace.files": '["a.csv", "b.csv"]', "traces": "{GB = {speedup = 9}}"})
    assert settings.trace.files == ("a.csv", "b.csv")
    assert settings.traces["GB"].speedup == 9.0
    assert load(Example, None, "", {"admin_address": "[::1]:80"}).admin_address == "[::1]:80"


def test_overrides_reach_into_lists_also_of_a_default(tmp_path):
    path = write(tmp_path, "[[several]]\nspeedup = 2\n[[several]]\nspeedup = 3\n")
    found = load(Example, path, "", {"several.1.speedup": "4", "several.0.files": '["a"]'})
    assert [(one.speedup, one.files) for one in found.several] == [(2.0, ("a",)), (4.0, ())]
    environ = {"TREFOIL_EXAMPLE_SEVERAL__1__FILES": '["b"]'}
    assert load(Example, None, "TREFOIL_EXAMPLE_", environ=environ).several[1] == Trace(speedup=7.0, files=("b",))
    assert changed(found, {"several.0.files.0": "c"}).several[0].files == ("c",)
    assert found.several[0].files == ("a",)


@pytest.mark.parametrize(
    ("key", "named"),
    [
        (
            "several.2.speedup",
            r"several: has 2 entries, and no '2' .in flag several\.2\.speedup.*several\.0 to several\.1",
        ),
        ("several.first.speedup", r"several: has 2 entries, and no 'first'"),
        ("trace.files.0", r"trace\.files: has 0 entries, .*Remedy: give the whole list: trace\.files=\[\.\.\.\]"),
        ("zone.0", "zone: is a value, not a section"),
        (
            "several.0.speed",
            r"several\.0\.speed: unknown setting .*did you mean speedup\? .*use one of: files, speedup",
        ),
        ("traces.GB.speedu", r"traces\.GB\.speedu: unknown setting .*did you mean speedup\?"),
        ("traces.GB.pace", r"traces\.GB\.pace: unknown setting .in flag traces\.GB\.pace.. Remedy: set speedup$"),
        ("several.1.pace", r"several\.1\.pace: unknown setting .*Remedy: set speedup$"),
        ("pace", r"pace: unknown setting .*Remedy: .*use one of: "),
    ],
)
def test_a_key_that_names_nothing_says_what_there_is(key, named):
    with pytest.raises(SettingError, match=named):
        load(Example, None, "", {"zone": "GB", key: "1"})


def test_models_made_in_python_are_refused_by_our_errors_too():
    with pytest.raises(SettingError, match=r"^several\.0\.speedup = -1: .*greater than 0 .in Example"):
        Example(several=[{"speedup": -1}])
    with pytest.raises(SettingError, match=r"^speed: unknown setting .in Trace.*did you mean speedup"):
        Trace(speed=1)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("zon = 1", "zon: unknown setting .*use one of: .*zone"),
        ("[trace]\nspedup = 1", r"trace\.spedup: unknown setting .*files, speedup"),
        ("[trace]\nspeedup = -1", r"trace\.speedup = -1: .*greater than 0"),
        ("[trace]\nspeedup = nan", r"trace\.speedup = nan: .*finite"),
        ('log_level = "loud"', "log_level = 'loud': .*'debug'"),
        ("zone = 3", "zone = 3: .*string"),
        ("trace = 3", "trace = 3: must be a table"),
        ("several = 3", "several = 3: must be a list"),
        (
            "[traces.GB]\npace = 1\n[[several]]\npace = 1",
            r"pace: unknown setting .*pace \(set speedup\).*Remedy: set speedup",
        ),
        ("zone = \nx = 1", "not valid TOML.*line 1"),
        ("x = 1\n" + "a." * 20_000 + "b = 1", "not valid TOML: line 2 has a key of more than 32 parts"),
        ("[[ " + '"a b" . ' * 20_000 + "b]]", "not valid TOML: line 1 has a key of more than 32 parts"),
        ("x = {y = 1, " + "'a'." * 20_000 + "b = 1}", "not valid TOML: line 1 has a key of more than 32 parts"),
    ],
)
def test_bad_values_name_file_field_value_and_remedy(tmp_path, text, named):
    path = write(tmp_path, text)
    with pytest.raises(SettingError, match=named) as caught:
        load(Example, path)
    assert str(path) in str(caught.value)
    assert "Remedy: " in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["[" * 2000, "9" * 5000, "0x" + "f" * 5000], ids=["deep", "digits", "hexadecimal"])
def test_what_python_can_neither_read_nor_print_is_refused_in_one_line(tmp_path, value):
    path = tmp_path / "x.toml"
    path.write_text(f"seed = {value}\n")
    with pytest.raises(SettingError, match="Remedy: "):
        load(ControllerSettings, path)
    with pytest.raises(SettingError, match="seed"):
        load(ControllerSettings, overrides={"seed": value})


def test_a_bad_environment_variable_is_named_not_the_file(tmp_path):
    path = write(tmp_path, 'zone = "GB"')
    with pytest.raises(SettingError, match="in environment TREFOIL_EXAMPLE_TRACE__SPEEDUP"):
        load(Example, path, "TREFOIL_EXAMPLE_", environ={"TREFOIL_EXAMPLE_TRACE__SPEEDUP": "fast"})
    with pytest.raises(SettingError, match=r"zon: unknown setting .in environment TREFOIL_EXAMPLE_ZON"):
        load(Example, path, "TREFOIL_EXAMPLE_", environ={"TREFOIL_EXAMPLE_ZON": "GB"})
    with pytest.raises(SettingError, match="zone: is a value, not a section"):
        load(Example, path, "TREFOIL_EXAMPLE_", environ={"TREFOIL_EXAMPLE_ZONE__X": "GB"})


def test_missing_file_is_named(tmp_path):
    with pytest.raises(SettingError, match=r"file = .*absent\.toml.: cannot be read .No such file"):
        load(Example, tmp_path / "absent.toml")
    with pytest.raises(SettingError, match="cannot be read"):
        load(Example, tmp_path)


def test_settings_cannot_change():
    with pytest.raises(ValueError, match="frozen"):
        Example().zone = "FR"


def test_secrets_are_masked_everywhere():
    settings = Example(redis_url=SecretStr("redis://:hunter2@localhost"), token=SecretStr("t0k"))
    shown = masked(settings)
    assert shown["redis_url"] == shown["token"] == "***"
    assert shown["trace"] == {"speedup": 1.0, "files": []}
    assert shown["state_dir"] == ".trefoil/default"
    assert "hunter2" not in repr(settings)
    with pytest.raises(SettingError) as caught:
        load(Example, None, "", {"redis_url": 42})
    assert "42" not in str(caught.value)


def secret_file(tmp_path, data=b"hunter2\n", mode=0o640):
    path = tmp_path / "secret"
    path.write_bytes(data)
    path.chmod(mode)
    return path


def test_a_secret_may_stand_in_a_file_whose_last_line_break_does_not_count(tmp_path):
    path = secret_file(tmp_path, b"redis://:hunter2@localhost\n")
    settings = load(Example, None, "TREFOIL_EXAMPLE_", environ={"TREFOIL_EXAMPLE_REDIS_URL_FILE": str(path)})
    assert settings.redis_url.get_secret_value() == "redis://:hunter2@localhost"
    settings = Example(token_file=path, read_token_file=path)
    assert settings.token == settings.read_token == SecretStr("redis://:hunter2@localhost")
    assert changed(settings, {"zone": "FR"}).token == settings.token
    assert "hunter2" not in f"{settings!r}{masked(settings)}"


@pytest.mark.parametrize(
    ("data", "mode", "why"),
    [
        (b"hunter2", 0o644, r"others may read or change it \(mode 0644\)\. Remedy: chmod o= .*/secret"),
        (b"hunter2", 0o602, "others may read or change it"),
        (b" \n", 0o600, "holds no secret: at most 2 lines of text, none of them empty, at most 4096 bytes"),
        (b"hunter2\nhunter3\nhunter4\n", 0o600, "holds no secret"),
        (b"hunter2\xff", 0o600, "holds no secret"),
        (b"hunter2" * 600, 0o600, "holds no secret"),
    ],
)
def test_a_file_that_is_no_secret_is_refused_and_not_shown(tmp_path, data, mode, why):
    path = secret_file(tmp_path, data, mode)
    with pytest.raises(SettingError, match=f"^token_file = '{path}': {why}") as caught:
        load(Example, None, "", {"token_file": str(path)})
    assert "hunter2" not in str(caught.value)


def test_a_secret_and_its_file_or_a_file_that_is_none_are_refused(tmp_path):
    with pytest.raises(SettingError, match=r"^token_file = .*: token is given too\. Remedy: give token or") as caught:
        load(Example, write(tmp_path, 'token = "hunter2"'), "", {"token_file": str(secret_file(tmp_path))})
    assert "hunter2" not in str(caught.value)
    with pytest.raises(SettingError, match=r"redis_url_file = '.*absent': cannot be read \(No such file"):
        Example(redis_url_file=tmp_path / "absent")
    with pytest.raises(SettingError, match="cannot be read"):
        Example(token_file=tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(SettingError, match="is not a file"):
        Example(token_file=tmp_path / "pipe")


def test_command_line(tmp_path, monkeypatch, capsys):
    path = write(tmp_path, 'zone = "toml"')
    monkeypatch.setenv("TREFOIL_EXAMPLE_LOG_LEVEL", "warning")
    settings = parser_main(Example, "example", ["--config", str(path), "--set", "trace.speedup=5", "--insecure"])
    assert (settings.zone, settings.trace.speedup, settings.insecure) == ("toml", 5.0, True)
    assert settings.log_level == "warning"
    with pytest.raises(SettingError, match="--set = 'zone'"):
        parser_main(Example, "example", ["--set", "zone"])
    with pytest.raises(SystemExit):
        parser_main(Example, "example", ["--help"])
    assert "An example service." in capsys.readouterr().out


def test_a_file_of_the_same_name_in_the_folder_of_overrides_goes_over_the_settings_file(tmp_path):
    shipped, own = tmp_path / "shipped", tmp_path / "own"
    for folder in (shipped, own):
        folder.mkdir()
    (shipped / "example.toml").write_text('cluster = "a"\nzone = "DE"\n[trace]\nspeedup = 2.0\nfiles = ["x"]\n')
    environment = {"TREFOIL_OVERRIDES": str(own)}

    def read():
        return load(Example, shipped / "example.toml", "TREFOIL_EXAMPLE_", {}, environment)

    assert read().zone == "DE"
    (own / "example.toml").write_text('zone = "FR"\n[trace]\nspeedup = 3.0\n')
    (own / "controller.toml").write_text("no = 1")
    found = read()
    assert (found.cluster, found.zone, found.trace.speedup, found.trace.files) == ("a", "FR", 3.0, ("x",))
    environment["TREFOIL_EXAMPLE_ZONE"] = "GB"
    assert read().zone == "GB"
    (own / "example.toml").write_text("zon = 1")
    with pytest.raises(SettingError, match=r"zon: unknown setting \(in .*shipped.*own/example.toml\)"):
        read()


def test_the_source_of_settings_is_the_file_and_the_one_that_is_read_over_it(tmp_path, monkeypatch):
    monkeypatch.setenv(config.OVERRIDES_VARIABLE, str(tmp_path))
    argv = ["--config", "/etc/trefoil/x.toml", "--set", "a=1"]
    assert config.settings_source(argv) == "/etc/trefoil/x.toml"
    (tmp_path / "x.toml").write_text("")
    assert config.settings_source(argv) == f"/etc/trefoil/x.toml, {tmp_path}/x.toml"
    assert not config.settings_source([])


def test_lists_of_tables_and_names_of_any_letters_read_back_as_they_were():
    zones = {"my zone.x 😀": {"constant": 1.5}, "": {}}
    values = {"pue": 1.2, "empty": [], "nodes": [{"name": "a", "on": {"b": [1, 2]}}, {"name": "c"}], "zones": zones}
    text = config.to_toml(values)
    assert tomllib.loads(text) == values
    assert text.count("[[") == 2
