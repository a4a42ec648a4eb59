"""Files that settings name: a FIFO, a device, a folder and an endless file are refused at once, naming the setting."""

import os

import pytest

from carbon_feed.providers.trace import load_trace
from carbon_feed.settings import CarbonFeedSettings
from carbon_feed.zones import zone_of
from dispatcher.fronts.access_control import TenantsFile
from trefoil.core.errors import SettingError, TraceError
from trefoil.runtime import config
from trefoil.runtime.security.tls import Tls

READERS = {
    "file": lambda path: config.load(TenantsFile, path),
    "zones_file": lambda path: zone_of(CarbonFeedSettings(zone="x", zones_file=path)),
    "trace": load_trace,
    "tls_ca": lambda path: Tls(None, None, path),
    "tls_certificate, tls_key": lambda path: Tls(path, path, None),
}


@pytest.mark.parametrize("field", READERS)
@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "huge"])
def test_what_is_no_plain_file_is_refused_at_once(tmp_path, field, kind):
    path = tmp_path / "given"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        path.touch()
        os.truncate(path, 2**40)
    says = f"{field} = '{path}.*': .*(is not a regular file|bytes, at most).* Remedy: name"
    with pytest.raises((SettingError, TraceError), match=says):
        READERS[field](path)


def test_a_link_to_a_settings_file_is_followed(tmp_path):
    (tmp_path / "real.toml").write_text("name = 1")
    (tmp_path / "link.toml").symlink_to("real.toml")
    assert config.read_toml(tmp_path / "link.toml") == {"name": 1}
