"""Conformance of drafters: they change how fast tokens come, and not one of them.

Legend: B sequences, K drafts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from jackfield.interfaces import DraftBatch, Drafter, DrafterEnv, Drafts
from jackfield.protocol import SamplingParams
from jackfield.testing.common import PluginConformance
from jackfield.testing.samples import DRAFTS
from jackfield.testing.statistics import assert_distributed
from jackfield.testing.tiny import Tiny, assert_greedy, continuation_logits, engine, make_tiny

TOKENS = 24
SMALL = 6
"""Tokens of the vocabulary that distributions are counted over."""
REQUESTS = 1200
REPEATING = [1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2]
PROMPTS = (REPEATING, [5, 9, 5, 9, 5, 9, 5], [7] * 12, [11, 4, 250, 3, 77, 11, 4, 250])


@dataclass(slots=True)
class Seen:
    """What passed between an engine and its drafter.

    Args:
        drafts: how many were proposed. asked, forgotten: slots that drafts were asked for, and that were let go.
        faults: what was wrong with what the drafter returned.
    """

    drafts: int = 0
    asked: set[int] = field(default_factory=set)
    forgotten: set[int] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)

    def note(self, batch: DraftBatch, drafts: Drafts, count: int, vocab_size: int) -> None:
        """Look at what came back."""
        ids = np.asarray(torch.as_tensor(drafts.ids).cpu())
        self.asked |= {int(slot) for slot in batch.slots}
        if ids.ndim != 2 or len(ids) != len(batch.slots) or ids.shape[1] > max(count, 1):
            self.faults.append(f"{len(batch.slots)} sequences and {count} drafts gave ids of shape {ids.shape}")
            return
        for row in ids.tolist():
            kept = [token for token in row if token >= 0]
            self.drafts += len(kept)
            if row[: len(kept)] != kept:
                self.faults.append(f"padding lies before drafts: {row}")
            if any(token >= vocab_size for token in kept):
                self.faults.append(f"a draft is outside the vocabulary of {vocab_size}: {row}")
        if drafts.parents is not None:
            parents = np.asarray(torch.as_tensor(drafts.parents).cpu())
            if parents.shape != ids.shape or (parents < -1).any() or (parents >= np.arange(ids.shape[1])).any():
                self.faults.append(f"parents do not come before their children: {parents.tolist()}")


class DrafterConformance(PluginConformance):
    """Greedy tokens equal to those without; sampled ones from the same distribution; nothing kept of those that left.

    Authors of drafters that need more than tokens write :meth:`settings`, with a draft model of their own, or
    :meth:`target`, with what they need in its checkpoint.
    """

    family: ClassVar[str] = "drafters"
    options: ClassVar[Mapping[str, Any]] = {}
    """Of the drafter, as users set them under ``plugins.options.NAME``."""
    drafts_nothing: ClassVar[bool] = False
    """Whether it may propose nothing at all on the kit's prompts, which repeat themselves."""

    def target(self, folder: Path, **values: Any) -> Tiny:
        """Return the model that is drafted for, saved to ``folder``; ``values`` are of its configuration."""
        return make_tiny(folder, **values)

    def settings(self, plugin: type[Drafter], target: Tiny, folder: Path) -> dict[str, Any]:
        """Return the engine's settings that switch the drafter on. ``folder`` is empty, for a draft model."""
        options = {f"plugins.options.{plugin.name}.{name}": value for name, value in self.options.items()}
        # How many drafts pay depends on the clock; tests do not.
        always = {"speculative.adaptive": False, "speculative.num_speculative_tokens": DRAFTS}
        return {"speculative.method": plugin.name, **always, **options}

    def _plugins(self, plugin: type[Drafter]) -> list[type[Drafter]]:
        return [] if self.installed else [plugin]

    @pytest.fixture
    def seen(self, plugin: type[Drafter], monkeypatch: pytest.MonkeyPatch) -> Seen:
        """What passes between engines and drafters that are built from now on."""
        seen, build = Seen(), plugin.build

        def watched(cls: type[Drafter], env: DrafterEnv) -> Drafter:
            drafter = build(env)
            propose, forget = drafter.propose, drafter.forget

            def propose_and_note(batch: DraftBatch) -> Drafts:
                drafts = propose(batch)
                seen.note(batch, drafts, env.request.num_tokens, env.request.vocab_size)
                return drafts

            def forget_and_note(slots: Sequence[int]) -> None:
                seen.forgotten |= {int(slot) for slot in slots}
                forget(slots)

            monkeypatch.setattr(drafter, "propose", propose_and_note)
            monkeypatch.setattr(drafter, "forget", forget_and_note)
            return drafter

        monkeypatch.setattr(plugin, "build", classmethod(watched))
        return seen

    def test_greedy_tokens_are_those_without_it(self, plugin: type[Drafter], seen: Seen, tmp_path: Path) -> None:
        """Lossless, also when requests come and go and slots are used again; every slot that ended is forgotten."""
        target = self.target(tmp_path / "target")
        greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
        settings = self.settings(plugin, target, tmp_path / "draft")
        with engine(target.folder, self._plugins(plugin), max_num_seqs=2, **settings) as llm:
            chosen = [d.name for d in llm.report.decisions if d.family == "drafters"]
            for _ in range(2):
                outputs = [request.outputs[0].token_ids for request in llm.generate(list(PROMPTS), greedy)]
                assert_greedy(target.model, PROMPTS, outputs)
        assert chosen == [plugin.name]
        assert seen.faults == []
        assert seen.drafts or self.drafts_nothing, "it proposed nothing, so nothing was tested"
        assert seen.asked <= seen.forgotten, "slots of requests that ended were not forgotten"

    def test_samples_follow_the_targets_distribution(self, plugin: type[Drafter], tmp_path: Path) -> None:
        """Pairs of tokens over a tiny vocabulary, by chi-square against the reference's own probabilities."""
        target = self.target(tmp_path / "target", vocab_size=SMALL, initializer_range=0.1)
        params = [SamplingParams(temperature=1.0, max_tokens=3, seed=n, ignore_eos=True) for n in range(REQUESTS)]
        settings = self.settings(plugin, target, tmp_path / "draft")
        with engine(target.folder, self._plugins(plugin), max_num_seqs=64, **settings) as llm:
            outputs = [r.outputs[0].token_ids for r in llm.generate([REPEATING] * REQUESTS, params)]
        counts = np.zeros((SMALL, SMALL, SMALL))
        for tokens in outputs:
            counts[tuple(tokens)] += 1
        assert_distributed(counts.sum(0), _joint(target.model).sum(0))

    def test_a_slot_that_is_used_again_remembers_nothing(self, plugin: type[Drafter], tmp_path: Path) -> None:
        """The same request gives the same tokens in an engine that has served others and in a new one."""
        target = self.target(tmp_path / "target")
        sampled = SamplingParams(temperature=0.8, max_tokens=TOKENS, seed=5, ignore_eos=True)
        found = []
        for index, before in enumerate(([], list(PROMPTS[1:]))):
            settings = self.settings(plugin, target, tmp_path / f"draft{index}")
            with engine(target.folder, self._plugins(plugin), max_num_seqs=1, **settings) as llm:
                llm.generate([*before, REPEATING][:-1] or [[3]], sampled)
                found.append(llm.generate([REPEATING], sampled)[0].outputs[0].token_ids)
        assert found[0] == found[1]


def _joint(model: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the probability of each triple of tokens behind the prompt, [V, V, V]."""
    joint = np.zeros((SMALL, SMALL, SMALL))
    for first in range(SMALL):
        for second in range(SMALL):
            rows = continuation_logits(model, REPEATING, [first, second, 0]).double().softmax(-1).numpy()
            joint[first, second] = rows[0, first] * rows[1, second] * rows[2]
    return joint
