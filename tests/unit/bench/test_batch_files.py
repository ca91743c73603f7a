"""Batch files: reading requests, and output files that earlier runs left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jackfield.client.batch_lines import BadLine, BatchRequest, answer_line, bad_line, failure_line, read_lines
from jackfield.client.batch_output import BatchOutput
from jackfield.errors import ConfigError

REQUEST = BatchRequest(4, "a", "/v1/x", {})


def line(**changes: Any) -> bytes:
    entry = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "p"}, **changes}
    return json.dumps({name: value for name, value in entry.items() if value is not ...}).encode()


def test_lines_become_requests() -> None:
    found = list(read_lines([line(), b"\n", line(custom_id="b", url="/v1/chat/completions")]))
    body = {"prompt": "p"}
    assert found == [
        BatchRequest(1, "a", "/v1/completions", body),
        BatchRequest(3, "b", "/v1/chat/completions", body),
    ]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b"{", "no JSON: "),
        (b"\xff", "no JSON: "),
        (b"3", "no JSON object"),
        (line(method=..., body=...), "method, body missing"),
        (line(extra=1), "unknown: extra"),
        (line(custom_id=3), "custom_id is no text"),
        (line(custom_id=""), "custom_id is no text"),
        (line(method="GET"), "method must be POST"),
        (line(url="http://else/v1"), "url must be a path, such as /v1/chat/completions"),
        (line(body=[]), "body is no JSON object"),
        (line(body={"stream": True}), "body.stream cannot be true in a batch"),
        (line(method="GET", body=3), "method must be POST; body is no JSON object"),
    ],
)
def test_bad_lines_say_what_is_wrong(bad: bytes, reason: str) -> None:
    _, found = read_lines([line(custom_id="first"), bad])
    assert isinstance(found, BadLine) and found.line == 2
    assert found.reason.startswith(reason)


def test_an_id_that_is_used_twice_makes_the_second_line_bad() -> None:
    first, second = read_lines([line(), line()])
    assert isinstance(first, BatchRequest)
    assert second == BadLine(2, "custom_id 'a' was used on line 1 already")


def test_output_lines_have_the_layout_of_the_batch_api() -> None:
    found = answer_line(REQUEST, 200, "rid", {"id": "cmpl-1"})
    assert list(found) == ["id", "custom_id", "response", "error"] and found["id"].startswith("batch_req_")
    assert found["response"] == {"status_code": 200, "request_id": "rid", "body": {"id": "cmpl-1"}}
    assert answer_line(REQUEST, 400, None, {"id": "cmpl-1"})["response"]["request_id"] == "cmpl-1"
    failed = failure_line(REQUEST, "gone")
    assert (failed["custom_id"], failed["response"]) == ("a", None)
    assert failed["error"] == {"code": "request_failed", "message": "gone", "line": 4}
    bad = bad_line(BadLine(7, "no JSON"))
    assert (bad["custom_id"], bad["response"]) == (None, None)
    assert bad["error"] == {"code": "invalid_line", "message": "line 7: no JSON", "line": 7}


def test_what_is_there_counts_as_done_and_a_cut_line_is_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "out"
    with BatchOutput(file) as output:
        assert output.done == set()
        output.write(answer_line(REQUEST, 200, "r", {}))
        output.write(bad_line(BadLine(2, "x")))
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"id":"batch_req_1","custom_id":"' + b"z" * 200_000)
    with BatchOutput(file) as output:
        assert output.done == {"a", 2}
        output.write(failure_line(BatchRequest(3, "b", "/v1/x", {}), "gone"))
    assert file.read_bytes().startswith(whole) and file.read_bytes().count(b"\n") == 3


@pytest.mark.parametrize("tail", [b"", b"{", b'{"id":"batch_req_12'])
def test_a_file_that_is_all_cut_line_becomes_empty(tmp_path: Path, tail: bytes) -> None:
    file = tmp_path / "out"
    file.write_bytes(tail)
    with BatchOutput(file) as output:
        assert output.done == set()
    assert file.read_bytes() == b""


def test_lines_of_failed_requests_can_be_taken_out(tmp_path: Path) -> None:
    file = tmp_path / "out"
    with BatchOutput(file) as output:
        for name, status in (("a", 200), ("b", 500), ("c", 200)):
            output.write(answer_line(BatchRequest(1, name, "/", {}), status, "r", {}))
        output.write(failure_line(BatchRequest(9, "d", "/", {}), "gone"))
        output.write(bad_line(BadLine(2, "x")))
    file.write_bytes(file.read_bytes() + b'{"id":"bat')
    with BatchOutput(file, retry_failed=True) as output:
        assert output.done == {"a", "c"}
    assert [json.loads(entry)["custom_id"] for entry in file.read_text().splitlines()] == ["a", "c"]
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    "content", ["hello\n", "hello", "{}\n", '{"id": 1}', '{"custom_id": 3, "response": 1, "error": null}\n', "\n"]
)
def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path, content: str) -> None:
    file = tmp_path / "out"
    file.write_text(content)
    for retry in (False, True):
        with pytest.raises(ConfigError, match="line 1 of the output file is no line of a batch's output"):
            BatchOutput(file, retry_failed=retry)
    assert file.read_text() == content


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the output file cannot be written") as caught:
        BatchOutput(tmp_path)
    assert caught.value.field == "--output-file"
