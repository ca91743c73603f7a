"""Checkpoints that torchao itself wrote: golden files of its releases 0.18 and 0.12, and what an installed one writes
now.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torchao_writer
from safetensors.torch import load_file
from stored_world import linear, method_named
from torchao_writer import INPUTS, NAME, OUTPUTS

from jackfield.checkpoint import open_tensors
from jackfield.checkpoint.safetensors_header import read_safetensors
from jackfield.checkpoint.torch_file import read_torch
from jackfield.errors import CheckpointError
from jackfield.interfaces import LinearScheme, ModelFacts, OutputShard
from jackfield.loader.weights import to_torch
from jackfield_native.toolchain import unavailable
from jackfield_quantization.fp8_kept_scheme import KeptFp8Scheme
from jackfield_quantization.native_stored_scheme import NativeStoredScheme

GOLDEN = Path(__file__).parent / "golden" / "torchao"
FIRST = GOLDEN.parent / "torchao_first"
KINDS = sorted(path.stem for path in GOLDEN.glob("*.bin"))
FIRST_KINDS = sorted(path.stem for path in FIRST.glob("*.bin"))
CONFIG = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Whatever", "_data": {}}}}
SHARDS = (OutputShard("o_proj", OUTPUTS),)


def config_of(kind: str) -> dict[str, Any]:
    """Return the configuration of a golden file; no other form than floats of six bits depends on it."""
    data = {"weight_dtype": f"fp6_{kind.removeprefix('mxfp6_')}"} if "mxfp6" in kind else {}
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": "Whatever", "_data": data}}}


def stored(path: Path) -> dict[str, torch.Tensor]:
    facts = read_torch(path) if path.suffix == ".bin" else read_safetensors(path)
    source = open_tensors(ModelFacts(str(path), "safetensors", "X", tensors=facts))
    return {name: to_torch(source.get(name), facts[name].dtype).clone() for name in facts}


def scheme_of(path: Path, method: str = "torchao") -> tuple[LinearScheme, torch.Tensor]:
    layer = linear(method_named(method), config_of(path.stem), stored(path), INPUTS, SHARDS)
    return layer.scheme, layer.scheme.dequantize(layer)


def check(folder: Path, kind: str, container: str) -> None:
    _, weight = scheme_of(folder / f"{kind}.{container}")
    torch.testing.assert_close(weight, load_file(folder / "meanings.safetensors")[kind], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("container", ["safetensors", "bin"])
@pytest.mark.parametrize("kind", KINDS)
def test_golden_files(kind: str, container: str) -> None:
    check(GOLDEN, kind, container)


@pytest.mark.parametrize("kind", KINDS)
def test_both_containers_hold_the_same(kind: str) -> None:
    first, second = (stored(GOLDEN / f"{kind}.{container}") for container in ("safetensors", "bin"))
    assert first.keys() == second.keys() and all(name.startswith(f"{NAME[:-7]}.o_proj._weight_") for name in first)
    for name, tensor in first.items():
        assert torch.equal(*(one.reshape(-1).view(torch.uint8) for one in (tensor, second[name]))), name


@pytest.mark.parametrize("kind", FIRST_KINDS)
def test_golden_files_of_the_first_version(kind: str) -> None:
    """Of release 0.12, whose tensors PyTorch files alone hold."""
    check(FIRST, kind, "bin")


def test_zero_points_of_the_first_version_are_whole_numbers() -> None:
    """Others stand for the middle of a group, which no tensor says."""
    found = stored(FIRST / "int4_dynamic.bin")
    (zero,) = (key for key in found if key.endswith("zero_point"))
    assert found[zero].dtype == torch.bfloat16
    with pytest.raises(CheckpointError, match="zero points that are no whole numbers"):
        linear(method_named("torchao"), CONFIG, {**found, zero: found[zero] + 0.5}, INPUTS, SHARDS)


def test_what_the_installed_library_writes(tmp_path: Path) -> None:
    torchao_writer.write(tmp_path)
    kinds = [path.stem for path in tmp_path.glob("*.bin")]
    assert sorted(kinds) == KINDS
    for kind in kinds:
        for container in ("safetensors", "bin"):
            check(tmp_path, kind, container)


@pytest.mark.skipif(unavailable() is not None, reason="needs a C compiler")
def test_whole_numbers_stay_packed_on_cpus() -> None:
    for kind in ("int8_weight_only", "int4_weight_only", "int4_dynamic"):
        scheme, weight = scheme_of(GOLDEN / f"{kind}.safetensors", "native_torchao")
        assert isinstance(scheme, NativeStoredScheme)
        torch.testing.assert_close(weight, load_file(GOLDEN / "meanings.safetensors")[kind], rtol=1e-2, atol=1e-3)


def test_floats_stay_floats_where_a_device_multiplies_them() -> None:
    for kind in ("float8_weight_only", "float8_dynamic", "float8_tensor"):
        scheme, weight = scheme_of(GOLDEN / f"{kind}.safetensors", "torchao_kept")
        assert isinstance(scheme, KeptFp8Scheme)
        torch.testing.assert_close(weight, load_file(GOLDEN / "meanings.safetensors")[kind], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("suffix", "shape", "dtype", "match"),
    [
        ("qdata", (2, 1, 32, 4), torch.int32, r"type torch.int32|type int32"),
        ("qdata", (OUTPUTS, INPUTS + 2), torch.int8, "shape"),
        ("tensor_impl_int_data_int4_shard", (OUTPUTS, INPUTS // 2), torch.uint8, "made of _weight_.*_int4_shard"),
    ],
)
def test_other_forms_are_named(suffix: str, shape: tuple[int, ...], dtype: torch.dtype, match: str) -> None:
    """Tiles without what they need, inputs of another number, and bits in several tensors."""
    found = {
        f"{NAME}._weight_{suffix}": torch.zeros(shape, dtype=dtype),
        f"{NAME}._weight_scale": torch.ones(OUTPUTS, 1),
    }
    with pytest.raises(CheckpointError, match=match):
        linear(method_named("torchao"), CONFIG, found, INPUTS, SHARDS)


def test_a_form_with_zero_points_needs_them() -> None:
    found = {key: tensor for key, tensor in stored(GOLDEN / "int4_weight_only.bin").items() if "zero_point" not in key}
    config = {"quant_method": "torchao", "quant_type": {"default": {"_type": "IntxWeightOnlyConfig"}}}
    with pytest.raises(CheckpointError, match="lacks _weight_zero_point"):
        linear(method_named("torchao"), config, found, INPUTS, SHARDS)


@dataclass
class Evil:
    """Calls a function when it is unpickled."""

    name: str

    def __reduce__(self) -> Any:
        return (eval, (self.name,))


def test_nothing_is_run_or_named_beside_tensors(tmp_path: Path) -> None:
    """A class of the library is a name and no more; what is no part of a tensor is still refused."""
    path = tmp_path / "m.bin"
    torch.save({"a": Evil("1 + 1")}, path)
    with pytest.raises(CheckpointError, match=r"it names builtins\.eval|it names __builtin__\.eval"):
        read_torch(path)
    for text in (b"ctorchao.utils\nrun\n)R", b"ctorchao.utils\nrun\n"):
        raw = b"\x80\x02}(X\x01\x00\x00\x00a" + text + b"u."
        path.write_bytes(archived(raw))
        with pytest.raises(CheckpointError, match="no named tensors: a"):
            read_torch(path)
    raw = b"\x80\x02}(X\x01\x00\x00\x00actorchao_evil\nrun\n)Ru."
    path.write_bytes(archived(raw))
    with pytest.raises(CheckpointError, match=r"it names torchao_evil\.run"):
        read_torch(path)


def archived(table: bytes) -> bytes:
    """Return a file of torch.save with another table."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as made:
        made.writestr("archive/data.pkl", table)
        made.writestr("archive/byteorder", b"little")
    assert pickle.PROTO in table
    return buffer.getvalue()
