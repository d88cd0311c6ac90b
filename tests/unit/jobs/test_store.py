import os

import orjson
import pytest

from blendserve.errors import BlendServeError, ConfigError
from blendserve.jobs import store as store_module
from blendserve.jobs.openai_format import LineError, failure_line
from blendserve.jobs.store import IdSet, ResultStore, default_errors_path

FAILURE = failure_line(LineError(1, None, "invalid_json_line", "bad"))


def result_line(custom_id, model="m"):
    return orjson.dumps(
        {
            "id": f"batch_req_{custom_id}",
            "custom_id": custom_id,
            "response": {"status_code": 200, "request_id": "r", "body": {"model": model}},
            "error": None,
        },
        option=orjson.OPT_APPEND_NEWLINE,
    )


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out.jsonl"


def done_of(output, **options):
    """Which of the ids of these tests an output has."""
    with ResultStore(output, model="m", **options) as store:
        store.flush()
        found = {custom_id for custom_id in "abcdef" if custom_id in store.done}
        assert len(found) == len(store.done)
        return found


def test_lines_are_written_at_the_end_of_a_step(output):
    with ResultStore(output, model="m") as store:
        store.write_result(result_line("a"))
        store.write_error(FAILURE)
        store.write_result(result_line("b"))
        assert output.read_bytes() == b""
        store.flush()
        assert output.read_bytes() == result_line("a") + result_line("b")
        assert default_errors_path(output).read_bytes() == FAILURE


def test_errors_lie_beside_the_output():
    assert default_errors_path("dir/out.jsonl").as_posix() == "dir/out.errors.jsonl"
    assert default_errors_path("out").as_posix() == "out.errors"


def test_resume_keeps_results_and_empties_the_error_file(output):
    with ResultStore(output, model="m") as store:
        store.write_result(result_line("a"))
        store.write_error(FAILURE)
        store.flush()
    with ResultStore(output, model="m") as store:
        assert "a" in store.done
        assert default_errors_path(output).read_bytes() == FAILURE
        store.write_result(result_line("b"))
        store.flush()
        assert default_errors_path(output).read_bytes() == b""
    assert output.read_bytes() == result_line("a") + result_line("b")


def test_restart_starts_over(output):
    output.write_bytes(b"anything at all\n" + result_line("a", model="other"))
    assert done_of(output, restart=True) == set()
    assert output.read_bytes() == b""


@pytest.mark.parametrize("torn", [result_line("b")[:-2], b'{"id', b"{", b'{"id": "ba\n', b"\0" * 100])
def test_a_torn_last_line_is_cut_off(output, torn):
    output.write_bytes(result_line("a") + torn)
    assert done_of(output) == {"a"}
    assert output.read_bytes() == result_line("a")


def test_a_last_line_that_lacks_only_its_lf_is_kept(output):
    output.write_bytes(result_line("a") + result_line("b")[:-1])
    with ResultStore(output, model="m") as store:
        assert "a" in store.done
        assert "b" in store.done
        store.write_result(result_line("c"))
        store.flush()
    assert output.read_bytes() == result_line("a") + result_line("b") + result_line("c")


@pytest.mark.parametrize(
    "content",
    [
        b"notes of mine",
        b'{"a": 1}',
        b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}\n',
        b'{"torn\n' + result_line("a"),
        FAILURE,
        b"[1]\n",
        b'{"custom_id": "a", "response": null}\n',
    ],
)
def test_a_file_that_is_no_batch_output_is_refused_untouched(output, content):
    output.write_bytes(content)
    with pytest.raises(ConfigError, match=r"line 1 of .*out\.jsonl"):
        ResultStore(output, model="m")
    assert output.read_bytes() == content


def test_results_of_another_model_are_refused_untouched(output):
    output.write_bytes(result_line("a", model="other") + b'{"torn')
    with pytest.raises(ConfigError, match=r"model 'other', but this job runs 'm'; .*--restart"):
        ResultStore(output, model="m")
    assert output.read_bytes() == result_line("a", model="other") + b'{"torn'


@pytest.mark.parametrize("content", [result_line("a"), b"notes of mine\n"])
def test_an_error_file_that_holds_something_else_is_not_emptied(output, tmp_path, content):
    errors = tmp_path / "precious.jsonl"
    errors.write_bytes(content)
    output.write_bytes(result_line("a") + b'{"torn')
    with pytest.raises(ConfigError, match="precious"):
        ResultStore(output, errors, model="m")
    assert errors.read_bytes() == content
    assert output.read_bytes() == result_line("a") + b'{"torn'


def test_one_process_at_a_time(output):
    with ResultStore(output, model="m"), pytest.raises(ConfigError, match="in use by another job"):
        ResultStore(output, model="m", restart=True)
    assert done_of(output) == set()


def test_refusal_releases_the_files(output):
    output.write_bytes(result_line("a", model="other"))
    with pytest.raises(ConfigError, match="model"):
        ResultStore(output, model="m")
    with ResultStore(output, model="other") as store:
        assert "a" in store.done


def test_the_input_is_never_an_output(output, tmp_path):
    output.write_bytes(b"the input\n")
    link = tmp_path / "link.jsonl"
    link.symlink_to(output)
    with pytest.raises(ConfigError, match="input"):
        ResultStore(link, model="m", inputs=[output], restart=True)
    with pytest.raises(ConfigError, match="input"):
        ResultStore(tmp_path / "other.jsonl", output, model="m", inputs=[output], restart=True)
    assert output.read_bytes() == b"the input\n"


def test_output_and_errors_are_two_files(output):
    with pytest.raises(ConfigError, match="both the output and the error file"):
        ResultStore(output, output, model="m")


def test_an_output_that_cannot_be_opened(tmp_path):
    with pytest.raises(ConfigError, match="No such file or directory"):
        ResultStore(tmp_path / "nowhere" / "out.jsonl", model="m")


def test_standard_output_takes_results_and_errors(capsysbinary):
    with ResultStore("-", model="m") as store:
        assert len(store.done) == 0
        store.write_result(result_line("a"))
        store.flush()
        store.write_error(FAILURE)
        store.flush()
    assert capsysbinary.readouterr().out == result_line("a") + FAILURE


def test_standard_output_with_an_error_file(capsysbinary, tmp_path):
    with ResultStore("-", tmp_path / "errors.jsonl", model="m") as store:
        store.write_error(FAILURE)
        store.flush()
    assert capsysbinary.readouterr().out == b""
    assert (tmp_path / "errors.jsonl").read_bytes() == FAILURE


def test_a_device_is_a_stream():
    with ResultStore(os.devnull, model="m") as store:
        store.write_result(result_line("a"))
        store.write_error(FAILURE)
        store.sync()


@pytest.mark.parametrize(("interval_s", "expected"), [(1.0, [1.2, 2.5]), (0.0, [0.1, 0.5, 1.2, 1.3, 2.0])])
def test_syncs_once_an_interval_and_when_asked(output, monkeypatch, interval_s, expected):
    now, syncs = [0.0], []
    monkeypatch.setattr(store_module.time, "monotonic", lambda: now[0])
    with ResultStore(output, model="m", flush_interval_s=interval_s) as store:
        monkeypatch.setattr(store_module.os, "fsync", lambda fd: syncs.append(now[0]))
        for second in (0.1, 0.5, 1.2, 1.3, 2.0):
            now[0] = second
            store.write_result(result_line(str(second)))
            store.flush()
        now[0] = 2.5
        store.flush()
        store.flush()
        assert syncs == expected
        store.write_result(result_line("last"))
        store.sync()
        store.sync()
        assert syncs == [*expected, 2.5]
    store.close()


def test_a_step_is_one_write_and_a_long_one_is_written_in_between(output, monkeypatch):
    writes = []
    monkeypatch.setattr(
        store_module.os, "write", lambda fd, content: writes.append(len(content)) or len(content)
    )
    line = result_line("a")
    with ResultStore(output, model="m") as store:
        for _ in range(100):
            store.write_result(line)
        store.flush()
        assert writes == [100 * len(line)]
        monkeypatch.setattr(store_module, "_MAX_GATHERED_BYTES", 10 * len(line))
        for _ in range(25):
            store.write_result(line)
        store.flush()
        assert writes[1:] == [10 * len(line), 10 * len(line), 5 * len(line)]


@pytest.mark.parametrize("num_bytes", [0, 10, len(result_line("b")), len(result_line("b")) + 1])
def test_a_full_disk_leaves_whole_lines_only(output, monkeypatch, num_bytes):
    def full(fd, content, write=os.write):
        if num_bytes and len(content) > num_bytes and not written:
            written.append(write(fd, content[:num_bytes]))
            return num_bytes
        raise OSError(28, "No space left on device")

    written = []
    with ResultStore(output, model="m") as store:
        store.write_result(result_line("a"))
        store.flush()
        monkeypatch.setattr(store_module.os, "write", full)
        store.write_result(result_line("b"))
        store.write_result(result_line("c"))
        with pytest.raises(BlendServeError, match=r"No space left on device.*run the same command again"):
            store.flush()
    kept = result_line("b") if num_bytes >= len(result_line("b")) else b""
    assert output.read_bytes() == result_line("a") + kept


def test_a_partial_write_is_completed(output, monkeypatch):
    monkeypatch.setattr(store_module.os, "write", lambda fd, content, write=os.write: write(fd, content[:7]))
    with ResultStore(output, model="m") as store:
        store.write_result(result_line("a"))
        store.flush()
    assert output.read_bytes() == result_line("a")


def test_a_run_that_does_not_start_changes_nothing(output):
    before = result_line("a") + b'{"torn'
    output.write_bytes(before)
    default_errors_path(output).write_bytes(FAILURE)
    ResultStore(output, model="m", restart=True).close()
    ResultStore(output, model="m").close()
    assert output.read_bytes() == before
    assert default_errors_path(output).read_bytes() == FAILURE


def test_a_file_replaced_between_open_and_lock_is_not_written_to(output, monkeypatch):
    """Another job may put its sorted file there meanwhile; results would go to the file that nobody sees."""

    def flock(fd, operation, flock=store_module.fcntl.flock):
        flock(fd, operation)
        other = output.with_name("other")
        other.write_bytes(result_line("a"))
        other.replace(output)

    monkeypatch.setattr(store_module.fcntl, "flock", flock)
    with pytest.raises(ConfigError, match="in use by another job"):
        ResultStore(output, model="m")


def test_id_sets_know_what_was_added():
    ids = IdSet()
    assert "a" not in ids
    for index in range(1000):
        ids.add(f"id-{index % 700}")
    assert len(ids) == 700
    ids.add("späť")
    assert all(f"id-{index}" in ids for index in range(700))
    assert "späť" in ids
    assert not any(f"id-{index}" in ids for index in range(700, 2000))
    assert len(ids) == 701
    assert 7 not in ids


def test_ids_whose_hashes_agree_in_the_first_half_are_told_apart(monkeypatch):
    monkeypatch.setattr(store_module, "hash128", lambda custom_id: b"same-num" + custom_id.rjust(8).encode())
    ids = IdSet()
    for custom_id in ("x", "b", "m"):
        ids.add(custom_id)
    assert [custom_id in ids for custom_id in "xbmacz"] == [True] * 3 + [False] * 3
