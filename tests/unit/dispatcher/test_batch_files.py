"""Files of batches: forms that carry them, their lines, and how they lie on disk."""

import json
import os
import random

import pytest

from dispatcher.fronts.openai import batch_lines
from dispatcher.fronts.openai.batch_lines import check_file, read_line
from dispatcher.fronts.openai.bodies import CHAT, COMPLETIONS
from dispatcher.jobs import entries
from dispatcher.jobs import files as file_store
from dispatcher.jobs.core.form import FIELD_BYTES_MAX, PART_HEAD_BYTES_MAX, Form
from dispatcher.jobs.core.job import Bounds, Job
from dispatcher.jobs.files import FilesFolder, FileUpload
from dispatcher.jobs.folder import JobReader, JobsFolder, OwnedJob, Upload
from trefoil.core.errors import InvalidInput, NotFound, TrefoilError, Unavailable

TYPE = "multipart/form-data; boundary=xyz"
FILE = b"".join(b"\r\n--xy%d\r\n" % n for n in range(500)) + b"\r\n--x"
BODY = (
    b'--xyz\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--xyz\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\nContent-Type: x/y\r\n\r\n'
    + FILE + b"\r\n--xyz--\r\n"
)  # fmt: skip
LINE = {"custom_id": "a", "method": "POST", "url": COMPLETIONS, "body": {"model": "chat", "prompt": "x"}}


def fed(form: Form, body: bytes, sizes) -> bytes:
    found, at = [], 0
    while at < len(body):
        size = sizes()
        found += form.feed(body[at : at + size])
        at += size
    return b"".join(found)


def test_a_form_is_the_same_however_its_bytes_are_cut():
    rng = random.Random(3)
    for sizes in (lambda: 1, lambda: len(BODY), *[lambda: rng.randint(1, 40)] * 20):
        form = Form(TYPE)
        assert fed(form, BODY, sizes) == FILE
        assert (form.fields, form.filename, form.ended) == ({"purpose": "batch"}, "a.jsonl", True)


@pytest.mark.parametrize("type_", ["", "application/json", "multipart/form-data", "multipart/form-data; boundary="])
def test_a_body_that_is_no_form_is_refused(type_):
    with pytest.raises(InvalidInput, match="content-type"):
        Form(type_)


PART = b'--xyz\r\nContent-Disposition: form-data; name="%b"\r\n\r\n'
WRONG = [
    (b"--xyz\r\nX: y\r\n\r\n", "no name"),
    (BODY.replace(b"\r\n--xyz--", b"\r\n" + PART % b"file"), "another one"),
    (PART % b"purpose" + b"a" * (FIELD_BYTES_MAX + 9), "too large"),
    (b"--xyz\r\nX: " + b"y" * (PART_HEAD_BYTES_MAX + 9), "too long"),
    (b"".join(PART % str(n).encode() + b"\r\n" for n in range(40)), "too many parts"),
]


@pytest.mark.parametrize(("body", "words"), WRONG)
def test_a_wrong_form_is_refused_by_what_is_wrong(body, words):
    with pytest.raises(InvalidInput, match=words):
        list(Form(TYPE).feed(body))


def test_what_follows_a_form_is_not_held():
    form = Form(TYPE)
    assert b"".join(form.feed(BODY)) == FILE
    for _ in range(100):
        assert list(form.feed(b"\r\n--xyz\r\n" + b"x" * 100_000)) == []
    assert form.ended
    assert len(form._held) < len(BODY)


def test_a_form_that_breaks_off_has_not_ended():
    form = Form(TYPE)
    assert FILE.startswith(b"".join(form.feed(BODY[:-12])))
    assert not form.ended


def checked(tmp_path, *lines, endpoint=COMPLETIONS, most=100, line_bytes=1000):
    path = tmp_path / "items"
    path.write_bytes(b"\n".join(each if isinstance(each, bytes) else json.dumps(each).encode() for each in lines))
    return check_file(str(path), endpoint, most, line_bytes)


def test_a_file_of_lines_has_one_model(tmp_path):
    found = checked(tmp_path, {**LINE, "custom_id": "b"}, b"", LINE, b"")
    assert (found.model, found.requests, found.errors) == ("chat", 2, [])


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        ({**LINE, "url": CHAT}, "url_mismatch", "url"),
        ({**LINE, "custom_id": "\ud800"}, "invalid_json_line", ""),
        ({**LINE, "\udfff": 1}, "invalid_json_line", ""),
        ({**LINE, "custom_id": 7}, "invalid_request", "custom_id"),
        ({**LINE, "body": []}, "invalid_request", "body"),
        ({**LINE, "body": {}}, "invalid_request", "body.model"),
        ({**LINE, "body": {"model": "\ud800"}}, "invalid_json_line", ""),
        ({**LINE, "body": {"model": "x" * 600}}, "invalid_request", "body.model"),
        ({**LINE, "more": 1}, "invalid_request", "more"),
        ({**LINE, "m" * 300: 1}, "invalid_request", "m" * 200),
        (b"[]", "invalid_json_line", ""),
        (b"\xff", "invalid_json_line", ""),
        (b"[" * 900, "invalid_json_line", ""),
        (b"x" * 5000, "invalid_request", ""),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, code, param):
    found = checked(tmp_path, {**LINE, "custom_id": "b"}, line, {**LINE, "custom_id": "c"})
    assert [(each.code, each.line, each.param) for each in found.errors] == [(code, 2, param)]
    assert found.requests == 3


@pytest.mark.parametrize("begin", [b"", json.dumps(LINE).encode()])
@pytest.mark.parametrize("space", [b" ", b"\r", b"\t\v"])
def test_no_line_hides_behind_space(tmp_path, begin, space):
    """Items are copied by whole lines, which must all have been checked."""
    hidden = json.dumps({**LINE, "custom_id": "b", "url": CHAT}).encode()
    for end in (b"", hidden):
        found = checked(tmp_path, {**LINE, "custom_id": "a1"}, begin + space * 1002 + end, {**LINE, "custom_id": "c"})
        assert [(each.code, each.line) for each in found.errors] == [("invalid_request", 2)]
    fits = json.dumps(LINE).encode().ljust(1000) + b"\r"
    assert checked(tmp_path, fits, b" " * 1000 + b"\r", {**LINE, "custom_id": "c"}).errors == []


def test_a_file_is_read_up_to_its_bounds(tmp_path):
    found = checked(tmp_path, *({**LINE, "custom_id": str(n)} for n in range(9)), most=5)
    assert [(each.code, each.line) for each in found.errors] == [("too_many_tasks", 6)]
    found = checked(tmp_path, *[b"x"] * 90)
    assert len(found.errors) == batch_lines.ERRORS_MAX
    assert [each.code for each in checked(tmp_path, b" \n").errors] == ["empty_file"]
    with pytest.raises(Unavailable, match="no batch was made"):
        check_file(str(tmp_path / "gone"), COMPLETIONS, 9, 9)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(Unavailable, match="no batch was made"):
        check_file(str(tmp_path / "fifo"), COMPLETIONS, 9, 9)


def test_a_line_that_asks_for_what_batches_lack_says_so():
    for name, value in (("stream", True), ("timeout", 1), ("trefoil_class", "x"), ("temprature", 1)):
        custom_id, asked = read_line(json.dumps({**LINE, "body": {**LINE["body"], name: value}}).encode())
        assert isinstance(asked, TrefoilError)
        assert (custom_id, asked.field) == ("a", name)
    assert read_line(json.dumps(LINE).encode())[1].prompt == "x"


@pytest.fixture
def files(tmp_path):
    return FilesFolder(tmp_path, Bounds(100, 1000, 1), keep_s=50.0)


def upload(files, data=b"x", tenant="t", now_s=100.0):
    made = FileUpload(files, tenant)
    made.add(data)
    return made.commit("a.jsonl", now_s)


def test_a_file_is_its_tenants_alone(files):
    mine, other = upload(files), upload(files, tenant="u")
    assert files.all("t") == [mine]
    with pytest.raises(NotFound, match="is not a file of yours"):
        files.get(other.id, "t")
    for name in ("..", ".new-x", "", "a/b", mine.id + "x"):
        with pytest.raises(NotFound):
            files.get(name, "t")
    files.remove(mine.id)
    assert files.all("t") == []
    assert files.all("u") == [other]


def test_an_upload_does_not_read_the_records_of_all_files_at_each_step(tmp_path, monkeypatch):
    files, real, read = FilesFolder(tmp_path, Bounds(100, 64_000, 1), keep_s=50.0), entries.read_state, list[str]()

    def read_state(path, parse):
        read.append(path.parent.name)
        return real(path, parse)

    monkeypatch.setattr(entries, "read_state", read_state)
    for number in range(9):
        upload(files, tenant=str(number))
    made = FileUpload(files, "t")
    for _ in range(60):
        made.add(b"x" * 1000)
    made.discard()
    assert len(set(read)) == len(read) == 9


def test_files_are_bounded_by_number_and_bytes_and_go_in_time(files, monkeypatch):
    with pytest.raises(InvalidInput, match="1200 bytes"):
        upload(files, b"x" * 1200)
    upload(files, b"x" * 600)
    with pytest.raises(InvalidInput, match="1100 bytes"):
        upload(files, b"x" * 500)
    upload(files, b"x" * 500, tenant="u")
    monkeypatch.setattr(file_store, "KEPT_FACTOR", 2)
    upload(files)
    with pytest.raises(InvalidInput, match="too many"):
        FileUpload(files, "t")
    files.expire(149.0, 0.0)
    assert len(files.all("t")) == 2
    files.expire(151.0, 0.0)
    assert files.all("t") == files.all("u") == []


def test_uploads_of_a_tenant_keep_its_bound_together(tmp_path):
    folders = [FilesFolder(tmp_path, Bounds(100, 64_000, 1), keep_s=50.0) for _ in range(8)]  # of eight workers
    uploads = [FileUpload(folder, "t") for folder in folders]
    other, refused = FileUpload(folders[0], "u"), list[str]()
    for _ in range(50):
        for each in uploads:
            try:
                each.add(b"x" * 500)
            except InvalidInput as error:
                refused.append(str(error))
        each._file.flush()
        assert sum(path.stat().st_size for path in tmp_path.rglob("items.bin")) <= 64_000
    assert "tenant = 't': its files, with 7 other uploads, would have" in refused[0]
    assert "upload one after the other: at most 64000 bytes in all, the dispatcher's jobs_bytes_max" in refused[0]
    other.add(b"x" * 63_000)
    assert other.commit("b", 1.0).size == 63_000
    for each in uploads[1:]:
        each.discard()
    uploads[0].discard()
    assert upload(folders[0], b"x" * 64_000).size == 64_000
    [path] = [folders[0].path(each) for each in folders[0].all("t")]
    assert path.read_bytes() == b"x" * 64_000


def test_an_upload_that_ends_before_its_time_is_no_file(files):
    made = FileUpload(files, "t")
    made.add(b"x")
    assert files.all("t") == []
    made.discard()
    left = FileUpload(files, "t")
    left.add(b"x")
    assert files.all("t") == []
    files.expire(0.0, 1e12)
    assert [each.name for each in files.root.iterdir()] in ([], [".lock"])


def test_a_batch_that_is_refused_has_ended(tmp_path):
    folder, job = JobsFolder(tmp_path / "jobs", Bounds(9, 999, 1)), Job("batch_1", "", 9.0, "t", endpoint=CHAT)
    Upload(folder, job).commit(5.0, {"errors": ["x"]}, "line 3 is wrong")
    folder.check_room(Job("b", "", 9.0, "t"))
    reader = JobReader(folder, job.id)
    assert (reader.state.name, reader.ledger.why, reader.ledger.ended_at_s) == ("CANCELLED", "line 3 is wrong", 5.0)
    owned = OwnedJob(folder, job.id, 7, "me")
    owned.close()
    assert owned.ledger.ended == "CANCELLED"
    assert folder.batch(job.id, "t") == ({"errors": ["x"]}, None)
    for name, tenant in ((job.id, "u"), ("batch_2", "t"), ("../x", "t")):
        with pytest.raises(NotFound, match="is not a batch of yours"):
            folder.batch(name, tenant)
