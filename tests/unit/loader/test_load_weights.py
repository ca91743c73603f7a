from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from jackfield.checkpoint import TensorSource, open_tensors, read_facts
from jackfield.distributed import SingleCommunicator
from jackfield.errors import CheckpointError
from jackfield.interfaces import (
    LayerInfo,
    LinearScheme,
    OutputShard,
    Parallel,
    RankInfo,
    RowOrder,
    WeightMap,
    WeightRule,
)
from jackfield.layers.linear import Linear
from jackfield.layers.norm import RmsNorm
from jackfield.loader import load_dummy, load_weights
from jackfield.loader.arrange import reorder_rows
from jackfield.loader.weights import to_torch
from jackfield_quantization.unquantized import Unquantized

CPU = torch.device("cpu")
SHARDS = (OutputShard("q", 8, unit=4), OutputShard("k", 4, unit=4))
RULES = (
    WeightRule("model.q_proj", "block.qk", "q"),
    WeightRule("model.k_proj", "block.qk", "k"),
    WeightRule("model.norm", "norm"),
)
MAP = WeightMap(RULES, ignore=(r".*\.inv_freq",))


class CountingScheme(LinearScheme):
    """The dense scheme, with a count of its finalizations."""

    def __init__(self, info: LayerInfo) -> None:
        self._inner = Unquantized.scheme(info, None)
        self.finalized = 0

    def parameters(self, info: LayerInfo) -> Any:
        return self._inner.parameters(info)

    def finalize(self, layer: Any) -> None:
        self.finalized += 1


class Model(nn.Module):
    """A fused linear layer and a norm."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        word = str(dtype).removeprefix("torch.")
        info = LayerInfo("block.qk", 6, SHARDS, Parallel.COLUMN, bias=True, dtype=word)
        self.scheme = CountingScheme(info)
        self.qk = Linear(info, self.scheme, SingleCommunicator(), CPU)
        self.norm = RmsNorm("norm", 6, 1e-5, {"rms_norm": len, "fused_add_rms_norm": len}, dtype, CPU)


def checkpoint(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "model.q_proj.weight": (8, 6),
        "model.q_proj.bias": (8,),
        "model.k_proj.weight": (4, 6),
        "model.k_proj.bias": (4,),
        "model.norm.weight": (6,),
    }
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def folder(path: Path, tensors: dict[str, torch.Tensor]) -> TensorSource:
    """Write a small checkpoint and open it."""
    (path / "config.json").write_text(json.dumps({"architectures": ["X"], "model_type": "x"}))
    save_file(tensors, path / "model.safetensors")
    return open_tensors(read_facts(path))


def test_every_tensor_reaches_its_place(tmp_path: Path) -> None:
    tensors = checkpoint()
    model = Model()
    seen: list[tuple[int, int]] = []
    extra = {"layer.rotary.inv_freq": torch.ones(3)}
    load_weights(model, folder(tmp_path, tensors | extra), MAP, lambda done, total: seen.append((done, total)))
    weight = torch.cat((tensors["model.q_proj.weight"], tensors["model.k_proj.weight"]))
    assert torch.equal(model.qk.get_parameter("weight"), weight)
    assert torch.equal(
        model.qk.get_parameter("bias"), torch.cat((tensors["model.q_proj.bias"], tensors["model.k_proj.bias"]))
    )
    assert torch.equal(model.norm.weight, tensors["model.norm.weight"])
    assert model.scheme.finalized == 1
    size = sum(t.nbytes for t in tensors.values()) + 12
    assert len(seen) == 6 and seen[-1] == (size, size) and seen == sorted(seen)


def test_each_rank_takes_its_rows(tmp_path: Path) -> None:
    tensors = checkpoint()
    shards = (OutputShard("q", 8, unit=4), OutputShard("k", 4, unit=4, may_replicate=True))
    info = LayerInfo("block.qk", 6, shards, Parallel.COLUMN, bias=True, rank=RankInfo(1, 2))
    model = Model()
    model.qk = Linear(info, Unquantized.scheme(info, None), SingleCommunicator(), CPU)
    load_weights(model, folder(tmp_path, tensors), MAP)
    expected = torch.cat((tensors["model.q_proj.weight"][4:], tensors["model.k_proj.weight"]))
    assert torch.equal(model.qk.get_parameter("weight"), expected)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32])
def test_stored_types_are_converted(stored: torch.dtype, wanted: torch.dtype, tmp_path: Path) -> None:
    tensors = checkpoint(stored)
    model = Model(wanted)
    load_weights(model, folder(tmp_path, tensors), MAP)
    weight = model.qk.get_parameter("weight")
    assert weight.dtype == wanted
    assert torch.equal(weight[:8], tensors["model.q_proj.weight"].to(wanted))


def test_a_view_of_bf16_keeps_its_bits(tmp_path: Path) -> None:
    values = torch.tensor([1.0, -2.5, 3.140625, float("inf")], dtype=torch.bfloat16)
    source = folder(tmp_path, {"x.weight": values})
    array = source.get("x.weight")
    tensor = to_torch(array, "bfloat16")
    assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, values)
    assert tensor.data_ptr() == array.ctypes.data


def test_tensors_that_nothing_uses_are_named(tmp_path: Path) -> None:
    extra = {"model.v_proj.weight": torch.ones(2), "model.q_proj.scales": torch.ones(2)}
    with pytest.raises(CheckpointError) as caught:
        load_weights(Model(), folder(tmp_path, checkpoint() | extra), MAP)
    assert caught.value.message.startswith("2 checkpoint tensors are used by nothing: ")
    assert {"model.v_proj.weight", "model.q_proj.scales"} == set(caught.value.message.split(": ")[1].split(", "))
    assert caught.value.field == "checkpoint"


@pytest.mark.parametrize(
    ("absent", "parameter"),
    [
        ("model.k_proj.weight", "block.qk.weight[k]"),
        ("model.q_proj.bias", "block.qk.bias[q]"),
        ("model.norm.weight", "norm.weight"),
    ],
)
def test_parameters_that_nothing_fills_are_named(absent: str, parameter: str, tmp_path: Path) -> None:
    tensors = checkpoint()
    del tensors[absent]
    with pytest.raises(CheckpointError) as caught:
        load_weights(Model(), folder(tmp_path, tensors), MAP)
    assert caught.value.message == f"the checkpoint lacks weights for 1 parameters: {parameter}"
    assert caught.value.value == parameter


def test_long_lists_are_cut(tmp_path: Path) -> None:
    extra = {f"extra.{i}": torch.ones(1) for i in range(11)}
    with pytest.raises(CheckpointError, match=r"^11 checkpoint tensors .* and 3 more"):
        load_weights(Model(), folder(tmp_path, checkpoint() | extra), MAP)


def test_a_wrong_shape_names_the_tensor_and_the_parameter(tmp_path: Path) -> None:
    tensors = checkpoint() | {"model.k_proj.weight": torch.ones(4, 5)}
    with pytest.raises(CheckpointError) as caught:
        load_weights(Model(), folder(tmp_path, tensors), MAP)
    assert caught.value.message == (
        "the shape of a checkpoint tensor does not fit block.qk.weight (tensor 'model.k_proj.weight')"
    )
    assert caught.value.value == (4, 5)


def test_a_matrix_that_is_too_short_for_its_rank_is_an_error_of_the_checkpoint(tmp_path: Path) -> None:
    shards = (OutputShard("q", 8, unit=4), OutputShard("k", 4, unit=4, may_replicate=True))
    info = LayerInfo("block.qk", 6, shards, Parallel.COLUMN, bias=True, rank=RankInfo(1, 2))
    model = Model()
    model.qk = Linear(info, Unquantized.scheme(info, None), SingleCommunicator(), CPU)
    tensors = checkpoint() | {"model.q_proj.weight": torch.ones(6, 6)}
    with pytest.raises(CheckpointError, match=r"does not fit block\.qk\.weight \(tensor 'model\.q_proj\.weight'\)"):
        load_weights(model, folder(tmp_path, tensors), MAP)


def test_a_matrix_that_is_too_long_for_its_ranks_is_an_error_of_the_checkpoint(tmp_path: Path) -> None:
    info = LayerInfo("block.qk", 6, SHARDS[:1], Parallel.COLUMN, rank=RankInfo(0, 2))
    model = Model()
    model.qk = Linear(info, Unquantized.scheme(info, None), SingleCommunicator(), CPU)
    tensors = {"model.q_proj.weight": torch.ones(12, 6), "model.norm.weight": torch.ones(6)}
    with pytest.raises(CheckpointError, match=r"does not fit block\.qk\.weight"):
        load_weights(model, folder(tmp_path, tensors), MAP)


def test_an_optional_module_may_stay_empty(tmp_path: Path) -> None:
    tensors = checkpoint()
    del tensors["model.norm.weight"]
    rules = (*RULES[:2], WeightRule("model.norm", "norm", optional=True))
    model = Model()
    load_weights(model, folder(tmp_path, tensors), WeightMap(rules))
    assert torch.equal(model.qk.get_parameter("weight")[:8], tensors["model.q_proj.weight"])


@pytest.mark.parametrize("shape", [(12, 5), (12,)])
def test_interleaved_rows_become_halves(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    got = reorder_rows(tensor, RowOrder("interleaved_pairs", 3))
    for head in range(3):
        for pair in range(2):
            assert torch.equal(got[head * 4 + pair], tensor[head * 4 + 2 * pair])
            assert torch.equal(got[head * 4 + 2 + pair], tensor[head * 4 + 2 * pair + 1])


def test_an_unknown_row_order_is_an_error() -> None:
    with pytest.raises(CheckpointError) as caught:
        reorder_rows(torch.ones(4, 2), RowOrder("spiral", 1))
    assert (caught.value.message, caught.value.value) == ("unknown row order", "spiral")


def test_rows_are_reordered_on_the_way(tmp_path: Path) -> None:
    tensors = checkpoint()
    rules = (WeightRule("model.q_proj", "block.qk", "q", RowOrder("interleaved_pairs", 2)), *RULES[1:])
    model = Model()
    load_weights(model, folder(tmp_path, tensors), WeightMap(rules))
    order = [0, 2, 1, 3, 4, 6, 5, 7]
    assert torch.equal(model.qk.get_parameter("weight")[:8], tensors["model.q_proj.weight"][order])
    assert torch.equal(model.qk.get_parameter("bias")[:8], tensors["model.q_proj.bias"][order])


def test_dummy_weights_depend_on_name_and_seed_alone() -> None:
    first, again, other = Model(), Model(), Model()
    for model, seed in ((first, 1), (again, 1), (other, 2)):
        torch.manual_seed(seed + 100)
        load_dummy(model, seed)
    assert torch.equal(first.qk.get_parameter("weight"), again.qk.get_parameter("weight"))
    assert not torch.equal(first.qk.get_parameter("weight"), other.qk.get_parameter("weight"))
    assert first.qk.get_parameter("weight").abs().max() <= 1e-3
    assert first.qk.get_parameter("weight").std() > 1e-4
    assert first.scheme.finalized == 1
