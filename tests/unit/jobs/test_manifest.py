import io
import sys

import pytest

from blendserve.errors import ConfigError
from blendserve.jobs import manifest as manifest_module
from blendserve.jobs.manifest import (
    JobSignature,
    Manifest,
    StreamDigest,
    digest_of_model,
    digested_stdin,
    manifest_path,
)


@pytest.fixture
def path(tmp_path):
    return manifest_path(tmp_path / "out.jsonl")


def compared(path, *inputs, model="m", model_digest="1", save=True, stdin=None, **parameters):
    """What differs from the signature at `path`, which is then replaced."""
    manifest = Manifest(path)
    signature = JobSignature([str(name) for name in inputs], model, model_digest, parameters, stdin)
    differences = manifest.compare(signature)
    if save:
        manifest.save()
    return differences


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"one\ntwo\n")
    return path


def test_the_same_job_does_not_differ(path, source):
    assert compared(path, source, seed=0) == []
    written = path.stat().st_ino
    assert compared(path, source, seed=0) == []
    assert path.stat().st_ino == written, "nothing new, and yet written anew"


def test_everything_that_differs_is_named(path, source):
    compared(path, source, seed=0, dtype="auto")
    assert compared(path, source, model="n", model_digest="2", seed=1, engine="native", save=False) == [
        "model: m earlier, n now",
        "model files: not those of the earlier run",
        "seed: 0 earlier, 1 now",
        "dtype: auto earlier, None now",
        "engine: None earlier, native now",
    ]


def test_results_of_an_older_format_differ(path, source, monkeypatch):
    compared(path, source)
    monkeypatch.setattr(manifest_module, "FORMAT_VERSION", 2)
    assert compared(path, source) == ["format_version: 1 earlier, 2 now"]


@pytest.mark.parametrize(
    ("content", "is_same_job"),
    [
        (b"one\ntwo\nthree\n", True),
        (b"one\ntwo\n", True),
        (b"one\n", False),
        (b"", False),
        (b"two\none\n", False),
        (b"zero\none\ntwo\n", False),
    ],
)
def test_an_input_may_grow_and_not_change(path, source, content, is_same_job):
    compared(path, source)
    source.write_bytes(content)
    assert (compared(path, source) == []) == is_same_job


def test_an_empty_input_may_grow(path, source):
    source.write_bytes(b"")
    compared(path, source)
    source.write_bytes(b"one\n")
    assert compared(path, source) == []


def test_an_input_that_was_moved_is_the_same(path, source, tmp_path):
    compared(path, source)
    assert compared(path, source.rename(tmp_path / "elsewhere.jsonl")) == []


def test_inputs_may_be_added_and_not_removed(path, source, tmp_path):
    other = tmp_path / "a.jsonl"
    other.write_bytes(b"three\n")
    compared(path, source)
    assert compared(path, other, source) == []
    assert compared(path, other) == [f"{source}: an input of the earlier run, missing now"]


def test_an_input_that_cannot_be_read(path, tmp_path):
    with pytest.raises(ConfigError, match="cannot read the input"):
        compared(path, tmp_path / "missing.jsonl")


def test_what_is_read_once_is_not_digested(path):
    assert compared(path, "/dev/null") == []
    assert compared(path, "/dev/null") == []


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"inputs": 1, "parameters": {}}'])
def test_a_file_that_is_no_signature(path, content):
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is not the signature of a job"):
        Manifest(path)


@pytest.mark.parametrize(
    ("second", "num_read", "is_same_job"),
    [
        (b"one\ntwo\n", -1, True),
        (b"one\ntwo\nthree\n", -1, True),
        (b"one\ntwo\nthree\n", 2, True),
        (b"one\n", -1, False),
        (b"ten\ntwo\nthree\n", -1, False),
    ],
)
def test_standard_input_is_compared_once_it_was_read(path, monkeypatch, second, num_read, is_same_job):
    def run(content, num_read):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        with digested_stdin() as digest:
            manifest = Manifest(path)
            assert manifest.compare(JobSignature(["-"], "m", "1", {}, digest)) == []
            read = sys.stdin.buffer.read(num_read)
            assert content.startswith(read)
            differences = manifest.compare_stdin(digest)
            manifest.save()
        return differences

    assert run(b"one\ntwo\n", -1) == []
    assert (run(second, num_read) == []) == is_same_job


@pytest.mark.parametrize("sizes", [[10], [4, 6], [3, 3, 4], [1] * 10, [0, 4, 0, 6]])
def test_a_digest_is_the_same_however_the_bytes_come(sizes):
    content, whole = b"0123456789", StreamDigest(checkpoint=4)
    prefix = StreamDigest()
    prefix.update(content[:4])
    for size in sizes:
        whole.update(content[:size])
        content = content[size:]
    assert whole.at_checkpoint == prefix.hexdigest
    assert whole.num_bytes == 10


def test_the_digest_of_a_model_sees_weights_tokenizer_and_config(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(5 << 20))
    (tmp_path / "README.md").write_text("about")
    seen = [digest_of_model(tmp_path)]
    (tmp_path / "README.md").write_text("more about")
    assert digest_of_model(tmp_path) == seen[0]
    (tmp_path / "tokenizer.json").write_text("{}")
    seen.append(digest_of_model(tmp_path))
    for place in (0, 5 << 19, (5 << 20) - 1):
        with (tmp_path / "model.safetensors").open("r+b") as file:
            file.seek(place)
            file.write(b"\1")
        seen.append(digest_of_model(tmp_path))
    assert len(set(seen)) == len(seen)
