"""Rotations of activations in compressed-tensors checkpoints, against what the library does at run time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.transform import TransformArgs, TransformConfig, TransformScheme, apply_transform_config
from quantized_writers import compressed, groups_of
from stored_world import PATH, Rank, linear, method_named, named, with_config
from torch import nn

from jackfield.errors import CheckpointError, ConfigError
from jackfield.interfaces import OutputShard, Parallel

INPUTS = 128
W4 = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True, "group_size": 32}
SHARDS = (OutputShard("q_proj", 64), OutputShard("k_proj", 32))
BOTH: dict[str, list[TransformArgs]] = {
    "v": [
        TransformArgs(targets=["Linear"], location="input", ignore=["re:.*lm_head"]),
        TransformArgs(targets=["Linear"], location="weight_input", inverse=True, ignore=["re:.*lm_head"]),
    ],
    "u": [
        TransformArgs(targets=["Linear"], location="weight_output", ignore=["re:.*lm_head"]),
        TransformArgs(targets=["Linear"], location="output", inverse=True, ignore=["re:.*lm_head"]),
    ],
}
"""QuIP: inputs and outputs are rotated around weights that are rotated back."""


class Model(nn.Module):
    """Some linear layers under the names of a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        for shard in SHARDS:
            self.add_module(shard.name, nn.Linear(INPUTS, shard.size, bias=False))


def rotated(kind: str, size: int | None, where: dict[str, list[TransformArgs]] = BOTH) -> tuple[Model, dict[str, Any]]:
    """Return a model whose activations the library rotates, and its transform_config."""
    schemes = {
        name: TransformScheme(type=kind, apply=places, head_dim=size, precision=torch.float32)
        for name, places in where.items()
    }
    config = TransformConfig(config_groups=schemes)
    model = Model()
    apply_transform_config(model, config)
    return model, config.model_dump(mode="json")


def checkpoint(model: Model, transforms: dict[str, Any], *, packed: bool = True) -> tuple[dict[str, Any], Any]:
    """Return tensors and configuration; the model's weights become what is packed."""
    tensors: dict[str, torch.Tensor] = {}
    for shard in SHARDS:
        layer = model.get_submodule(shard.name)
        for name, tensor in layer.state_dict().items():
            if name != "weight":
                tensors[f"{PATH}.{shard.name}.{name}"] = tensor.clone()
        if not packed:
            tensors[f"{PATH}.{shard.name}.weight"] = layer.weight.detach().clone()
            continue
        found, meaning = compressed(W4, "pack-quantized")(layer.weight.detach())
        tensors |= named(f"{PATH}.{shard.name}", found)
        layer.weight.data = meaning
    config = groups_of(W4, "pack-quantized", transform_config=transforms)
    return tensors, config if packed else with_config(config, ignore=["re:.*proj"])


def said(model: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model.get_submodule(shard.name)(x) for shard in SHARDS], 1)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", ["hadamard", "random-hadamard", "random-matrix"])
@pytest.mark.parametrize("size", [None, 16])
def test_rotations_become_part_of_matrices(kind: str, size: int | None, packed: bool) -> None:
    model, transforms = rotated(kind, size)
    tensors, config = checkpoint(model, transforms, packed=packed)
    layer = linear(method_named("compressed_tensors"), config, tensors, INPUTS, SHARDS)
    x = torch.randn(5, INPUTS, generator=torch.Generator().manual_seed(9))
    wanted = said(model, x)
    # A matrix of numbers from 0 to 1 has an inverse that is large, and loses that much.
    limit = 1e-3 if kind == "random-matrix" else 1e-6
    assert float((layer(x) - wanted).norm() / wanted.norm()) < limit
    without = {name: tensor for name, tensor in tensors.items() if not name.endswith("put.weight")}
    plain = linear(
        method_named("compressed_tensors"), with_config(config, transform_config={}), without, INPUTS, SHARDS
    )
    assert float((plain(x) - wanted).abs().max()) > 0.1, "the rotations do nothing"


@pytest.mark.parametrize("kind", ["hadamard", "random-hadamard"])
def test_one_copy_of_a_rotation_serves_all(kind: str) -> None:
    """What is the same in all layers may be saved once; what is made is not read at all."""
    model, transforms = rotated(kind, 16)
    tensors, config = checkpoint(model, transforms)
    names = [name for name in tensors if name.endswith("put.weight")]
    assert len(names) == 4
    for name in names:
        if "k_proj" not in name:
            del tensors[name]
    layer = linear(method_named("compressed_tensors"), config, tensors, INPUTS, SHARDS)
    x = torch.randn(5, INPUTS, generator=torch.Generator().manual_seed(9))
    torch.testing.assert_close(layer(x), said(model, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("parallel", [Parallel.COLUMN, Parallel.ROW])
def test_ranks_have_their_parts(parallel: Parallel) -> None:
    model, transforms = rotated("random-hadamard", 16)
    tensors, config = checkpoint(model, transforms)
    method = method_named("compressed_tensors")
    shards = SHARDS if parallel is Parallel.COLUMN else SHARDS[:1]
    only = {name: t for name, t in tensors.items() if parallel is Parallel.COLUMN or "q_proj" in name}
    whole = linear(method, config, only, INPUTS, shards)
    wide = whole.scheme.dequantize(whole)
    for rank in range(2):
        own = linear(method, config, only, INPUTS, shards, parallel=parallel, rank=Rank(rank, 2))
        if parallel is Parallel.ROW:
            wanted = wide.chunk(2, 1)[rank]
        else:
            wanted = torch.cat([part.chunk(2)[rank] for part in wide.split([shard.size for shard in SHARDS])])
        torch.testing.assert_close(own.scheme.dequantize(own), wanted)
    model, transforms = rotated("hadamard", None)
    tensors, config = checkpoint(model, transforms)
    only = {name: t for name, t in tensors.items() if parallel is Parallel.COLUMN or "q_proj" in name}
    with pytest.raises(CheckpointError, match="are not whole groups of") as caught:
        linear(method, config, only, INPUTS, shards, parallel=parallel, rank=Rank(0, 2))
    assert "use fewer ranks" in caught.value.remedy


def test_rotations_of_queries_and_keys_cancel() -> None:
    """The same rotation of both changes no product."""
    method, config = method_named("compressed_tensors"), groups_of(W4, "pack-quantized")
    places = [{"targets": ["re:.*self_attn$"], "location": word, "inverse": False} for word in ("q_attn", "k_cache")]
    group = {"type": "hadamard", "head_dim": 64, "apply": places}
    assert method.parse(with_config(config, transform_config={"config_groups": {"R3": group}})) == method.parse(config)
    for other in (
        {**group, "apply": places[:1]},
        {**group, "type": "random-matrix"},
        {**group, "apply": [places[0], {**places[1], "inverse": True}]},
    ):
        with pytest.raises(ConfigError, match="not both by the same rotation") as caught:
            method.parse(with_config(config, transform_config={"config_groups": {"R3": other}}))
        assert caught.value.field.endswith("R3.apply") and caught.value.remedy


INPUT = {"targets": ["Linear"], "location": "input"}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"type": "cayley", "apply": [INPUT]}, "type is not one of hadamard"),
    ({"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "middle"}]}, "apply is not one of input"),
    ({"type": "hadamard", "randomize": True, "apply": [INPUT]}, "randomize is not false"),
    ({"type": "hadamard", "head_dim": 0, "apply": [INPUT]}, "head_dim is not a positive"),
    ({"type": "hadamard", "apply": [{"targets": 3, "location": "input"}]}, "targets is not a list"),
]


@pytest.mark.parametrize(("group", "message"), WRONG, ids=range(len(WRONG)))
def test_rotations_that_nothing_knows_are_refused(group: dict[str, Any], message: str) -> None:
    config = groups_of(W4, "pack-quantized", transform_config={"config_groups": {"u": group}})
    with pytest.raises(ConfigError, match=message) as caught:
        method_named("compressed_tensors").parse(config)
    assert caught.value.field.startswith("quantization_config") and caught.value.remedy


UNFIT: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"u": {"type": "hadamard", "head_dim": 48, "apply": [INPUT]}}, {}, "128 inputs are not rotated by a hadamard"),
    ({"u": {"type": "random-hadamard", "apply": [INPUT]}}, {}, r"no matrix 'u_input\.weight' of size 128"),
    ({"u": {"type": "hadamard", "apply": [INPUT]}, "v": {"type": "hadamard", "apply": [INPUT]}}, {}, "rotated twice"),
    (
        {"u": {"type": "hadamard", "apply": [{"targets": "Linear", "location": "output"}]}},
        {f"{PATH}.{shard.name}.bias": torch.zeros(shard.size) for shard in SHARDS},
        "rotated behind a bias",
    ),
]


@pytest.mark.parametrize(("groups", "more", "message"), UNFIT, ids=range(len(UNFIT)))
def test_rotations_that_do_not_fit_are_refused(groups: dict[str, Any], more: dict[str, Any], message: str) -> None:
    tensors, _ = checkpoint(Model(), {})
    config = groups_of(W4, "pack-quantized", transform_config={"config_groups": groups})
    with pytest.raises(CheckpointError, match=message) as caught:
        linear(method_named("compressed_tensors"), config, {**tensors, **more}, INPUTS, SHARDS)
    assert caught.value.field == "quantization_config" and caught.value.remedy
