"""Documents to train on: how they are read, cut and held out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from jackfield.errors import ConfigError
from jackfield.tokenizer import Tokenizer
from jackfield.training.texts import Document, pieces_of, read_documents, split


def written(folder: Path, *lines: str, name: str = "text.txt") -> Path:
    path = folder / name
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def objects(*entries: Any) -> list[str]:
    return [json.dumps(entry) for entry in entries]


def test_lines_of_json(tmp_path: Path) -> None:
    lines = objects({"text": "one"}, {"token_ids": [1, 2], "source": "x"}, {"text": ""})
    assert read_documents(written(tmp_path, *lines, "")) == ["one", [1, 2]]


def test_only_line_feeds_end_lines_of_json(tmp_path: Path) -> None:
    """JSON texts may hold other ends of lines as they are, and a file may begin with a mark of its encoding."""
    lines = ['\ufeff{"text": "a\u2028b"}', '{"text": "c\u0085d"}\r']
    assert read_documents(written(tmp_path, *lines)) == ["a\u2028b", "c\u0085d"]


def test_lines_of_text(tmp_path: Path) -> None:
    assert read_documents(written(tmp_path, "one", "  ", '{"text": "two"}')) == ["one", '{"text": "two"}']
    assert read_documents(written(tmp_path, "[1]", name="list.txt")) == ["[1]"]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (['{"text": 3}'], "document 1: text is no text"),
        (['{"text": "a"}', "plain"], "document 2: no JSON"),
        (['{"text": "a"}', "[1]"], "document 2: no JSON object"),
        (['{"text": "a", "token_ids": [1]}'], "either text or token_ids"),
        (['{"prompt": "a"}'], "either text or token_ids"),
        (['{"token_ids": [1, true]}', '{"token_ids": 4}'], "document 1: token_ids is no list of whole numbers; doc"),
        (['{"token_ids": [1, 99999999999999999999999]}'], "document 1: token_ids is no list of whole numbers"),
        (['{"token_ids": []}'], "no document"),
        ([" "], "no document"),
        (['{"text": 3}'] * 12, "and 2 more"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, lines: Sequence[str], words: str) -> None:
    path = written(tmp_path, *lines)
    with pytest.raises(ConfigError) as caught:
        read_documents(path)
    assert words in caught.value.message
    assert (caught.value.field, caught.value.value) == ("--text", str(path))
    assert '"token_ids"' in caught.value.remedy


def test_the_ending_says_json(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="document 1: no JSON"):
        read_documents(written(tmp_path, "plain", name="text.jsonl"))


@pytest.mark.parametrize("content", [None, b"\xff\xfe\xfa"])
def test_a_file_that_cannot_be_read(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_documents(path)


class Letters:
    """A token for each letter."""

    def encode(self, text: str) -> list[int]:
        return [ord(one) - ord("a") for one in text]


def cut(documents: Sequence[Document], length: int = 4, vocab_size: int = 26) -> list[list[list[int]]]:
    tokenizer = cast(Tokenizer, Letters())
    found = pieces_of(documents, tokenizer, vocab_size, length, Path("text"))
    assert all(piece.dtype == np.int32 for pieces in found for piece in pieces)
    return [[piece.tolist() for piece in pieces] for pieces in found]


def test_long_documents_are_cut_and_short_ends_left_out() -> None:
    assert cut(["abcdefghijk"]) == [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]]
    assert cut(["abcde", "xy", [5, 6, 7]]) == [[[0, 1, 2, 3]], [[5, 6, 7]]]


@pytest.mark.parametrize("ids", [[1, 26, 3], [1, -1, 3], [1, 2, 1 << 40]])
def test_tokens_that_the_target_lacks_are_refused(ids: list[int]) -> None:
    with pytest.raises(ConfigError, match="document 2 has a token that is none of the target's 26"):
        cut(["abc", ids])


def test_nothing_left_is_refused() -> None:
    with pytest.raises(ConfigError, match="no document has 3 tokens"):
        cut(["ab", [1]])


def documents(count: int) -> list[list[np.ndarray[Any, Any]]]:
    return [[np.array([number, part], dtype=np.int32) for part in range(2)] for number in range(count)]


def test_whole_documents_are_held_out() -> None:
    learnt, held = split(documents(20), 0.25, 3, Path("text"))
    assert (len(learnt), len(held)) == (30, 10)
    assert not {int(piece[0]) for piece in learnt} & {int(piece[0]) for piece in held}
    again, _ = split(documents(20), 0.25, 3, Path("text"))
    assert [piece.tolist() for piece in again] == [piece.tolist() for piece in learnt]
    other, _ = split(documents(20), 0.25, 4, Path("text"))
    assert [piece.tolist() for piece in other] != [piece.tolist() for piece in learnt]


def test_a_small_share_is_one_document_and_none_is_none() -> None:
    assert len(split(documents(3), 0.01, 0, Path("text"))[1]) == 2
    assert split(documents(1), 0.0, 0, Path("text"))[1] == []
    with pytest.raises(ConfigError, match="too few documents"):
        split(documents(1), 0.01, 0, Path("text"))
