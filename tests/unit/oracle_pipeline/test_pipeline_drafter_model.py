"""A draft model that nothing would read is an error."""

from __future__ import annotations

import pytest

from jackfield.errors import ConfigError
from oracle_pipeline.bench import run


def test_a_draft_model_that_the_drafter_does_not_need_is_refused() -> None:
    settings = {"speculative.method": "ngram", "speculative.model": "some/model"}
    with pytest.raises(ConfigError, match="drafter ngram needs no draft model") as caught:
        run(**settings)
    assert caught.value.field == "speculative.model"
