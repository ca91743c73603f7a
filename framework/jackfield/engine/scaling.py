"""Moves factors from the inputs of matrices that are quantized into what comes before them.

Legend: O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from jackfield.interfaces import Exporter, Scaling, TensorFacts, WeightMap, WeightRule
from jackfield.loader.arrange import cut_rows, reorder_rows

Load = Callable[[str], torch.Tensor]
"""Returns a tensor of the checkpoint by its name."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where factors can go, in the checkpoint's words.

    Args:
        before: module whose rows are divided. after: modules whose columns are multiplied. rows: which row of
            ``before`` gives each feature. offset: added to the weight of ``before`` before it is used.
    """

    before: str
    after: tuple[str, ...]
    rows: torch.Tensor
    offset: float


class Scales:
    """Factors that were found, on columns and rows of matrices that are quantized and in tensors that stay plain.

    The model that is calibrated keeps its own numbers: what a matrix is quantized to is told to it less the factors.

    Args:
        weights: where the checkpoint's tensors go. facts: of them. load: reads one. converted: modules that are
            quantized.
    """

    def __init__(
        self, weights: WeightMap, facts: Mapping[str, TensorFacts], load: Load, converted: Collection[str]
    ) -> None:
        self._scalings, self._facts, self._load, self._converted = weights.scalings, facts, load, converted
        self._rules: dict[str, list[WeightRule]] = {}
        self._names: dict[str, list[str]] = {}
        for name, rule in weights.named():
            if f"{name}.weight" in facts or name in facts:
                self._rules.setdefault(name, []).append(rule)
                self._names.setdefault(rule.target, []).append(name)
        self._columns: dict[str, torch.Tensor] = {}
        self._divisors: dict[str, torch.Tensor] = {}
        self.plain: dict[str, torch.Tensor] = {}
        """Tensors that are not those of the checkpoint any more, by name."""

    @property
    def scaled(self) -> frozenset[str]:
        """Modules whose inputs factors were looked for."""
        return frozenset(self._columns)

    def find(
        self, exporter: Exporter, weights: Mapping[str, torch.Tensor], moments: Mapping[str, torch.Tensor]
    ) -> None:
        """Find factors for matrices of one layer.

        Args:
            exporter: looks for them. weights: matrices [O, I] by module. moments: of their inputs.
        """
        for place in self._places(weights):
            factors = exporter.factors([weights[name] for name in place.after], moments[place.after[0]])
            factors = self._divide(place, factors)
            self._columns |= dict.fromkeys(place.after, factors)

    def written(
        self, exporter: Exporter, module: str, weight_OI: torch.Tensor, moments_II: torch.Tensor
    ) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        """Return the tensors of a module with its factors, and the matrix that they stand for without them."""
        columns, divisors = self._columns.get(module), self._divisors.get(module)
        if columns is None and divisors is None:
            return exporter.calibrated(weight_OI, moments_II)
        device, (outputs, inputs) = weight_OI.device, weight_OI.shape
        columns_I = torch.ones(inputs, device=device) if columns is None else columns
        divisors_O1 = (torch.ones(outputs, device=device) if divisors is None else divisors).unsqueeze(1)
        changed_OI = weight_OI.float() * columns_I / divisors_O1
        tensors, meaning_OI = exporter.calibrated(changed_OI, moments_II / columns_I / columns_I.unsqueeze(1))
        return tensors, (meaning_OI * divisors_O1 / columns_I).to(weight_OI.dtype)

    def _places(self, weights: Mapping[str, torch.Tensor]) -> Iterator[Place]:
        for scaling in self._scalings:
            place = self._place(scaling)
            if place is None or not all(name in weights for name in place.after):
                continue
            if place.before in self._converted and place.before not in weights:
                continue  # it has been written already
            if all(weights[name].shape[1] == len(place.rows) for name in place.after):
                yield place

    def _place(self, scaling: Scaling) -> Place | None:
        """Return where a scaling is in the checkpoint, or None where its matrices have other parts too."""
        after = [name for target in scaling.after for name in self._names.get(target, ())]
        after = list(dict.fromkeys(after))
        fits = after and all(self._only(name, scaling.after) and name in self._converted for name in after)
        before = [
            (name, rule)
            for name in dict.fromkeys(self._names.get(scaling.before, ()))
            for rule in self._rules[name]
            if rule.target == scaling.before and rule.shard == scaling.shard
        ]
        if not fits or len(before) != 1:
            return None
        name, rule = before[0]
        if not self._only(name, (scaling.before,)) or rule.transposed or f"{name}.weight" not in self._facts:
            return None
        return Place(name, tuple(after), self._rows(name, rule), scaling.offset)

    def _only(self, name: str, targets: Sequence[str]) -> bool:
        """Return whether a checkpoint module is a plain part of some modules, and of no others."""
        rules = self._rules[name]
        return all(r.target in targets and r.suffix == "weight" and not r.unit_rows for r in rules)

    def _rows(self, name: str, rule: WeightRule) -> torch.Tensor:
        rows = torch.arange(self._facts[f"{name}.weight"].shape[0])
        if rule.cut is not None:
            rows = cut_rows(rows, rule.cut)
        return rows if rule.rows is None else reorder_rows(rows, rule.rows)

    def _divide(self, place: Place, factors_I: torch.Tensor) -> torch.Tensor:
        """Divide what comes before by factors, and return them as they became by that."""
        name, device = f"{place.before}.weight", factors_I.device
        rows = place.rows.to(device)
        if place.before in self._converted:
            ones = torch.ones(self._facts[name].shape[0], device=device)
            self._divisors[place.before] = self._divisors.get(place.before, ones).index_copy(0, rows, factors_I)
        else:
            old, new = self._divided(name, rows, factors_I, place.offset)
            if old.dim() == 1:
                # What a norm stores is rounded: the factors are then what it has become smaller by.
                there = (new != 0) & (old != 0)
                factors_I = torch.where(there, old / torch.where(there, new, 1.0), factors_I)
        if f"{place.before}.bias" in self._facts:
            self._divided(f"{place.before}.bias", rows, factors_I, 0.0)
        return factors_I

    def _divided(
        self, name: str, rows: torch.Tensor, factors_I: torch.Tensor, offset: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Divide rows of a plain tensor; return them before and after that, with the offset."""
        tensor = (self.plain[name] if name in self.plain else self._load(name)).to(factors_I.device)
        old = tensor[rows].float() + offset
        stored = (old / factors_I.view(-1, *[1] * (old.dim() - 1)) - offset).to(tensor.dtype)
        self.plain[name] = tensor.index_copy(0, rows, stored)
        return old, stored.float() + offset
