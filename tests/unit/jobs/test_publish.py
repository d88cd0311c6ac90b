import gzip
import random

import fsspec
import orjson
import pyarrow.parquet as pq
import pytest
import zstandard

from blendserve.errors import BlendServeError, ConfigError
from blendserve.jobs import publish as publish_module
from blendserve.jobs.publish import InputOrder, Publication, Target
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
