"""A draft model that nothing would read is an error, and so is a way to draw drafts where none are drawn."""

from __future__ import annotations

import pytest

from jackfield.errors import ConfigError
from oracle_pipeline.bench import run


def test_a_draft_model_that_the_drafter_does_not_need_is_refused() -> None:
    settings = {"speculative.method": "ngram", "speculative.model": "some/model"}
    with pytest.raises(ConfigError, match="drafter ngram needs no draft model") as caught:
        run(**settings)
    assert caught.value.field == "speculative.model"


@pytest.mark.parametrize(("name", "value"), [("draft_sample_method", "greedy"), ("rejection_sample_method", "block")])
def test_a_way_to_draw_is_refused_where_drafts_are_certain(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match="drafter ngram draws nothing") as caught:
        run(**{"speculative.method": "ngram", f"speculative.{name}": value})
    assert (caught.value.field, caught.value.value) == (f"speculative.{name}", value)
