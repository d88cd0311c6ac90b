import os

import orjson
import pytest

from blendserve.errors import BlendServeError, ConfigError
from blendserve.jobs import store as store_module
from blendserve.jobs.openai_format import LineError, failure_line
from blendserve.jobs.store import ResultStore, default_errors_path

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
    with ResultStore(output, model="m", **options) as store:
        return set(store.done)


def test_lines_are_on_disk_as_soon_as_they_are_written(output):
    with ResultStore(output, model="m") as store:
        store.write_result(result_line("a"))
        store.write_error(FAILURE)
        assert output.read_bytes() == result_line("a")
        assert default_errors_path(output).read_bytes() == FAILURE


def test_errors_lie_beside_the_output():
    assert default_errors_path("dir/out.jsonl").as_posix() == "dir/out.errors.jsonl"
    assert default_errors_path("out").as_posix() == "out.errors"


def test_resume_keeps_results_and_empties_the_error_file(output):
    with ResultStore(output, model="m") as store:
        store.write_result(result_line("a"))
        store.write_error(FAILURE)
    with ResultStore(output, model="m") as store:
        assert set(store.done) == {"a"}
        assert default_errors_path(output).read_bytes() == b""
        store.write_result(result_line("b"))
    assert output.read_bytes() == result_line("a") + result_line("b")


def test_overwrite_starts_over(output):
    output.write_bytes(b"anything at all\n" + result_line("a", model="other"))
    assert done_of(output, overwrite=True) == set()
    assert output.read_bytes() == b""


@pytest.mark.parametrize("torn", [result_line("b")[:-2], b'{"id', b"{", b'{"id": "ba\n', b"\0" * 100])
def test_a_torn_last_line_is_cut_off(output, torn):
    output.write_bytes(result_line("a") + torn)
    assert done_of(output) == {"a"}
    assert output.read_bytes() == result_line("a")


def test_a_last_line_that_lacks_only_its_lf_is_kept(output):
    output.write_bytes(result_line("a") + result_line("b")[:-1])
    with ResultStore(output, model="m") as store:
        assert set(store.done) == {"a", "b"}
        store.write_result(result_line("c"))
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
    with pytest.raises(ConfigError, match=r"model 'other', but this job runs 'm'; .*overwrite"):
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
        ResultStore(output, model="m", overwrite=True)
    assert done_of(output) == set()


def test_refusal_releases_the_files(output):
    output.write_bytes(result_line("a", model="other"))
    with pytest.raises(ConfigError, match="model"):
        ResultStore(output, model="m")
    with ResultStore(output, model="other") as store:
        assert set(store.done) == {"a"}


def test_the_input_is_never_an_output(output, tmp_path):
    output.write_bytes(b"the input\n")
    link = tmp_path / "link.jsonl"
    link.symlink_to(output)
    with pytest.raises(ConfigError, match="input"):
        ResultStore(link, model="m", inputs=[output], overwrite=True)
    with pytest.raises(ConfigError, match="input"):
        ResultStore(tmp_path / "other.jsonl", output, model="m", inputs=[output], overwrite=True)
    assert output.read_bytes() == b"the input\n"


def test_output_and_errors_are_two_files(output):
    with pytest.raises(ConfigError, match="both the output and the error file"):
        ResultStore(output, output, model="m")


def test_an_output_that_cannot_be_opened(tmp_path):
    with pytest.raises(ConfigError, match="No such file or directory"):
        ResultStore(tmp_path / "nowhere" / "out.jsonl", model="m")


def test_standard_output_takes_results_and_errors(capsysbinary):
    with ResultStore("-", model="m") as store:
        assert set(store.done) == set()
        store.write_result(result_line("a"))
        store.write_error(FAILURE)
    assert capsysbinary.readouterr().out == result_line("a") + FAILURE


def test_standard_output_with_an_error_file(capsysbinary, tmp_path):
    with ResultStore("-", tmp_path / "errors.jsonl", model="m") as store:
        store.write_error(FAILURE)
    assert capsysbinary.readouterr().out == b""
    assert (tmp_path / "errors.jsonl").read_bytes() == FAILURE


def test_a_device_is_a_stream():
    with ResultStore(os.devnull, model="m") as store:
        store.write_result(result_line("a"))
        store.write_error(FAILURE)


def test_syncs_at_most_once_a_second_and_at_close(output, monkeypatch):
    now, syncs = [0.0], []
    monkeypatch.setattr(store_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(store_module.os, "fsync", lambda fd: syncs.append(now[0]))
    with ResultStore(output, model="m") as store:
        for second in (0.1, 0.5, 1.2, 1.3, 2.0):
            now[0] = second
            store.write_result(result_line(str(second)))
        now[0] = 2.5
        store.sync_if_due()
        store.sync_if_due()
        assert syncs == [1.2, 2.5]
        store.write_result(result_line("last"))
    assert syncs == [1.2, 2.5, 2.5]
    store.close()


def test_a_full_disk_leaves_no_half_line(output, monkeypatch):
    class FullDisk:
        def __init__(self, file):
            self.file = file

        def write(self, line):
            self.file.write(line[:10])
            raise OSError(28, "No space left on device")

        def __getattr__(self, name):
            return getattr(self.file, name)

    with ResultStore(output, model="m") as store:
        store.write_result(result_line("a"))
        monkeypatch.setattr(store._output, "_file", FullDisk(store._output._file))
        with pytest.raises(BlendServeError, match="No space left on device"):
            store.write_result(result_line("b"))
    assert output.read_bytes() == result_line("a")


def test_a_partial_write_is_completed(output, monkeypatch):
    class Dribble:
        def __init__(self, file):
            self.file = file

        def write(self, line):
            return self.file.write(line[:7])

        def __getattr__(self, name):
            return getattr(self.file, name)

    with ResultStore(output, model="m") as store:
        monkeypatch.setattr(store._output, "_file", Dribble(store._output._file))
        store.write_result(result_line("a"))
    assert output.read_bytes() == result_line("a")
