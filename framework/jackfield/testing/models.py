"""Conformance of model architectures: the reference's tokens, every configuration key read, every tensor placed.

Legend: T tokens, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from jackfield.checkpoint import JsonConfigReader
from jackfield.interfaces import ModelArchitecture
from jackfield.interfaces.models import INERT_KEYS
from jackfield.protocol import SamplingParams
from jackfield.testing.common import PluginConformance
from jackfield.testing.ranks import logits_on_ranks
from jackfield.testing.tiny import Tiny, assert_greedy, engine, make_tiny, random_prompts

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
_MADE = pytest.StashKey[dict[type, Tiny]]()
"""Tiny models of this session, by the class of tests."""
UNKNOWN = "a_key_that_changes_the_mathematics"


class ModelConformance(PluginConformance):
    """Against the class of transformers that the architecture is named after; authors of others write :meth:`make`."""

    family: ClassVar[str] = "models"
    values: ClassVar[Mapping[str, Any]] = {}
    """Of the tiny model's configuration, over the kit's sizes."""
    tolerance: ClassVar[float] = 2e-4
    """Largest difference of logits, as a part of the largest one."""

    def make(self, plugin: type[ModelArchitecture], folder: Path) -> Tiny:
        """Make a tiny random model in ``folder`` and return it with a reference: a callable that maps ``input_ids``
        [1, T] to an object with ``logits`` [1, T, V].
        """
        import transformers

        assert hasattr(transformers, plugin.name), f"transformers has no {plugin.name}: write make(), with a reference"
        return make_tiny(folder, plugin.name, **self.values)

    @pytest.fixture
    def tiny(
        self,
        plugin: type[ModelArchitecture],
        pytestconfig: pytest.Config,
        tmp_path_factory: pytest.TempPathFactory,
    ) -> Tiny:
        """The tiny model; made once for each class of tests."""
        made = pytestconfig.stash.setdefault(_MADE, {})
        if type(self) not in made:
            made[type(self)] = self.make(plugin, tmp_path_factory.mktemp("model"))
        return made[type(self)]

    @pytest.fixture
    def reader(self, tiny: Tiny) -> JsonConfigReader:
        """The tiny model's configuration."""
        return JsonConfigReader(json.loads((tiny.folder / "config.json").read_text(encoding="utf-8")))

    def _settings(self, plugin: type[ModelArchitecture]) -> dict[str, Any]:
        own = {} if self.installed else {"plugins": [plugin]}
        return {"model.implementation": plugin.name, **own}

    def test_every_key_is_read(self, plugin: type[ModelArchitecture], reader: JsonConfigReader) -> None:
        """A key that nobody reads would change nothing in silence."""
        plugin.config(reader)
        reader.finish()

    def test_an_unknown_key_is_noticed(self, plugin: type[ModelArchitecture], tiny: Tiny) -> None:
        """The reader is asked key by key, and not for everything; a fallback for any architecture may ask for all."""
        if "*" in plugin.kinds:
            return
        reader = JsonConfigReader({**json.loads((tiny.folder / "config.json").read_text()), UNKNOWN: 3})
        assert UNKNOWN not in INERT_KEYS
        plugin.config(reader)
        assert reader.unread() == [UNKNOWN]

    def test_each_layer_is_in_one_group(self, plugin: type[ModelArchitecture], reader: JsonConfigReader) -> None:
        """Groups have names of their own and share no layer."""
        groups = plugin.attention_groups(plugin.config(reader))
        layers = [layer for group in groups for layer in group.layers]
        assert len({group.name for group in groups}) == len(groups)
        assert len(set(layers)) == len(layers), "a layer is in two groups"
        assert all(group.layers for group in groups)

    def test_no_rule_is_there_twice(self, plugin: type[ModelArchitecture], reader: JsonConfigReader) -> None:
        """The weight map is data that can be checked without weights. Two sources of one place are alternatives."""
        rules = plugin.weight_map(plugin.config(reader), "safetensors").rules
        if "*" not in plugin.kinds:
            assert rules
        places = [(r.source, r.target, r.shard, r.expert, r.suffix, r.cut) for r in rules]
        assert len(set(places)) == len(places), "a rule is there twice"

    @pytest.mark.parametrize("chunk", [0, 16], ids=["whole prompts", "chunked prompts"])
    def test_tokens_are_the_references(self, plugin: type[ModelArchitecture], tiny: Tiny, chunk: int) -> None:
        """Greedy tokens of several prompts at once; every tensor of the checkpoint is taken and every parameter filled,
        or the engine does not start.
        """
        if "generate" not in plugin.tasks:
            return
        settings = {**self._settings(plugin), **({"long_prefill_token_threshold": chunk} if chunk else {})}
        prompts = random_prompts()
        with engine(tiny.folder, **settings) as llm:
            outputs = [request.outputs[0].token_ids for request in llm.generate(prompts, GREEDY)]
        assert_greedy(tiny.model, prompts, outputs)

    @pytest.mark.parametrize("size", [1, 2])
    def test_logits_on_ranks_are_the_references(self, plugin: type[ModelArchitecture], tiny: Tiny, size: int) -> None:
        """Ranks that share the layers compute what one computes, where the sizes can be divided."""
        if "generate" not in plugin.tasks:
            return
        prompts = random_prompts((9, 1, 5), seed=4)
        for found in logits_on_ranks(tiny.folder, self._settings(plugin), prompts, size):
            with torch.no_grad():
                wanted = torch.cat([tiny.model(input_ids=torch.tensor([ids])).logits[0] for ids in prompts]).float()
            error, largest = (found.float() - wanted).abs().max(), wanted.abs().max()
            assert error <= self.tolerance * largest, f"off by {float(error):.3g} of {float(largest):.3g}"
