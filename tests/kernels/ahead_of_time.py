"""Compiles for one device type, on any machine, exactly what the launchers launch. Run as a program, without the
interpreter: it writes one JSON object per kernel.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from op_checks import angles_of
from paged_case import Case, Shape, attend, limits_of, make_case
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from jackfield.interfaces import (
    OPS,
    QUANTIZING_OPS,
    STEP_OPS,
    AttentionBackend,
    AttentionEnv,
    AttentionRequest,
    DeviceFacts,
    OpRequest,
    OutputShard,
    StepLimits,
)
from jackfield.interfaces.plugin import Settings
from jackfield.testing.attention_cases import Query, run
from jackfield.testing.attention_cases import make_case as make_kit_case
from jackfield.testing.attention_shapes import Shape as KitShape
from jackfield.testing.latent_cases import DenseLayer
from jackfield.testing.state_cases import Piece, make_step
from jackfield.testing.step_cases import Tables
from jackfield_attention import triton_ssd
from jackfield_attention.flash_attn import FlashAttnBackend
from jackfield_attention.flash_attn_layer import FlashLayer
from jackfield_attention.triton_backend import TritonBackend
from jackfield_attention.triton_mla import TritonMlaBackend
from jackfield_attention.triton_mla_layer import TritonMlaLayer
from jackfield_attention.triton_mla_metadata import ContextPart, Contexts
from jackfield_attention.triton_mla_sparse import TritonMlaSparseBackend
from jackfield_attention.triton_states import TritonStatesBackend
from jackfield_ops.triton_ops import TritonOps
from jackfield_quantization.fp8_kernels import quantize_tokens, rescale
from jackfield_quantization.triton_packed_launch import (
    Packed,
    counters_needed,
    packed_product,
    packed_shape,
    sliced_shape,
)

POINTERS = {
    "bfloat16": "*bf16",
    "float16": "*fp16",
    "float32": "*fp32",
    "int16": "*i16",
    "int32": "*i32",
    "int64": "*i64",
    "uint8": "*u8",
    "float8_e4m3fn": "*fp8e4nv",
    "float8_e5m2": "*fp8e5",
}
WAIT = "griddepcontrol.wait"
LOAD = re.compile(r"\b(ld\.global|cp\.async\.c[ag]\.)")
STORE = re.compile(r"\b(st\.global|red\.|atom\.)")
RESOURCES = re.compile(r"(\d+) bytes spill stores.*?Used (\d+) registers", re.DOTALL)


class Compiler:
    """Takes the place of ``JITFunction.run``."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)
        self.rows: list[dict[str, Any]] = []
        self.label = ""

    def __call__(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        names = dict(zip(kernel.arg_names, args, strict=False))
        names.update({key: options.pop(key) for key in list(options) if key in kernel.arg_names})
        constants, signature, hints = {}, {}, {}
        for index, parameter in enumerate(kernel.params):
            value = names[parameter.name]
            kind, hint = ("constexpr", False) if parameter.is_constexpr else _type_of(value)
            if kind == "constexpr":
                constants[parameter.name], kind = value, "constexpr"
            elif hint:
                hints[(index,)] = [["tt.divisibility", 16]]
            signature[parameter.name] = kind
        source = GluonASTSource if kernel.is_gluon() else ASTSource
        built = triton.compile(source(kernel, signature, constants, hints), target=self.target, options=options)
        ptx = built.asm["ptx"]
        spills, registers = _resources(ptx, self.target.arch)
        self.rows.append(
            {
                "case": self.label,
                "kernel": kernel.fn.__name__,
                "spilled_bytes": spills,
                "registers": registers,
                "shared_bytes": built.metadata.shared,
                "wgmma": "wgmma.mma_async" in ptx,
                "mma": "mma.sync" in ptx,
                **_overlap(ptx, bool(options.get("launch_pdl"))),
            }
        )


def _overlap(ptx: str, launched: bool) -> dict[str, Any]:
    """Return whether the launch is a programmatic dependent one, and what its text says of waiting."""
    before, _, after = ptx.partition(WAIT)
    return {
        "pdl": launched,
        "waits": ptx.count(WAIT),
        "releases": ptx.count("griddepcontrol.launch_dependents"),
        "loads_before": len(LOAD.findall(before)),
        "stores_before": len(STORE.findall(before)),
        "stores": len(STORE.findall(ptx)),
        "loads_after": len(LOAD.findall(after)),
    }


def _type_of(value: Any) -> tuple[str, bool]:
    """Return the type that a launch would give an argument, and whether it is a multiple of 16."""
    if isinstance(value, torch.Tensor):
        return POINTERS[_dtype_name(value)], True
    if hasattr(value, "block_shape"):
        layout = f",{value.layout!r}" if hasattr(value, "layout") else ""
        return f"tensordesc<{POINTERS[_dtype_name(value.base)][1:]}{list(value.block_shape)}{layout}>", False
    if isinstance(value, float):
        return "fp32", False
    if value == 1:
        return "constexpr", False
    return "i32" if abs(value) < 1 << 31 else "i64", value % 16 == 0


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _resources(ptx: str, capability: int) -> tuple[int, int]:
    """Return (spilled bytes, registers) as the assembler reports them."""
    program = next(iter(Path(triton.__file__).parent.glob("backends/nvidia/bin/ptxas")))
    arch = f"sm_{capability}a" if capability >= 90 else f"sm_{capability}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [str(program), "-v", f"-arch={arch}", str(source), "-o", str(source.with_suffix(".cubin"))]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = RESOURCES.search(text)
    assert found is not None, text
    return int(found[1]), int(found[2])


def launch_ops(pdl: bool) -> None:
    """Launch every op in bfloat16."""
    settings, device = Settings({"pdl": pdl}), DeviceFacts("cuda", capability=(9, 0))
    weight = torch.ones(4096, dtype=torch.bfloat16)
    x = torch.ones(4, 4096, dtype=torch.bfloat16)
    arguments: dict[str, tuple[Any, ...]] = {
        "rms_norm": (x, weight, 1e-6),
        "fused_add_rms_norm": (x, x, weight, 1e-6),
        "rotary": (x.view(4, 32, 128), angles_of(4, 128)),
        "rms_norm_quant": (x, weight, 1e-6),
        "fused_add_rms_norm_quant": (x, x, weight, 1e-6),
    }
    for op in (*OPS, *QUANTIZING_OPS):
        TritonOps.build(op, OpRequest(kind=op, device=device), settings)(*arguments.get(op, (x,)))
    norm = TritonOps.build("rms_norm", OpRequest(kind="rms_norm", device=device), settings)
    norm(x.view(4, 32, 128), weight[:128], 1e-6)


def launch_steps(pdl: bool) -> None:
    """Launch the ops around the model."""
    settings, device = Settings({"pdl": pdl}), DeviceFacts("cuda", capability=(9, 0))
    ops = {op: TritonOps.build(op, OpRequest(kind=op, device=device), settings) for op in STEP_OPS}
    tables, count, width = Tables.make(4, "cpu"), 4, 4
    drafts, ids = tables.slots.repeat(width, 1), tables.slots[:, None].repeat(1, width + 1)
    tokens, slots, starts = tables.tokens, tables.slots, tables.starts
    ops["greedy_tokens"](torch.ones(count, 50_000, dtype=torch.bfloat16))
    for counts in (None, starts):
        ops["token_inputs"](tokens, tables.blocks, slots, starts, counts, width + 1, 16)
    ops["begin_round"](tokens, tables.known, tables.proposed, slots, starts, starts, drafts)
    for texts in (drafts.t().contiguous(), ids[:, 1:1]):
        ops["keep_tokens"](tokens, tables.known, slots, starts, starts, texts, ids)
    ops["end_round"](tokens, tables.proposed, slots, starts, starts, starts, ids, ids[:, 1:], 900)


def launch_case(backend: type[AttentionBackend], shape: Shape, pdl: bool) -> None:
    """Launch what attends; the tensors are on no device, so the layer cannot know that it may overlap."""
    case = make_case(backend, shape)
    builder, layer = backend.metadata_builder(case.env), backend.layer(case.env, 0)
    builder.allocate(limits_of(case))
    layer.pdl = pdl
    attend(layer, case, builder.build(case.step))


def launch_attention(size: int, block: int, dtype: str = "bfloat16", pdl: bool = True, **options: Any) -> None:
    """Launch decode, prefill and what moves keys and values."""
    sizes = {"heads": 8, "kv_heads": 2, "size": size, "block": block, "dtype": dtype, **options}
    for splits in (1, 33):
        decode = Shape([1, 1], [200, 40], settings={"decode_splits": splits}, **sizes)
        launch_case(TritonBackend, decode, pdl)
    launch_case(TritonBackend, Shape([1, 70], [200, 90], **sizes), pdl)
    for splits in (1, 33):
        launch_case(TritonBackend, Shape([3, 3], [200, 90], settings={"decode_splits": splits}, **sizes), pdl)


def launch_branches() -> None:
    """Launch decode and prefill of drafts that branch."""
    shape = KitShape(ratio=4, head_size=128, value_size=128, block_size=64, dtype="bfloat16", tree=True)
    parents = tuple((index - 1) // 2 for index in range(60))
    for query in (Query(1 + 7, 100, parents[:7]), Query(1 + 60, 100, parents)):
        run(TritonBackend, make_kit_case(TritonBackend, shape, [query]))


def launch_fp8() -> None:
    """Launch what products of 8-bit floats need besides the library's; the tensors are on no device, so nothing
    overlaps.
    """
    x = torch.ones(4, 4096, dtype=torch.bfloat16)
    rows = quantize_tokens(x)
    for bias in (None, x[0]):
        rescale(x, rows.scales, torch.ones(4096), bias)


def launch_moves(block: int, pdl: bool) -> None:
    """Launch write, prepare and gather."""
    flash = make_case(FlashAttnBackend, Shape([1, 70], [200, 90], 32, 8, 128, block, dtype="bfloat16"))
    layer = FlashLayer(flash.env)
    layer.pdl = pdl
    weight = torch.ones(128, dtype=torch.bfloat16)
    k, v = (flash.qkv[:, i * 1024 : (i + 1) * 1024].view(-1, 8, 128) for i in (4, 5))
    layer.write(k, v, flash.cache, flash.step.slots)
    for factor in (None, weight):
        layer.prepare(flash.qkv, angles_of(71, 128), factor, factor, 1e-6, flash.cache, flash.step.slots)
    _gather(layer, flash)


def launch_scaled_moves() -> None:
    """Launch write and prepare into a cache that has scales."""
    case = make_case(TritonBackend, Shape([1, 70], [200, 90], 32, 8, 128, 64, stored="float8_e4m3fn", scaled=True))
    layer = TritonBackend.layer(case.env, 0)
    layer.pdl = True
    k, v = (case.qkv[:, i * 1024 : (i + 1) * 1024].view(-1, 8, 128) for i in (4, 5))
    layer.write(k, v, case.cache, case.step.slots)
    layer.prepare(case.qkv, angles_of(71, 128), None, None, 1e-6, case.cache, case.step.slots)


def _gather(layer: FlashLayer, case: Case) -> None:
    builder = FlashAttnBackend.metadata_builder(case.env)
    builder.allocate(limits_of(case))
    metadata = builder.build(case.step)
    layer.gather(case.cache, metadata.short, metadata.long)


def launch_packed(rows: int, group: int, pdl: bool, tma: bool = True, sliced: bool = False) -> None:
    """Launch a product with a weight of an 8B model in four bits."""
    outputs, inputs = 6144, 4096
    numbers = torch.zeros(inputs // 128, outputs, 32, dtype=torch.int16)
    weight = Packed(numbers, torch.zeros(inputs // group, outputs, dtype=torch.int32), group)
    x, out = torch.zeros(rows, inputs, dtype=torch.bfloat16), torch.zeros(rows, outputs, dtype=torch.bfloat16)
    counters = torch.zeros(counters_needed(outputs), dtype=torch.int32)
    shape = sliced_shape(rows, outputs, 132) if sliced else packed_shape(rows, outputs, 132, tma)
    packed_product(x, weight, None, out, shape, counters, pdl)


LATENT = {"kind": "mla", "num_kv_heads": 1, "head_size": 192, "value_head_size": 128, "scale": 192**-0.5}


def launch_latent(
    heads: int, stored: str, splits: int, tokens: int = 3, capability: tuple[int, int] = (9, 0), pdl: bool = False
) -> None:
    """Launch all kernels over latents of 512 with 64 rotated features, as DeepSeek has them."""
    device, kind = torch.device("cpu"), torch.bfloat16
    facts, sizes = DeviceFacts("cuda", capability=capability, cores=132), {"latent_size": 512, "rope_size": 64}
    request = AttentionRequest(
        dtype="bfloat16", num_heads=heads, device=facts, extra=sizes, cache_dtype=stored, **LATENT
    )
    values = {name: option.default for name, option in TritonMlaBackend.options.items()}
    spec = TritonMlaBackend.cache_specs(request)[0]
    env = AttentionEnv(request, spec, 64, device, Settings({**values, "decode_splits": splits}))
    builder, layer = TritonMlaBackend.metadata_builder(env), TritonMlaLayer(env)
    layer.pdl = pdl
    builder.allocate(StepLimits(tokens, tokens, 8, 512))
    cache = {"latent": torch.zeros(16, 64, 576).to(getattr(torch, stored))}
    rows = torch.zeros(tokens, 576, dtype=kind)
    layer.write(rows[:, :512], rows[:, 512:], cache, torch.zeros(tokens, dtype=torch.int64))
    recorded = builder.capture(tokens, 1)
    q = torch.split(torch.zeros(tokens, heads, 576, dtype=kind), [512, 64], -1)
    layer.decode(*q, cache["latent"], recorded)
    layer.bind(DenseLayer(torch.zeros(heads * 256, 512, dtype=kind), 256))
    places = torch.zeros(8, dtype=torch.int64)
    part = ContextPart(places, places, torch.zeros((1, 6), dtype=torch.int32))
    longer = replace(recorded, num_decodes=0, contexts=Contexts([part], recorded.lengths, several=False))
    layer.attend(
        torch.zeros(tokens, heads, 192, dtype=kind), cache, longer, torch.zeros(tokens, heads, 128, dtype=kind)
    )


def launch_sparse(heads: int, stored: str, splits: int, tokens: int = 3) -> None:
    """Launch index scores and decode over chosen latents, in the sizes of DeepSeek-V3.2."""
    device, kind, index = torch.device("cpu"), torch.bfloat16, {"index_heads": 64, "index_size": 128, "index_topk": 256}
    facts, sizes = DeviceFacts("cuda", capability=(9, 0), cores=132), {"latent_size": 512, "rope_size": 64, **index}
    request = AttentionRequest(
        dtype="bfloat16", num_heads=heads, device=facts, extra=sizes, cache_dtype=stored, **LATENT
    )
    backend = TritonMlaSparseBackend
    values = {name: option.default for name, option in backend.options.items()}
    settings = Settings({**values, "decode_splits": splits})
    env = AttentionEnv(request, backend.cache_specs(request)[0], 64, device, settings)
    builder, layer = backend.metadata_builder(env), backend.layer(env, 0)
    builder.allocate(StepLimits(tokens, tokens, 8, 512))
    layer.bind(DenseLayer(torch.zeros(heads * 256, 512, dtype=kind), 256))
    cache = {
        name: torch.zeros(16, 64, width).to(getattr(torch, stored)) for name, width in (("latent", 576), ("index", 128))
    }
    layer.write_index(torch.zeros(tokens, 128, dtype=kind), cache, torch.zeros(tokens, dtype=torch.int64))
    metadata = builder.capture(tokens, 1)
    chosen = layer.choose(torch.zeros(tokens, 64, 128, dtype=kind), torch.zeros(tokens, 64), cache, metadata)
    q = torch.zeros(tokens, heads, 192, dtype=kind)
    layer.attend_chosen(q, chosen, cache, metadata, torch.zeros(tokens, heads, 128, dtype=kind))


def launch_states(kind: str, heads: int, key: int, value: int, channels: int) -> None:
    """Launch one token of each of three sequences; inputs are in bfloat16, states in float32."""
    shards = (OutputShard("", channels),) if channels else ()
    request = AttentionRequest(
        kind=kind,
        dtype="bfloat16",
        num_heads=heads,
        num_kv_heads=heads,
        head_size=key,
        value_head_size=value,
        extra={"conv_shards": shards, "conv_width": 4},
    )
    env = AttentionEnv(request, TritonStatesBackend.cache_specs(request)[0], 64, torch.device("cpu"), Settings())
    builder, layer = TritonStatesBackend.metadata_builder(env), TritonStatesBackend.layer(env, 0)
    builder.allocate(StepLimits(3, 3, 1, 64))
    metadata = builder.capture(3, 1)
    planes = {p.name: torch.zeros(4, *p.page_shape(64), dtype=getattr(torch, p.dtype)) for p in env.spec.planes}
    if channels:
        x = torch.zeros(3, channels, dtype=torch.bfloat16)
        layer.convolve(x, torch.zeros(channels, 4, dtype=torch.bfloat16), x[0], planes, metadata, torch.zeros_like(x))
    shapes: dict[str, tuple[int, ...]] = {
        "mamba1": (3, heads),
        "mamba2": (3, heads, value),
        "gdn": (3, heads, value),
        "kda": (3, heads, value),
    }
    out = torch.zeros(shapes[kind], dtype=torch.bfloat16)
    layer.mix(_state_inputs(kind, heads, key, value), planes, metadata, out)


def launch_chunks(dtype: str, keys: int, value: int = 64, capability: tuple[int, int] = (9, 0)) -> None:
    """Launch two prompts beside a single token, in the sizes of Mamba-2 2.7B but for ``keys`` and ``value``. Inputs are
    parts of what a projection and a convolution give.
    """
    heads, device, kind = 5120 // value, torch.device("cpu"), getattr(torch, dtype)
    channels = 5120 + 2 * keys
    request = AttentionRequest(
        kind="mamba2",
        dtype=dtype,
        device=DeviceFacts("cuda", capability=capability, cores=132),
        num_heads=heads,
        num_kv_heads=1,
        head_size=keys,
        value_head_size=value,
        extra={"conv_shards": (OutputShard("", channels),), "conv_width": 4},
    )
    env = AttentionEnv(request, TritonStatesBackend.cache_specs(request)[0], 64, device, Settings())
    builder, layer = TritonStatesBackend.metadata_builder(env), TritonStatesBackend.layer(env, 0)
    step = make_step([Piece(0, 7, 8), Piece(1, 0, 300), Piece(2, 20, 90)], [(1, 1), (-1, 2), (3, 3)], device)
    builder.allocate(StepLimits(step.num_tokens, 3, 1, 512))
    metadata = builder.build(step)
    planes = {p.name: torch.zeros(4, *p.page_shape(64), dtype=getattr(torch, p.dtype)) for p in env.spec.planes}
    x = torch.zeros(step.num_tokens, channels, dtype=kind)
    layer.convolve(x, torch.zeros(channels, 4, dtype=kind), x[0], planes, metadata, torch.zeros_like(x))
    values, b, c = x.split([5120, keys, keys], -1)
    dt = torch.zeros(step.num_tokens, channels + heads, dtype=kind)[:, channels:]
    tokens = {"x": values.unflatten(1, (heads, value)), "dt": dt, "b": b.unsqueeze(1), "c": c.unsqueeze(1)}
    constants = dict.fromkeys(("a", "d", "dt_bias"), torch.zeros(heads))
    layer.mix({**tokens, **constants}, planes, metadata, torch.zeros_like(tokens["x"]).contiguous())


def _state_inputs(kind: str, heads: int, key: int, value: int) -> dict[str, torch.Tensor]:
    zeros = torch.zeros
    if kind == "mamba1":
        rows = dict.fromkeys(("x", "dt"), zeros(3, heads)) | dict.fromkeys("bc", zeros(3, key))
        return {**rows, "a": zeros(heads, key), "d": zeros(heads)}
    if kind == "mamba2":
        rows = {"x": zeros(3, heads, value), "dt": zeros(3, heads), **dict.fromkeys("bc", zeros(3, heads, key))}
        return {**rows, **dict.fromkeys(("a", "d", "dt_bias"), zeros(heads))}
    decay = zeros(3, heads, key) if kind == "kda" else zeros(3, heads)
    rows = {**dict.fromkeys("qk", zeros(3, heads, key)), "v": zeros(3, heads, value)}
    return {**rows, "beta": zeros(3, heads), "g": decay}


def main(capability: int) -> None:
    """Compile everything."""
    compiler = Compiler(capability)
    triton.runtime.JITFunction.run = lambda self, *args, **options: compiler(self, *args, **options)
    for compiler.label, pdl in (("ops", True), ("ops, apart", False)):
        launch_ops(pdl)
        launch_steps(pdl)
    compiler.label = "branches, apart"
    launch_branches()
    compiler.label = "fp8, apart"
    launch_fp8()
    compiler.label = "moves, scales"
    launch_scaled_moves()
    for compiler.label, block, pdl in (("moves", 64, True), ("moves, small", 16, True), ("moves, apart", 64, False)):
        launch_moves(block, pdl)
    for rows, group in ((1, 128), (16, 32), (16, 128), (32, 128), (64, 128), (128, 128), (256, 128), (64, 32)):
        compiler.label = f"packed, {rows} rows, groups of {group}, apart"
        launch_packed(rows, group, False)
        if rows > 32:
            compiler.label = f"packed, {rows} rows, groups of {group}"
            launch_packed(rows, group, True)
    for rows, group in ((1, 128), (16, 128), (8, 64), (16, 32)):
        for end, pdl in ((", apart", False), ("", True)):
            compiler.label = f"packed, in slices, {rows} rows, groups of {group}{end}"
            launch_packed(rows, group, pdl, sliced=True)
    compiler.label = "packed, without the copy engine, apart"
    launch_packed(256, 128, False, tma=False)
    for heads, stored, splits in ((16, "bfloat16", 33), (128, "bfloat16", 1), (16, "float8_e4m3fn", 5)):
        compiler.label = f"latents, {heads} heads, {stored}, apart"
        launch_latent(heads, stored, splits)
        compiler.label = f"chosen latents, {heads} heads, {stored}, apart"
        launch_sparse(heads, stored, splits)
    for heads, splits in ((16, 33), (128, 1), (128, 3)):
        compiler.label = f"latents, {heads} heads, {splits} splits, prefill apart"
        launch_latent(heads, "bfloat16", splits, pdl=True)
    for heads, splits in ((16, 1), (16, 33), (128, 1)):
        compiler.label = f"latents, {heads} heads, {splits} splits, without tiles, prefill apart"
        launch_latent(heads, "bfloat16", splits, capability=(10, 0), pdl=True)
    compiler.label = "latents, 128 heads, without tiles, apart"
    launch_latent(128, "bfloat16", 1, capability=(10, 0))
    states = {"mamba1": (8192, 16, 1), "mamba2": (80, 128, 64), "gdn": (32, 128, 128), "kda": (32, 128, 128)}
    for kind, (heads, key, value) in states.items():
        compiler.label = f"states, {kind}, apart"
        launch_states(kind, heads, key, value, 8192)
    for dtype, keys, value in (("bfloat16", 128, 64), ("bfloat16", 64, 128), ("float16", 128, 64), ("float32", 16, 64)):
        compiler.label = f"states, chunks, {dtype}, {keys} by {value}, apart"
        launch_chunks(dtype, keys, value)
    triton_ssd.WALKS_PER_CORE = 0
    for keys, value in ((128, 64), (64, 128)):
        compiler.label = f"states, walks, bfloat16, {keys} by {value}, apart"
        launch_chunks("bfloat16", keys, value)
    triton_ssd.WALKS_PER_CORE = None
    attention: dict[str, dict[str, Any]] = {
        "head 128, block 64": {"size": 128, "block": 64},
        "head 128, block 64, apart": {"size": 128, "block": 64, "pdl": False},
        "head 128, block 16": {"size": 128, "block": 16},
        "head 64, window, sinks": {"size": 64, "block": 64, "window": 100, "sinks": True},
        "head 80, softcap": {"size": 80, "block": 16, "softcap": 30.0},
        "head 128, narrow cache": {"size": 128, "block": 64, "stored": "float8_e4m3fn"},
        "head 128, scales": {"size": 128, "block": 64, "stored": "float8_e4m3fn", "scaled": True},
        "head 256": {"size": 256, "block": 64},
        "float32": {"size": 128, "block": 64, "dtype": "float32"},
    }
    for compiler.label, options in attention.items():
        launch_attention(**options)
    compiler.target = GPUTarget("cuda", 89, 32)
    for dtype in ("bfloat16", "float8_e4m3fn"):
        compiler.label = f"latents, {dtype}, small device, apart"
        launch_latent(128, dtype, 4, capability=(8, 9))
    for dtype, keys in (("bfloat16", 128), ("bfloat16", 256), ("float16", 128), ("float32", 128)):
        compiler.label = f"states, chunks, {dtype}, {keys}, small device, apart"
        launch_chunks(dtype, keys, capability=(8, 9))
    sys.stdout.writelines(json.dumps(row) + "\n" for row in compiler.rows)


if __name__ == "__main__":
    main(int(sys.argv[1]))
