"""Allocation and loading of sharded parameters from their specs. Nothing here knows a quantization format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from jackfield.errors import CheckpointError
from jackfield.interfaces import LayerInfo, LinearScheme, OutputShard, Parallel, ParameterSpec, RankInfo, even_slice


class LoadableModule(nn.Module):
    """A module whose parameters are filled one checkpoint tensor at a time."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.path = name
        self._missing: dict[str, set[str]] = {}

    def load(self, shard: str, suffix: str, tensor: torch.Tensor) -> bool:
        """Take a checkpoint tensor; return False when no parameter wants that suffix.

        Raises:
            CheckpointError: the shape does not fit.
        """
        raise NotImplementedError

    def row_place(self, shard: str, suffix: str) -> tuple[int, int] | None:
        """Return (dimension along which outputs run in a checkpoint tensor, outputs in one stored number), or None
        where the tensor says nothing of single outputs.
        """
        return 0, 1

    def row_repeat(self, shard: str, suffix: str) -> int:
        """Return how many outputs one number of a checkpoint tensor stands for."""
        return 1

    def outputs(self, shard: str) -> int:
        """Return the outputs of a shard on all ranks together; 0 where there are none to speak of."""
        return 0

    def is_opaque(self, shard: str, suffix: str) -> bool:
        """Return whether outputs cannot be told apart in a checkpoint tensor that speaks of single ones."""
        return False

    def unfilled(self) -> list[str]:
        """Return parameters (with shards) that have not been loaded."""
        return [
            f"{self.path}.{name}" + (f"[{shard}]" if shard else "")
            for name, shards in self._missing.items()
            for shard in sorted(shards)
        ]

    def finalize(self) -> None:
        """Called once, after everything is loaded."""

    def _expect(self, name: str, shards: Sequence[str] = ("",)) -> None:
        self._missing[name] = set(shards)

    def _filled(self, name: str, shard: str = "") -> None:
        self._missing[name].discard(shard)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, what: str) -> None:
        if target.shape != source.shape:
            raise self._misfit(what, tuple(source.shape), str(tuple(target.shape)))
        with torch.no_grad():
            target.copy_(source)

    def _misfit(self, what: str, found: tuple[int, ...], expected: str) -> CheckpointError:
        return CheckpointError(
            f"the shape of a checkpoint tensor does not fit {self.path}.{what}",
            field=f"{self.path}.{what}",
            value=found,
            remedy=f"expected {expected}; is the checkpoint of another size than its config says?",
        )

    def _part(self, tensor: torch.Tensor, dim: int, whole: int, start: int, stop: int, what: str) -> torch.Tensor:
        """Return ``[start, stop)`` of a dimension that must be ``whole`` long: a part of a longer one would fit."""
        if dim >= tensor.dim() or tensor.shape[dim] != whole:
            raise self._misfit(what, tuple(tensor.shape), f"{whole} along dimension {dim}")
        return tensor.narrow(dim, start, stop - start)


class PlainWeight(LoadableModule):
    """A module with replicated parameters of fixed shapes (norms, small tables)."""

    def __init__(
        self, name: str, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(name)
        for key, shape in shapes.items():
            self.register_parameter(key, _empty(shape, dtype, device))
            self._expect(key)

    def load(self, shard: str, suffix: str, tensor: torch.Tensor) -> bool:
        """See the base class."""
        if suffix not in self._missing:
            return False
        self._copy(self.get_parameter(suffix), tensor, suffix)
        self._filled(suffix)
        return True


class ShardedWeight(LoadableModule):
    """Small parameters whose first dimension runs along a layer's outputs, and is cut among ranks as they are.

    Args:
        name: module path. shapes: of the whole checkpoint tensors, by suffix. shards: what the first dimension is made
            of; a tensor may come whole, or shard by shard.
    """

    def __init__(
        self,
        name: str,
        shapes: Mapping[str, tuple[int, ...]],
        shards: Sequence[OutputShard],
        rank: RankInfo,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(name)
        self._shards, self._rank = tuple(shards), rank
        local = sum(shard.local_size(rank) for shard in self._shards)
        for key, (_, *rest) in shapes.items():
            self.register_parameter(key, _empty((local, *rest), dtype, device))
            self._expect(key, [shard.name for shard in self._shards])

    def load(self, shard: str, suffix: str, tensor: torch.Tensor) -> bool:
        """See the base class."""
        if suffix not in self._missing:
            return False
        wanted = [s for s in self._shards if shard in ("", s.name)]
        whole, first = sum(s.size for s in wanted), 0
        for part in wanted:
            start, stop = part.slice(self._rank)
            piece = self._part(tensor, 0, whole, first + start, first + stop, suffix)
            self._copy(self._place(part, suffix), piece, suffix)
            self._filled(suffix, part.name)
            first += part.size
        return bool(wanted)

    def _place(self, shard: OutputShard, suffix: str) -> torch.Tensor:
        before = self._shards[: self._shards.index(shard)]
        start = sum(s.local_size(self._rank) for s in before)
        return self.get_parameter(suffix).narrow(0, start, shard.local_size(self._rank))


class CacheScales(LoadableModule):
    """Scales of one layer's cached keys and values: parameters ``k_scale`` and ``v_scale``, [K] float32 of this rank.
    What the checkpoint does not say is 1.

    Args:
        name: module path. heads: cache heads, all ranks together.
    """

    k_scale: torch.Tensor
    v_scale: torch.Tensor

    def __init__(self, name: str, heads: int, rank: RankInfo, device: torch.device) -> None:
        super().__init__(name)
        shard = OutputShard("", heads, may_replicate=True)
        self._heads, self._mine = heads, slice(*shard.slice(rank))
        for key in ("k_scale", "v_scale"):
            ones = torch.ones(shard.local_size(rank), device=device)
            self.register_parameter(key, nn.Parameter(ones, requires_grad=False))

    def load(self, shard: str, suffix: str, tensor: torch.Tensor) -> bool:
        """See the base class: one number, or one for each cache head.

        Raises:
            CheckpointError: a scale is not above 0.
        """
        if suffix not in ("k_scale", "v_scale"):
            return False
        scale = tensor.detach().float().flatten()
        if len(scale) not in (1, self._heads):
            raise self._misfit(suffix, tuple(tensor.shape), f"1 or {self._heads} numbers")
        if not bool(((scale > 0) & scale.isfinite()).all()):
            raise CheckpointError(
                "a scale of the cache is not above 0",
                field=f"{self.path}.{suffix}",
                value=scale.tolist(),
                remedy="correct the checkpoint, or remove the scale from it",
            )
        whole = scale.expand(self._heads)
        self._copy(self.get_parameter(suffix), whole[self._mine].to(self.get_parameter(suffix).device), suffix)
        return True


class SchemeWeight(LoadableModule):
    """A module whose weight is stored and applied by a quantization scheme."""

    def __init__(self, info: LayerInfo, scheme: LinearScheme, device: torch.device) -> None:
        super().__init__(info.name)
        self.info = info
        self.scheme = scheme
        self._specs = tuple(scheme.parameters(info))
        self._device = device
        for spec in self._specs:
            self.register_parameter(spec.name, _empty(spec.shape, getattr(torch, spec.dtype), device))
            names = (spec.shard,) if spec.shard is not None else tuple(s.name for s in info.shards)
            if not spec.optional:
                self._expect(spec.name, names)
            else:
                self._missing[spec.name] = set()

    def load(self, shard: str, suffix: str, tensor: torch.Tensor) -> bool:
        """See the base class."""
        wanted = self._wanted(shard, suffix)
        for spec in wanted:
            piece = self._cut(spec, shard, tensor)
            self._copy(self._place(spec, shard), piece, spec.name)
            self._filled(spec.name, shard)
        return bool(wanted)

    def row_place(self, shard: str, suffix: str) -> tuple[int, int] | None:
        """See the base class."""
        for spec in self._wanted(shard, suffix):
            # A checkpoint has experts one by one.
            experts = 1 if self.info.num_experts else 0
            return None if spec.output_dim is None else (spec.output_dim - experts, spec.output_pack)
        return super().row_place(shard, suffix)

    def row_repeat(self, shard: str, suffix: str) -> int:
        """See the base class."""
        return max((spec.output_repeat for spec in self._wanted(shard, suffix)), default=1)

    def outputs(self, shard: str) -> int:
        """See the base class."""
        return sum(one.size for one in self.info.shards if one.name == shard)

    def is_opaque(self, shard: str, suffix: str) -> bool:
        """See the base class."""
        return any(spec.opaque for spec in self._wanted(shard, suffix))

    def finalize(self) -> None:
        """Let the scheme prepare the weight."""
        self.scheme.finalize(self)

    def replace_parameters(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Drop all weight parameters and hold these instead."""
        for spec in self._specs:
            if spec.name in self._parameters:
                del self._parameters[spec.name]
        for name, tensor in parameters.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def _wanted(self, shard: str, suffix: str) -> list[ParameterSpec]:
        return [s for s in self._specs if s.suffix == suffix and s.shard in (None, shard)]

    def _cut(self, spec: ParameterSpec, shard: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole checkpoint tensor."""
        info = self.info
        if spec.text:
            missing = spec.shape[-1] - tensor.shape[-1]
            return torch.nn.functional.pad(tensor, (0, missing), value=ord(" ")) if missing > 0 else tensor
        if spec.output_repeat > 1 and spec.output_dim is not None:
            size, dim = self._shard(shard).size, spec.output_dim
            # The last block may be cut short.
            if 0 < tensor.shape[dim] - size < spec.output_repeat:
                tensor = tensor.narrow(dim, 0, size)
        if info.parallel is Parallel.COLUMN and spec.output_dim is not None:
            part = self._shard(shard)
            whole, start, stop = (size // spec.output_pack for size in (part.size, *part.slice(info.rank)))
            tensor = self._part(tensor, spec.output_dim, whole, start, stop, spec.name)
        if info.parallel is Parallel.ROW and spec.input_dim is not None:
            logical, stored = spec.input_block or (spec.input_pack, 1)
            start, stop = even_slice(info.input_size, info.rank, max(info.input_unit, logical))
            whole, start, stop = (size // logical * stored for size in (info.input_size, start, stop))
            tensor = self._part(tensor, spec.input_dim, whole, start, stop, spec.name)
        return tensor

    def _place(self, spec: ParameterSpec, shard: str) -> torch.Tensor:
        """Return the part of the parameter that holds ``shard``."""
        target: torch.Tensor = self.get_parameter(spec.name)
        if spec.shard is not None or spec.output_dim is None or len(self.info.shards) == 1:
            return target
        at = self.info.shards.index(self._shard(shard))
        sizes = self.info.local_output_sizes
        return target.narrow(spec.output_dim, sum(sizes[:at]) // spec.output_pack, sizes[at] // spec.output_pack)

    def _shard(self, name: str) -> OutputShard:
        for shard in self.info.shards:
            if shard.name == name:
                return shard
        raise CheckpointError(
            f"{self.path} has no shard '{name}'",
            field="weight_map",
            value=name,
            remedy=f"its shards are {[s.name for s in self.info.shards]}",
        )


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
