"""Loading: walks the checkpoint's tensors once, sends each where the weight map says, and accounts for all of them.

A tensor that nothing takes and a parameter that nothing fills are errors that name them all: weights never vanish.
"""

from __future__ import annotations

import re
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from jackfield.errors import CheckpointError
from jackfield.interfaces import ModelFacts, WeightMap, WeightRule
from jackfield.interfaces.facts import split_name
from jackfield.layers.moe import ExpertWeight
from jackfield.layers.parameters import LoadableModule
from jackfield.loader.arrange import arrange

PLAIN_GGML = {"ggml:F32": "float32", "ggml:F16": "float16", "ggml:BF16": "bfloat16", "ggml:F64": "float64"}
"""GGML types that are torch types."""

Progress = Callable[[int, int], None]


class Tensors(Protocol):
    """Checkpoint tensors by name; see ``jackfield.checkpoint``."""

    facts: ModelFacts

    def __iter__(self) -> Iterator[str]:
        """Iterate over all names."""
        ...

    def get(self, name: str) -> Any:
        """Return a read-only numpy view, where types that numpy lacks come as unsigned integers of their size; or a
        tensor.
        """
        ...


def load_weights(model: nn.Module, source: Tensors, weights: WeightMap, progress: Progress | None = None) -> None:
    """Fill ``model`` and let its layers prepare their weights. See :func:`fill_weights`."""
    fill_weights(model, source, weights, progress)
    finalize(model)


def fill_weights(model: nn.Module, source: Tensors, weights: WeightMap, progress: Progress | None = None) -> None:
    """Fill ``model``.

    Args:
        model: built, empty. source: the checkpoint. weights: where tensors go. progress: called with (bytes done,
            bytes in all).

    Raises:
        CheckpointError: tensors are left over, parameters stay empty, or shapes do not fit.
    """
    modules = loadable_modules(model)
    rules: dict[str, list[WeightRule]] = {}
    for rule in weights.rules:
        rules.setdefault(rule.source, []).append(rule)
    ignore = [re.compile(pattern) for pattern in weights.ignore]
    facts = source.facts.tensors
    total, done, unused = sum(tensor.nbytes for tensor in facts.values()), 0, []
    for name in source:
        module, suffix = split_name(name, facts)
        taken = [_deliver(modules, rule, suffix, source, name) for rule in _rules_for(module, rules, weights)]
        # A rule may also name a whole tensor whose last part is no suffix that a layer knows (``A_log``).
        taken += [_deliver(modules, rule, rule.suffix, source, name) for rule in _rules_for(name, rules, weights)]
        if not any(taken) and not any(p.fullmatch(name) for p in ignore):
            unused.append(name)
        done += facts[name].nbytes
        if progress:
            progress(done, total)
    _check_complete(modules, weights, unused)


def finalize(model: nn.Module) -> None:
    """Let every layer prepare its weights, once."""
    for module in loadable_modules(model).values():
        module.finalize()


def loadable_modules(model: nn.Module) -> dict[str, LoadableModule]:
    """Return all modules that take checkpoint tensors, by path."""
    return {m.path: m for m in model.modules() if isinstance(m, LoadableModule)}


def to_torch(array: Any, dtype: str) -> torch.Tensor:
    """Return a tensor over a checkpoint array, without a copy.

    Args:
        array: a numpy view of the stored bytes, or a tensor, which is returned as it is. dtype: torch's word for its
            type, or ``ggml:TYPE``.
    """
    if isinstance(array, torch.Tensor):
        return array
    word = PLAIN_GGML.get(dtype, dtype)
    signed = array.view("int16") if array.dtype.name == "uint16" else array
    with warnings.catch_warnings():
        # The array is read-only; nothing writes through the tensor, but torch cannot know that and warns.
        warnings.simplefilter("ignore", UserWarning)
        raw = torch.from_numpy(signed)
    wanted = getattr(torch, word, None)
    return raw if wanted is None or raw.dtype == wanted else raw.view(wanted)


def load_dummy(model: nn.Module, seed: int = 0) -> None:
    """Fill every parameter with small random values that depend on its name and ``seed`` alone."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator(device=parameter.device).manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
            if parameter.is_floating_point() and parameter.element_size() > 1:
                parameter.uniform_(-1e-3, 1e-3, generator=generator)
            else:
                parameter.zero_()
    finalize(model)


def _rules_for(source: str, rules: Mapping[str, list[WeightRule]], weights: WeightMap) -> list[WeightRule]:
    return rules.get(source) or rules.get(weights.droppable + source, [])


def _deliver(modules: Mapping[str, LoadableModule], rule: WeightRule, suffix: str, source: Tensors, name: str) -> bool:
    module = modules.get(rule.target)
    if module is None:
        return False
    tensor = to_torch(source.get(name), source.facts.tensors[name].dtype)
    try:
        if not isinstance(module, ExpertWeight):
            return module.load(rule.shard, suffix, arrange(tensor, rule, module, suffix))
        experts = enumerate(tensor) if rule.expert is None else ((rule.expert, tensor),)
        return all(module.load_expert(i, rule.shard, suffix, arrange(t, rule, module, suffix)) for i, t in experts)
    except CheckpointError as error:
        error.message = f"{error.message} (tensor '{name}')"
        raise


def _check_complete(modules: Mapping[str, LoadableModule], weights: WeightMap, unused: list[str]) -> None:
    optional = {rule.target for rule in weights.rules if rule.optional}
    empty = [name for path, module in modules.items() if path not in optional for name in module.unfilled()]
    if unused:
        raise CheckpointError(
            f"{len(unused)} checkpoint tensors are used by nothing: {_some(unused)}",
            field="checkpoint",
            value=unused[0],
            remedy="its weight map does not know them; is this the right architecture for the checkpoint?",
        )
    if empty:
        raise CheckpointError(
            f"the checkpoint lacks weights for {len(empty)} parameters: {_some(empty)}",
            field="checkpoint",
            value=empty[0],
            remedy="the checkpoint is incomplete, or of another architecture",
        )


def _some(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
