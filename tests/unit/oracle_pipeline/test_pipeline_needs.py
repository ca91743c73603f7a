"""What layers need because of what they are, and because of the drafter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jackfield.errors import ConfigError, NoCandidateError
from jackfield.interfaces import Band, Preference, Settings
from jackfield_models.llama import Llama
from jackfield_spec_decode.ngram import NgramDrafter
from oracle_pipeline.bench import fitting, run

GOOD = fitting("good", preference=classmethod(lambda cls, request: Preference(Band.GOOD)))


class Unlike(Llama):
    """A Llama whose values are smaller than its keys."""

    name = "UnlikeForCausalLM"
    kinds = frozenset({"UnlikeForCausalLM"})
    gguf_architectures = frozenset()

    @classmethod
    def attention_groups(cls, config: Any) -> Any:
        return tuple(replace(group, value_head_size=8) for group in super().attention_groups(config))


class Branching(NgramDrafter):
    """Drafts that branch."""

    name = "branching"
    kinds = frozenset({"branching"})

    @classmethod
    def branches(cls, settings: Settings) -> bool:
        return True


def test_values_of_another_size_are_a_need() -> None:
    assert run(GOOD).attention[0].prefill.name == "good"
    found = run(GOOD, Unlike, model={"architectures": ["UnlikeForCausalLM"]}).attention[0]
    assert "diff_kv" in found.request.needs and found.prefill.name == "torch_sdpa"


def test_drafts_that_branch_are_a_need_of_all_layers() -> None:
    resolution = run(GOOD, Branching, speculative={"method": "branching", "num_speculative_tokens": 20})
    (found,) = resolution.attention
    assert "tree" in found.request.needs and found.prefill.name == "torch_sdpa"
    assert resolution.config.speculative.adaptive is False
    assert "tree" not in run(GOOD, Branching, speculative={"method": "ngram"}).attention[0].request.needs


def test_where_no_backend_has_them_the_engine_does_not_start() -> None:
    with pytest.raises(NoCandidateError, match="tree"):
        run(GOOD, Branching, speculative={"method": "branching"}, attention={"force": "good"})


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ({"num_speculative_tokens": 64}, "speculative.num_speculative_tokens"),
        ({"adaptive": True}, "speculative.adaptive"),
    ],
)
def test_settings_that_do_not_go_with_branches_are_refused(words: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run(Branching, speculative={"method": "branching", **words})
    assert caught.value.field == field
