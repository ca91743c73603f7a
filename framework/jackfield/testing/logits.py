"""Conformance of logits processors: rows are processed one by one, whoever their mates are.

Legend: R rows, V vocabulary, L tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch

from jackfield.interfaces import LogitsEnv, LogitsProcessor, LogitsRow
from jackfield.protocol import SamplingParams
from jackfield.testing.bench import Bench
from jackfield.testing.common import PluginConformance

VOCABULARY = 32


class LogitsProcessorConformance(PluginConformance):
    """Authors say in :attr:`extra_args` with which arguments a request wants their processor."""

    family: ClassVar[str] = "logits_processors"
    extra_args: ClassVar[Mapping[str, Any]] = {}
    """Arguments of a request that the processor wants and changes."""

    @pytest.fixture
    def processor(self, plugin: type[LogitsProcessor], bench: Bench) -> LogitsProcessor:
        """The processor of one engine."""
        return plugin.build(LogitsEnv(VOCABULARY, bench.device, bench.settings()))

    def rows(self, bench: Bench) -> list[LogitsRow]:
        """Return rows of several requests, one of which comes twice."""
        generator = torch.Generator().manual_seed(2)
        lengths = {"a": 1, "b": 7, "c": 30}
        ids = {
            name: torch.randint(0, VOCABULARY, (length,), generator=generator, dtype=torch.int32).to(bench.device)
            for name, length in lengths.items()
        }
        return [LogitsRow(name, ids[name], max(1, lengths[name] - 2), self.extra_args) for name in ("a", "b", "c", "b")]

    def test_it_wants_a_request_and_says_so_again(self, plugin: type[LogitsProcessor]) -> None:
        """``wants`` is pure, and true for the arguments that the tests use."""
        params = SamplingParams(extra_args=dict(self.extra_args) or None)
        assert plugin.wants(params) and plugin.wants(params)
        assert dict(params.extra_args or {}) == dict(self.extra_args)

    def test_mates_change_nothing(self, bench: Bench, processor: LogitsProcessor) -> None:
        """A row alone, among others, and a second time gives the same bits; token ids stay as they are."""
        rows = self.rows(bench)
        kept = [row.token_ids.clone() for row in rows]
        logits = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(1)).to(bench.device)
        logits[3] = logits[1]
        together = logits.clone()
        processor.apply(together, rows)
        for index, row in enumerate(rows):
            alone = logits[index : index + 1].clone()
            processor.apply(alone, [row])
            assert torch.equal(alone[0], together[index])
        assert torch.equal(together[1], together[3])
        assert not together.isnan().any()
        assert all(torch.equal(row.token_ids, ids) for row, ids in zip(rows, kept, strict=True))

    def test_it_changes_something_and_keeps_its_promise(
        self, plugin: type[LogitsProcessor], bench: Bench, processor: LogitsProcessor
    ) -> None:
        """One that says it never changes the largest logit does not."""
        before = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(3)).to(bench.device)
        after = before.clone()
        processor.apply(after, self.rows(bench))
        assert not torch.equal(before, after), "set extra_args so that the processor has something to do"
        assert (after > float("-inf")).any(-1).all(), "a row has no token left"
        if plugin.argmax_invariant:
            assert torch.equal(before.argmax(-1), after.argmax(-1))
