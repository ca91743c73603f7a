"""A word on a choice that nothing makes is an error: it would do nothing."""

from __future__ import annotations

import pytest

from jackfield.engine.core import worker_spec
from jackfield.errors import ConfigError
from oracle_pipeline.bench import run


@pytest.mark.parametrize(
    ("setting", "field", "name"),
    [
        ("ops.phases.decode.force", "ops.phases", "decode"),
        ("ops.kinds.rms_nrm.force", "ops.kinds", "rms_nrm"),
        ("quantization.layers.3.force", "quantization.layers", "3"),
        ("platform.kinds.gpu.force", "platform.kinds", "gpu"),
        ("attention.components.drafter.force", "attention.components", "drafter"),
    ],
)
def test_a_word_that_nothing_asks_for_is_refused(setting: str, field: str, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run(**{setting: "torch"})
    assert (caught.value.field, caught.value.value) == (field, name)


def test_a_word_on_one_op_acts() -> None:
    resolution = run(**{"ops.kinds.rms_norm.force": "torch"})
    decision = next(d for d in resolution.report.decisions if d.request["kind"] == "rms_norm")
    assert (decision.how, decision.setting) == ("forced", "ops.kinds.rms_norm.force")
    assert worker_spec(resolution).named_ops == {"rms_norm"}, "what was named is not folded into another kernel"
