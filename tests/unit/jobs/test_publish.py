import gzip
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import fsspec
import orjson
import pyarrow.parquet as pq
import pytest
import zstandard

from blendserve.errors import BlendServeError, ConfigError
from blendserve.jobs import publish as publish_module
from blendserve.jobs.openai_format import LineError, expired_line, failure_line
from blendserve.jobs.publish import InputOrder, Publication, Target
from blendserve.jobs.sources import find_sources, read_lines
from blendserve.jobs.storage import remote_version
from tests.unit.jobs.test_store import result_line

IDS = [f"id-{index}" for index in range(50)]


@pytest.fixture
def working(tmp_path, monkeypatch):
    """Results in the order in which they finished, in the current folder."""
    monkeypatch.chdir(tmp_path)
    ids = IDS.copy()
    random.Random(0).shuffle(ids)
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"".join(map(result_line, ids)))
    return path


def in_input_order(publication):
    for custom_id in IDS:
        publication.order.add(custom_id)
    return publication


WANTED = b"".join(map(result_line, IDS))


@pytest.mark.parametrize(
    ("path", "working"),
    [
        ("out.jsonl", "out.jsonl"),
        ("-", "-"),
        ("a/out.jsonl.gz", "a/out.jsonl"),
        ("out.jsonl.zst", "out.jsonl"),
        ("a/out.parquet", "a/out.jsonl"),
        ("memory://bucket/out.jsonl", "out.jsonl"),
        ("memory://bucket/a/out.jsonl.gz", "out.jsonl"),
        ("file:///a/out.jsonl", "/a/out.jsonl"),
    ],
)
def test_the_working_file_is_local_jsonl(path, working):
    assert Target.of(path).working == working


def test_failures_go_where_results_go():
    assert Publication("a/out.jsonl.gz", None, ordered=False).errors is None
    publication = Publication("memory://b/c/out.jsonl.gz", None, ordered=False)
    assert publication.errors.path == "memory://b/c/out.errors.jsonl"
    assert publication.working_errors == "out.errors.jsonl"


@pytest.mark.parametrize("path", ["nowhere://a/out.jsonl", "memory://", "memory://a/"])
def test_a_url_that_cannot_be(path):
    with pytest.raises(ConfigError, match=path):
        Target.of(path)


def test_a_plain_output_is_left_alone(working):
    before = working.read_bytes()
    assert Publication("out.jsonl", None, ordered=False).write() == []
    assert working.read_bytes() == before


def test_ordered_results_take_the_place_of_the_unordered(working):
    assert in_input_order(Publication("out.jsonl", None, ordered=True)).write() == []
    assert working.read_bytes() == WANTED
    inode = working.stat().st_ino
    in_input_order(Publication("out.jsonl", None, ordered=True)).write()
    assert working.stat().st_ino == inode, "nothing to do, and yet written anew"


def test_results_that_are_not_in_the_input_come_last(working):
    working.write_bytes(b"".join(map(result_line, ["x", "id-3", "y", "id-1"])))
    in_input_order(Publication("out.jsonl", None, ordered=True)).write()
    assert working.read_bytes() == b"".join(map(result_line, ["id-1", "id-3", "x", "y"]))


def test_an_input_without_lines(working):
    before = working.read_bytes()
    Publication("out.jsonl", None, ordered=True).write()
    assert working.read_bytes() == before


def test_an_id_that_comes_twice_counts_where_it_came_first():
    order = InputOrder()
    for custom_id in ("a", "b", "a"):
        order.add(custom_id)
    hashes = publish_module.np.array([publish_module._hash64(i) for i in "abc"], dtype="uint64")
    assert order.positions(hashes).tolist() == [0, 1, 3]


def test_gzip_zstandard_and_parquet_hold_the_lines_in_order(working):
    before = working.read_bytes()
    for name in ("out.jsonl.gz", "out.jsonl.zst", "out.parquet"):
        (made,) = in_input_order(Publication(name, None, ordered=True)).write()
        assert made == Target(name, "out.jsonl")
    assert gzip.decompress((working.parent / "out.jsonl.gz").read_bytes()) == WANTED
    with zstandard.open(working.parent / "out.jsonl.zst", "rb") as file:
        assert file.read() == WANTED
    table = pq.read_table(working.parent / "out.parquet")
    assert table["custom_id"].to_pylist() == IDS
    assert working.read_bytes() == before


def test_a_row_of_parquet_has_the_text_and_all_of_the_body(working):
    body = {
        "id": "chatcmpl-1",
        "model": "m",
        "choices": [{"index": 0, "message": {"content": "ö"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    }
    response = {"status_code": 200, "request_id": "r", "body": body}
    expired = {"id": "2", "custom_id": "b", "response": None, "error": {"code": "batch_expired"}}
    lines = [{"id": "1", "custom_id": "a", "response": response, "error": None}, expired]
    working.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    Publication("out.parquet", None, ordered=False).write()
    first, second = pq.read_table(working.parent / "out.parquet").to_pylist()
    assert orjson.loads(first.pop("body")) == body
    assert first == {
        "id": "1",
        "custom_id": "a",
        "status_code": 200,
        "request_id": "r",
        "model": "m",
        "text": "ö",
        "finish_reason": "stop",
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "error": None,
    }
    assert (second["custom_id"], second["status_code"]) == ("b", None)
    assert orjson.loads(second["error"]) == {"code": "batch_expired"}


def test_results_and_failures_are_uploaded_and_the_local_files_kept(working):
    (working.parent / "out.errors.jsonl").write_bytes(b"{}\n")
    made = Publication("memory://bucket/out.jsonl.gz", None, ordered=False).write()
    assert [target.path for target in made] == [
        "memory://bucket/out.errors.jsonl",
        "memory://bucket/out.jsonl.gz",
    ]
    storage = fsspec.filesystem("memory")
    assert gzip.decompress(storage.cat("/bucket/out.jsonl.gz")) == working.read_bytes()
    assert storage.cat("/bucket/out.errors.jsonl") == b"{}\n"


def test_an_upload_that_fails_keeps_both_what_was_there_and_the_local_file(working, monkeypatch):
    storage = fsspec.filesystem("memory")
    storage.pipe("/other/out.jsonl", b"earlier")

    def broken(path):
        yield b"half\n"
        raise TimeoutError("the network is down")

    before = working.read_bytes()
    target = Target.of("memory://other/out.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(publish_module, "_lines", broken)
        with pytest.raises(BlendServeError, match=r"the network is down; all results are in out\.jsonl"):
            target.write(None)
    assert storage.cat("/other/out.jsonl") == b"earlier"
    assert working.read_bytes() == before
    target.write(None)
    assert storage.cat("/other/out.jsonl") == before


def test_results_whose_working_file_is_gone_are_not_replaced(working):
    publication = Publication("out.jsonl.gz", None, ordered=False)
    publication.check()
    publication.write()
    publication.check()
    working.unlink()
    with pytest.raises(ConfigError, match=r"out\.jsonl\.gz exists, but not out\.jsonl.*--restart"):
        publication.check()


@pytest.mark.parametrize("output", ["-", "/dev/null"])
def test_a_stream_cannot_be_sorted(output):
    with pytest.raises(ConfigError, match="give -o a file"):
        Publication(output, None, ordered=True)


# -------- failed lines among the results --------


def failure(line, custom_id, file=None):
    return failure_line(LineError(line, custom_id, "invalid_request", f"bad {line}", file=file))


def test_failed_lines_stand_in_their_place_in_the_output(working):
    publication = Publication("a.jsonl", None, ordered=False, errors_in_output=True)
    assert (publication.output.working, publication.working_errors) == ("a.results.jsonl", "a.errors.jsonl")
    assert set(publication.files) == {"a.jsonl", "a.results.jsonl", "a.errors.jsonl"}
    for line, custom_id in [(1, "x"), (3, None), (4, "y"), (5, "x"), (7, "z"), (8, "late")]:
        publication.order.add(custom_id, line)
    (working.parent / "a.results.jsonl").write_bytes(result_line("z") + result_line("x"))
    expired = orjson.loads(expired_line("late"))
    errors = failure(3, None) + failure(5, "x") + failure(4, "y") + orjson.dumps(expired) + b"\n"
    (working.parent / "a.errors.jsonl").write_bytes(errors)
    (made,) = publication.write()
    assert made.path == "a.jsonl"
    lines = (working.parent / "a.jsonl").read_bytes().splitlines(keepends=True)
    assert (lines[0], lines[4]) == (result_line("x"), result_line("z"))
    failed = [orjson.loads(line) for line in (*lines[1:4], lines[5])]
    assert [line["custom_id"] for line in failed] == [None, "y", "x", "late"]
    assert [line["error"]["error"]["message"] for line in failed[:3]] == ["bad 3", "bad 4", "bad 5"]
    assert [line["response"]["status_code"] for line in failed[:3]] == [400] * 3
    assert all(line["response"]["body"] is None for line in failed[:3])
    assert failed[3] == expired


def test_places_of_lines_of_several_files():
    order = InputOrder()
    for file, line in [("a", 1), ("a", 4), ("b", 1), ("b", 2), ("c", 9)]:
        order.add(f"{file}{line}", line, file)
    assert [order.place_of(line, file) for file, line in [("a", 4), ("b", 1), ("b", 2), ("c", 9)]] == [
        1,
        2,
        3,
        4,
    ]


def test_results_may_grow_in_another_folder(working):
    folder = working.parent / "other"
    folder.mkdir()
    publication = Publication("out.jsonl.gz", "bad.jsonl", ordered=False, working_dir=str(folder))
    assert publication.output.working == str(folder / "out.jsonl")
    assert publication.working_errors == str(folder / "bad.jsonl")


def test_failed_lines_have_no_place_on_standard_output():
    with pytest.raises(ConfigError, match="--errors-in-output"):
        Publication("-", None, ordered=False, errors_in_output=True)


# -------- web addresses --------


class WebFiles(BaseHTTPRequestHandler):
    """Files that are read by GET and written by PUT."""

    files: ClassVar[dict[str, bytes]] = {}

    def do_GET(self):
        self.send_response(200 if self.path in self.files else 404)
        self.send_header("ETag", f'"{hash(self.files.get(self.path))}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(self.files.get(self.path, b""))

    do_HEAD = do_GET  # noqa: N815

    def do_PUT(self):
        self.files[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(403 if "forbidden" in self.path else 200)
        self.end_headers()

    def log_message(self, *_arguments):
        pass


@pytest.fixture
def web(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    WebFiles.files = {}
    with ThreadingHTTPServer(("127.0.0.1", 0), WebFiles) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_results_are_put_at_a_web_address(working, web):
    for name in ("out.jsonl", "out.jsonl.gz"):
        publication = in_input_order(Publication(f"{web}/{name}?signature=a/b", None, ordered=True))
        assert (publication.output.working, publication.errors) == ("out.jsonl", None)
        publication.check()
        publication.write()
    plain, packed = WebFiles.files["/out.jsonl?signature=a/b"], WebFiles.files["/out.jsonl.gz?signature=a/b"]
    assert plain == gzip.decompress(packed) == WANTED


def test_a_web_address_that_takes_nothing(working, web):
    with pytest.raises(BlendServeError, match=r"403.*all results are in out\.jsonl"):
        Publication(f"{web}/forbidden/out.jsonl", "bad.jsonl", ordered=False).write()


def test_lines_are_read_from_a_web_address(web):
    WebFiles.files["/in.jsonl"] = b'{"a": 1}\n\n{"b": 2}\n'
    (source,) = find_sources([f"{web}/in.jsonl"])
    assert [(line.number, line.content) for line in read_lines(source)] == [
        (1, b'{"a": 1}'),
        (3, b'{"b": 2}'),
    ]
    version = remote_version(source.path)
    WebFiles.files["/in.jsonl"] += b"{}"
    assert version != remote_version(source.path)
    (missing,) = find_sources([f"{web}/missing.jsonl"])
    with pytest.raises(ConfigError, match="404"):
        list(read_lines(missing))
