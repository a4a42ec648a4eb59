"""Files with API keys: what is refused at first, and what happens when they change while a service runs."""

import pytest

from trefoil.core.errors import SettingError
from trefoil.runtime.security.key_file import KeyFile


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "key"
    path.write_text("sk-1\n")
    path.chmod(0o640)
    return path


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [("", 0o600, "holds no secret"), ("sk-1\nsk-2\n", 0o600, "one line"), ("sk-1", 0o644, "others may .*chmod o="),
     ("sk-1 2", 0o600, "printable ASCII"), ("sk-\u00e9", 0o600, "ASCII"), ("sk-" * 2000, 0o600, "at most 4096")],
)  # fmt: skip
def test_a_file_without_a_key_is_refused_and_not_shown(file, text, mode, why):
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(SettingError, match=why) as caught:
        KeyFile(file, "engines.key_file")
    assert caught.value.field == "engines.key_file"
    assert "sk-" not in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(SettingError, match=r"engines\.key_file = .*cannot be read"):
        KeyFile(tmp_path / "gone", "engines.key_file")


def test_what_replaces_the_file_is_read_and_what_is_none_is_not(file, capfd):
    key = KeyFile(file, "key_file")
    other = file.with_name("other")
    other.write_text("sk-2")
    other.chmod(0o600)
    other.rename(file)
    assert key.read() == "sk-2"
    file.chmod(0o644)
    assert [key.read(), key.read()] == ["sk-2", "sk-2"]
    said = "".join(capfd.readouterr())
    assert said.count("key_file: the change is not used") == 1
    assert "sk-2" not in said
    file.unlink()
    assert key.read() == "sk-2"
    file.write_text("sk-3")
    file.chmod(0o600)
    assert key.read() == "sk-3"
    assert key.hidden_in("wrong: sk-3!") == "wrong: [key]!"
