"""Conformance of quantization methods: what is stored, cut, applied and read back is one and the same weight.

Legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

from jackfield.distributed import SingleCommunicator
from jackfield.interfaces import (
    LayerInfo,
    LinearScheme,
    OutputShard,
    Parallel,
    PendingNorm,
    QuantizationMethod,
    RankInfo,
    TensorFacts,
    WeightRule,
)
from jackfield.interfaces.moe import LAYOUTS
from jackfield.layers.activation import GATED
from jackfield.layers.functional import REFERENCES, settled
from jackfield.layers.linear import Embedding, Linear
from jackfield.loader.arrange import arrange
from jackfield.testing.bench import Bench
from jackfield.testing.common import PluginConformance
from jackfield.testing.samples import DTYPES, quantization_request

INPUTS = 512
ALONE = RankInfo()
UNIT = 64


@dataclass(frozen=True, slots=True)
class Stored:
    """One checkpoint tensor, and what a header says of it where that is not what the tensor says of itself.

    Args:
        dtype: the format's word (``ggml:Q8_0``), or ``""``. shape: the logical shape, or ``()``.
    """

    tensor: torch.Tensor
    dtype: str = ""
    shape: tuple[int, ...] = ()

    def facts(self, name: str) -> TensorFacts:
        """Return the header's line."""
        dtype = self.dtype or str(self.tensor.dtype).removeprefix("torch.")
        return TensorFacts(name, dtype, self.shape or tuple(self.tensor.shape))


def _column(name: str, **sizes: int) -> LayerInfo:
    shards = tuple(OutputShard(shard, size, UNIT // 2, shard in "kv") for shard, size in sizes.items())
    return LayerInfo(name, INPUTS, shards, Parallel.COLUMN)


LAYERS: Mapping[str, LayerInfo] = {
    "qkv": _column("layers.0.attn.qkv", q=256, k=128, v=128),
    "gate_up": _column("layers.0.mlp.gate_up", gate=256, up=256),
    "down": LayerInfo("layers.0.mlp.down", INPUTS, (OutputShard("", 256),), Parallel.ROW, UNIT),
    "replicated": LayerInfo("layers.0.router", INPUTS, (OutputShard("", 128),), Parallel.REPLICATED),
    "embedding": LayerInfo("embed", INPUTS, (OutputShard("", 256, UNIT),), Parallel.COLUMN, role="embedding"),
    "head": LayerInfo("head", INPUTS, (OutputShard("", 256, UNIT),), Parallel.COLUMN, role="head"),
}
"""One layer of each kind, of sizes that blocks of up to 128 inputs fit into on four ranks."""


@dataclass(slots=True)
class Loaded:
    """A layer with its weight, ready to run. ``weight_OI`` is the rank's part of what was packed, in float32."""

    layer: Any
    scheme: LinearScheme
    info: LayerInfo
    weight_OI: torch.Tensor

    def apply(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        """Return what the scheme computes."""
        return self.scheme.apply(self.layer, x_TI, bias_O)


class QuantizationConformance(PluginConformance):
    """Cut and loaded, or loaded and cut: the same weight. Authors of a format write :meth:`pack`."""

    family: ClassVar[str] = "quantization_methods"
    config: ClassVar[Mapping[str, object]] = {}
    """The checkpoint's quantization config, for ``parse``."""
    kind: ClassVar[str | None] = None
    """The format that is tested; the plugin's only one when None."""
    loss: ClassVar[float] = 0.2
    """Largest error of a stored weight, as a part of its norm."""
    tolerance: ClassVar[float] = 1e-2
    """Largest error of a product, as a part of the largest result; in float32 a hundredth of that."""
    cut_tolerance: ClassVar[float] = 0.0
    """The same between ranks and one rank alone, for methods that convert weights after they are cut; 0: as above."""
    exact_activations: ClassVar[bool] = True
    """Whether products take activations as they are, and do not quantize them."""

    def pack(self, weight_OI: torch.Tensor) -> Mapping[str, Stored]:
        """Return how the format stores one matrix [O, I]: tensors by suffix."""
        return {"weight": Stored(weight_OI)}

    @pytest.fixture
    def dtype(self, plugin: type[QuantizationMethod], bench: Bench) -> str:
        """The computation type of the tests: the widest that the method accepts for its format."""
        accepted = [dtype for dtype in DTYPES if bench.accepts(quantization_request(self._kind(plugin), dtype))]
        assert accepted, f"{plugin.name} accepts none of {', '.join(DTYPES)} for its format"
        return accepted[0]

    def _kind(self, plugin: type[QuantizationMethod]) -> str:
        return self.kind if self.kind is not None else min(plugin.kinds)

    def load(self, bench: Bench, name: str, dtype: str, rank: RankInfo = ALONE) -> Loaded | None:
        """Return a loaded layer, the same numbers on each rank, or None where the method leaves the layer alone."""
        plugin: Any = bench.plugin
        packed = {s.name: self.pack(_weight(s, INPUTS, dtype)) for s in LAYERS[name].shards}
        facts = {
            shard: {suffix: one.facts(f"{shard}.{suffix}") for suffix, one in tensors.items()}
            for shard, tensors in packed.items()
        }
        info = replace(LAYERS[name], dtype=dtype, rank=rank, tensors=facts)
        scheme = plugin.scheme(info, plugin.parse(self.config))
        if scheme is None:
            return None
        made = Embedding if info.role == "embedding" else Linear
        layer = made(info, scheme, SingleCommunicator(), bench.device)
        taken = [
            layer.load(shard, suffix, arrange(one.tensor.to(bench.device), WeightRule("", "", shard), layer, suffix))
            for shard, tensors in packed.items()
            for suffix, one in tensors.items()
        ]
        assert all(taken), f"{name}: nothing takes some of {[sorted(tensors) for tensors in packed.values()]}"
        assert list(layer.unfilled()) == []
        layer.finalize()
        return Loaded(layer, scheme, info, _part(info, dtype).to(bench.device))

    def close(self, found: torch.Tensor, wanted: torch.Tensor, dtype: str, tolerance: float = 0.0) -> None:
        """Fail when results differ by more than the tolerance."""
        slack = tolerance or self.tolerance * (0.01 if dtype == "float32" and self.exact_activations else 1.0)
        error, size = (found.double() - wanted.double()).abs().max(), wanted.double().abs().max()
        assert found.shape == wanted.shape
        assert error <= slack * size, f"off by {float(error):.3g}, the largest result is {float(size):.3g}"

    def test_some_layer_is_taken(self, bench: Bench, dtype: str) -> None:
        """A method that leaves all layers alone would pass every other test."""
        assert any(self.load(bench, name, dtype) is not None for name in LAYERS)

    def test_experts_end_in_a_published_layout(self, plugin: type[QuantizationMethod]) -> None:
        """What expert kernels are given is a layout that they can know."""
        assert plugin.experts_layout(plugin.parse(self.config)) in LAYOUTS

    @pytest.mark.parametrize("name", list(LAYERS))
    def test_parameters_cover_what_is_loaded_once(self, bench: Bench, dtype: str, name: str) -> None:
        """Each checkpoint tensor has one parameter that takes it; names are unique, types are torch's."""
        loaded = self.load(bench, name, dtype)
        if loaded is None:
            return
        specs = loaded.scheme.parameters(loaded.info)
        names = [spec.name for spec in specs]
        assert len(set(names)) == len(names) and not any("." in name for name in names)
        assert all(isinstance(getattr(torch, spec.dtype), torch.dtype) for spec in specs)
        places = [(spec.suffix, shard) for spec in specs for shard in _places(spec.shard, loaded.info)]
        assert len(set(places)) == len(places), "two parameters take one tensor"
        assert not any(parameter.requires_grad for parameter in loaded.layer.parameters())

    @pytest.mark.parametrize("name", list(LAYERS))
    def test_what_is_read_back_is_what_was_stored(self, bench: Bench, dtype: str, name: str) -> None:
        """``dequantize`` gives the packed weight, rows and columns in their places."""
        if (loaded := self.load(bench, name, dtype)) is None:
            return
        found = loaded.scheme.dequantize(loaded.layer)
        assert found.dtype == getattr(torch, dtype) and found.shape == loaded.weight_OI.shape
        error = (found.double() - loaded.weight_OI.double()).norm() / loaded.weight_OI.double().norm()
        assert error <= self.loss, f"{name}: {float(error):.1%} of the weight is lost"

    @pytest.mark.parametrize("name", [name for name in LAYERS if name != "embedding"])
    def test_the_identity_gives_the_weight(self, bench: Bench, dtype: str, name: str) -> None:
        """``apply`` on the identity is ``dequantize``."""
        if (loaded := self.load(bench, name, dtype)) is None:
            return
        identity = torch.eye(loaded.info.input_size, dtype=getattr(torch, dtype), device=bench.device)
        self.close(loaded.apply(identity).T, loaded.scheme.dequantize(loaded.layer), dtype)

    @pytest.mark.parametrize("rows", [1, 3, 16, 65])
    @pytest.mark.parametrize("name", ["qkv", "down"])
    def test_products(self, bench: Bench, dtype: str, name: str, rows: int) -> None:
        """``apply`` is the product with the weight that is read back, plus the bias, in ``out`` where one is given."""
        if (loaded := self.load(bench, name, dtype)) is None:
            return
        kind = getattr(torch, dtype)
        x, bias = _numbers(rows, INPUTS).to(bench.device, kind), _numbers(len(loaded.weight_OI)).to(bench.device, kind)
        wanted = x.double() @ loaded.scheme.dequantize(loaded.layer).double().T
        self.close(loaded.apply(x), wanted, dtype)
        out = torch.full_like(wanted, float("nan"), dtype=kind)
        assert loaded.scheme.apply(loaded.layer, x, bias, out) is out
        self.close(out, wanted + bias.double(), dtype)

    @pytest.mark.parametrize("rows", [1, 3, 16, 65])
    def test_what_is_folded_is_what_the_ops_give(self, bench: Bench, dtype: str, rows: int) -> None:
        """``apply_folded`` gives what the ops that ``folded_ops`` names give before and after ``apply``."""
        if (loaded := self.load(bench, "gate_up", dtype)) is None:
            return
        x, other = (_numbers(rows, INPUTS, seed=seed).to(bench.device, getattr(torch, dtype)) for seed in (3, 4))
        ops = loaded.scheme.folded_ops(loaded.info, rows)
        assert ops <= {"rms_norm", "fused_add_rms_norm", *GATED.values()}
        given: list[torch.Tensor | PendingNorm] = [x]
        if "rms_norm" in ops:
            given.append(PendingNorm(x, None, None, other[0], 1e-6))
        if "fused_add_rms_norm" in ops:
            given.append(PendingNorm(x, other, torch.empty_like(x), x[0], 1e-6))
        for rows_given in given:
            plain = loaded.apply(settled(rows_given))
            if isinstance(rows_given, PendingNorm):
                self.close(loaded.scheme.apply_folded(loaded.layer, rows_given, None), plain, dtype)
                assert rows_given.total is None or torch.equal(rows_given.total, x + other)
            for op in sorted(ops & set(GATED.values())):
                self.close(loaded.scheme.apply_folded(loaded.layer, rows_given, None, op), REFERENCES[op](plain), dtype)

    @pytest.mark.parametrize("size", [2, 4])
    @pytest.mark.parametrize("name", list(LAYERS))
    def test_cut_then_applied_is_applied_then_cut(self, bench: Bench, dtype: str, name: str, size: int) -> None:
        """Ranks that load their parts compute their parts: of outputs, or summands of inputs."""
        whole = self.load(bench, name, dtype)
        ranks = [RankInfo(rank, size) for rank in range(size)]
        parts = [self.load(bench, name, dtype, rank) for rank in ranks]
        if whole is None or None in parts:
            return
        x = _numbers(5, INPUTS).to(bench.device, getattr(torch, dtype))
        if whole.info.role == "embedding":
            wanted = whole.scheme.dequantize(whole.layer)
            found = torch.cat([part.scheme.dequantize(part.layer) for part in parts if part is not None])
        elif whole.info.parallel is Parallel.ROW:
            wanted, found = whole.apply(x), torch.zeros(())
            for part, columns in zip(parts, x.chunk(size, dim=1), strict=True):
                assert part is not None
                found = found.to(x.device) + part.apply(columns.contiguous()).double()
        else:
            wanted = torch.cat([whole.apply(x)[:, _rows(whole.info, rank)] for rank in ranks], dim=1)
            found = torch.cat([part.apply(x) for part in parts if part is not None], dim=1)
        self.close(found, wanted, dtype, self.cut_tolerance)

    def test_rows_are_looked_up(self, bench: Bench, dtype: str) -> None:
        """``lookup`` gives rows of the weight, in any order, some twice."""
        if (loaded := self.load(bench, "embedding", dtype)) is None:
            return
        ids = torch.tensor([3, 0, 255, 3], device=bench.device)
        found = loaded.scheme.lookup(loaded.layer, ids)
        assert found.dtype == getattr(torch, dtype)
        self.close(found, loaded.scheme.dequantize(loaded.layer)[ids], dtype)


def _numbers(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _weight(shard: OutputShard, inputs: int, dtype: str) -> torch.Tensor:
    weight = _numbers(shard.size, inputs, seed=3 + len(shard.name) + sum(map(ord, shard.name))) * 0.1
    return weight.to(getattr(torch, dtype))


def _rows(info: LayerInfo, rank: RankInfo) -> list[int]:
    """Return which of the whole layer's outputs a rank computes, in its order."""
    rows, start = [], 0
    for shard in info.shards:
        first, last = shard.slice(rank) if info.parallel is Parallel.COLUMN else (0, shard.size)
        rows += list(range(start + first, start + last))
        start += shard.size
    return rows


def _part(info: LayerInfo, dtype: str) -> torch.Tensor:
    whole = torch.cat([_weight(shard, info.input_size, dtype) for shard in info.shards])[_rows(info, info.rank)]
    if info.parallel is not Parallel.ROW:
        return whole
    return whole.chunk(info.rank.size, dim=1)[info.rank.rank]


def _places(shard: str | None, info: LayerInfo) -> list[str]:
    return [shard] if shard is not None else [one.name for one in info.shards]
