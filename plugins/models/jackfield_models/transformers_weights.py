"""Where the tensors of a checkpoint go in a model of transformers, by transformers' own renamings and conversions."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

from jackfield.interfaces import WeightMap, WeightRule
from jackfield.layers.parameters import LoadableModule
from jackfield_models.transformers_build import PLUGIN_REMEDY, Parts
from jackfield_models.transformers_fallback import UnfitError

CONVERT = "convert:"
"""Start of the paths of modules that collect tensors and convert them."""

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Arrow:
    """A checkpoint tensor, the model's tensor that it becomes (the first of them), and the pattern of the conversion
    that it is a part of, or None.
    """

    source: str
    target: str
    pattern: str | None = None


def arrows(parts: Parts, tensors: Tensors) -> list[Arrow]:
    """Return where each tensor of a checkpoint goes.

    Args:
        parts: of the model. tensors: its state without data.

    Raises:
        UnfitError: transformers' rules contradict each other.
    """
    model, state = parts.model, {n: t for n, t in tensors.items() if n not in parts.model.all_tied_weights_keys}
    rules = get_model_conversion_mapping(model, add_legacy=False)
    if not rules:
        return [Arrow(name, name) for name in state]
    renamings, converters = ([r for r in rules if isinstance(r, made)] for made in (WeightRenaming, WeightConverter))
    found = []
    for name in revert_weight_conversion(model, dict(state)):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if target not in state:
            detail = f"transformers' rules for checkpoints lead from '{name}' to '{target}', which is not there"
            raise UnfitError("conversion", "kind", detail, PLUGIN_REMEDY)
        found.append(Arrow(name, target, pattern))
    return found


def weight_map(parts: Parts, tensors: Tensors, kept: frozenset[str], quantization: str) -> WeightMap:
    """Return the rules of a checkpoint.

    Raises:
        UnfitError: weights are tied or converted in a way that this engine does not do.
    """
    _check_ties(parts)
    replaced = {*parts.linears(kept), parts.embedding_path, parts.head_path}
    rules: dict[tuple[str, str], WeightRule] = {}
    foreign = []
    for arrow in arrows(parts, tensors):
        if not parts.covers(arrow.target):
            foreign.append(arrow.source)
            continue
        if arrow.pattern is not None and quantization:
            detail = f"the checkpoint is quantized ({quantization}), and transformers converts '{arrow.source}' at load"
            raise UnfitError("quantization", "quantization", detail, PLUGIN_REMEDY)
        rule = _rule(arrow, replaced)
        rules[rule.source, rule.target] = rule
    prefix = f"{parts.model.base_model_prefix}."
    return WeightMap(tuple(rules.values()), tuple(_ignored(parts, tensors, foreign)), prefix)


def _rule(arrow: Arrow, replaced: set[str]) -> WeightRule:
    if arrow.pattern is not None:
        return WeightRule(arrow.source, f"{CONVERT}{arrow.target}", arrow.source)
    module, _, suffix = arrow.target.rpartition(".")
    if module not in replaced:
        return WeightRule(arrow.source, module, suffix)
    source, _, last = arrow.source.rpartition(".")
    if last != suffix:
        raise UnfitError("conversion", "kind", f"'{arrow.source}' is named as no weight of a linear layer is")
    return WeightRule(source, module)


def _check_ties(parts: Parts) -> None:
    usual = {f"{parts.head_path}.weight": f"{parts.embedding_path}.weight"}
    ties = {name: to for name, to in parts.model.all_tied_weights_keys.items() if parts.covers(name)}
    others = {name: to for name, to in ties.items() if usual.get(name) != to}
    if others:
        listing = ", ".join(f"{name} = {to}" for name, to in sorted(others.items())[:3])
        raise UnfitError("tied", "kind", f"weights other than the head's are shared: {listing}", PLUGIN_REMEDY)


def _ignored(parts: Parts, tensors: Tensors, foreign: list[str]) -> Iterator[str]:
    """Return patterns of tensors that transformers does not load either, and of parts that are not text."""
    yield r".*rotary_emb\.inv_freq"
    for pattern in parts.model._keys_to_ignore_on_load_unexpected or ():
        yield f".*(?:{pattern}).*"
    if parts.tied:
        name = f"{parts.head_path}.weight"
        yield from map(re.escape, revert_weight_conversion(parts.model, {name: tensors[name]}))
    if foreign:
        yield "|".join(map(re.escape, foreign))


class Held(LoadableModule):
    """The tensors of a module that stays as transformers makes it. They are made here, on the device."""

    def __init__(
        self, path: str, module: nn.Module, names: list[str], fp32: re.Pattern[str] | None, device: Any
    ) -> None:
        super().__init__(path)
        self._module = [module]  # a list, so that torch does not register it twice
        for name in names:
            old = getattr(module, name)
            wide = fp32 is not None and old.is_floating_point() and fp32.search(f"{path}.{name}")
            new = torch.zeros(old.shape, dtype=torch.float32 if wide else old.dtype, device=device)
            if name in module._parameters:
                module._parameters[name] = nn.Parameter(new, requires_grad=False)
            else:
                module._buffers[name] = new
            self._expect(name)

    def load(self, shard: str, suffix: str, tensor: torch.Tensor) -> bool:
        """Take the tensor called ``shard``, or ``suffix`` without one."""
        name = shard or suffix
        if name not in self._missing:
            return False
        self._copy(getattr(self._module[0], name), tensor, name)
        self._filled(name)
        return True


class Converted(LoadableModule):
    """Collects the tensors of one of transformers' conversions; with the last one it converts and passes them on."""

    def __init__(
        self, target: str, group: list[Arrow], rule: Any, model: Any, sinks: Mapping[str, LoadableModule]
    ) -> None:
        super().__init__(f"{CONVERT}{target}")
        self._target, self._group, self._rule = target, group, rule
        self._model, self._sinks = [model], dict(sinks)
        self._tensors: dict[str, torch.Tensor] = {}
        self._expect("sources", [arrow.source for arrow in group])

    def load(self, shard: str, suffix: str, tensor: torch.Tensor) -> bool:
        """Take the tensor called ``shard``."""
        self._tensors[shard] = tensor
        self._filled("sources", shard)
        if not self._missing["sources"]:
            self._convert()
        return True

    def _convert(self) -> None:
        rule = copy.deepcopy(self._rule)
        for arrow in self._group:
            rule.add_tensor(self._target, arrow.source, arrow.pattern, self._tensors[arrow.source])
        self._tensors.clear()
        model = self._model[0]
        for name, made in rule.convert(self._target, model=model, config=model.config).items():
            module, _, suffix = name.rpartition(".")
            self._sinks[module].load("", suffix, made[0] if isinstance(made, list) else made)


def conversions(parts: Parts, tensors: Tensors, sinks: Mapping[str, LoadableModule]) -> list[Converted]:
    """Return the modules that convert, for a model whose other modules are ``sinks`` by path."""
    groups: dict[str, list[Arrow]] = {}
    for arrow in arrows(parts, tensors):
        if arrow.pattern is not None and parts.covers(arrow.target):
            groups.setdefault(arrow.target, []).append(arrow)
    rules = get_model_conversion_mapping(parts.model, add_legacy=False) if groups else []
    by_pattern = {p: rule for rule in rules if isinstance(rule, WeightConverter) for p in rule.source_patterns}
    return [
        Converted(target, group, by_pattern[str(group[0].pattern)], parts.model, sinks)
        for target, group in groups.items()
    ]


def float32_names(model: Any, dtype: torch.dtype) -> re.Pattern[str] | None:
    """Return a pattern of the tensors that transformers keeps in float32 where it computes in ``dtype``."""
    names = set(model._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        names |= set(model._keep_in_fp32_modules or ())
    if not names or dtype not in (torch.float16, torch.bfloat16):
        return None
    inner = "|".join(re.escape(name).replace(r"\*", ".*") for name in sorted(names))
    return re.compile(rf"(?:^|\.)(?:{inner})(?:\.|$)")
