"""Times what surrounds wide weights of few rows: kernels one after another, and products that the others are part of.

``python benchmarks/gpu_dense.py --chains [--fp8] [--only TEXT] [--rows 2 4 5 8]``: one JSON object for each chain,
model and number of rows. Chains: ``norm qkv`` is an addition, a norm and a product; ``gated`` a product, an activation
and a second product; ``norm gated`` all of it. Microseconds of a chain, recorded with copies of the weights that do not
stay in the cache:

- ``unfolded_us``: norm and activation kernels, and products as they were chosen before wide weights were launched for
  2 to 8 rows (torch's, but for the largest weights, which were folded then too; with ``--fp8`` quantizing kernels, and
  products of 8-bit numbers); ``again_us`` the same after everything else, which shows how steady the machine is.
- ``launched_us``: the same kernels with the chosen launch of the wide weight.
- ``folded_us``: the chosen launch with what is folded into it. ``ratio``: unfolded to folded.
- ``others_us``: further launches, folded. A better one belongs into ``triton_dense_plan``.

Legend: C copies, T rows of activations, I inputs, O outputs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F

from jackfield.interfaces import (
    OPS,
    QUANTIZING_OPS,
    DeviceFacts,
    LayerInfo,
    OpRequest,
    OutputShard,
    Parallel,
    PendingNorm,
    Settings,
)
from jackfield_ops.triton_ops import TritonOps
from jackfield_quantization.fp8_kernels import quantize_tokens
from jackfield_quantization.fp8_scheme import Fp8Scheme
from jackfield_quantization.triton_dense_launch import skinny_product
from jackfield_quantization.triton_dense_plan import LARGE, SkinnyShape, narrow_shape, skinny_shape
from jackfield_triton.launch import pdl_of

Work = Callable[[int], torch.Tensor]
DEVICE = torch.device("cuda", 0)
CACHED_BYTES = 256 << 20
"""Copies together are at least this large."""
MOST_COPIES = 256
EPS = 1e-6
TOLERANCE = 2e-2
"""Largest relative difference between folded and not, in the Euclidean norm: kernels apart round in between."""
NARROW_TOLERANCE = 8e-2
"""The same where the kernels apart quantize activations."""
MODELS = {"0.6b": (1024, 4096, 3072), "smol": (576, 960, 1536), "8b": (4096, 6144, 12288)}
"""Width, outputs of qkv and inputs of down of some models."""
CHAINS = ("norm qkv", "gated", "norm gated")
FOLDING = [
    SkinnyShape(16, 512, 1, 8, 1, True, slices=8, registers=128),
    SkinnyShape(32, 512, 1, 8, 1, True, slices=8, registers=128),
    SkinnyShape(32, 512, 1, 8, 1, True, slices=8),
    SkinnyShape(16, 512, 1, 4, 1, True, slices=4),
    SkinnyShape(32, 256, 1, 4, 4, True, slices=4),
    SkinnyShape(32, 256, 1, 4, 4, True),
    SkinnyShape(64, 128, 1, 4, 4, True),
    SkinnyShape(64, 64, 1, 4, 6, True),
]
"""Launches of wide weights to try besides the chosen one."""


def sizes_of(chain: str, model: str) -> list[tuple[int, int]]:
    """Return (O, I) of the wide weight, and of the one behind it if there is one."""
    width, qkv, inner = MODELS[model]
    return [(qkv, width)] if chain == "norm qkv" else [(2 * inner, width), (width, inner)]


def before(rows: int, outputs: int, inputs: int, cores: int) -> SkinnyShape | None:
    """Return the launch of several rows as it was chosen before wide weights got their own."""
    wide = outputs > inputs and outputs * inputs < LARGE
    return None if wide and rows > 1 else skinny_shape(rows, outputs, inputs, cores)


def label(shape: SkinnyShape, short: Callable[[SkinnyShape], str]) -> str:
    """Return a launch in one word."""
    return f"{short(shape)}-r{shape.registers}" if shape.registers else short(shape)


class Weight:
    """Copies of one matrix; with a scale for each output they are 8-bit floats."""

    def __init__(self, outputs: int, inputs: int, copies: int, fp8: bool) -> None:
        self.outputs, self.inputs = outputs, inputs
        values = torch.empty(copies, outputs, inputs, dtype=torch.bfloat16, device=DEVICE).normal_().div_(inputs**0.5)
        self.scale = torch.rand(outputs, device=DEVICE) + 0.5 if fp8 else None
        self.values = values.to(torch.float8_e4m3fn) if fp8 else values
        self.counters = torch.zeros(outputs, dtype=torch.int32, device=DEVICE)

    @cached_property
    def held(self) -> tuple[Fp8Scheme, list[Held]]:
        """The scheme of 8-bit floats, and a layer for each copy."""
        scheme, layers = Fp8Scheme(), [Held(self.outputs, self.inputs) for _ in self.values]
        assert self.scale is not None
        for layer, values in zip(layers, self.values, strict=True):
            scheme.hold(layer, values, self.scale)
        return scheme, layers

    def launched(
        self, given: torch.Tensor | PendingNorm, copy: int, shape: SkinnyShape, gate: str = ""
    ) -> torch.Tensor:
        """Return the product by the kernel of few rows."""
        x = given.x if isinstance(given, PendingNorm) else given
        out = x.new_empty(len(x), self.outputs // 2 if gate else self.outputs)
        pdl = pdl_of(torch.cuda.get_device_capability(DEVICE))
        return skinny_product(given, self.values[copy], None, out, shape, self.counters, pdl, self.scale, gate)

    def librarys(self, x: Any, copy: int) -> torch.Tensor:
        """Return torch's product; ``x`` may be quantized."""
        if self.scale is None:
            return F.linear(x, self.values[copy])
        scheme, layers = self.held
        rows = quantize_tokens(x) if isinstance(x, torch.Tensor) else x
        return scheme.apply(layers[copy], rows, None)


class Held:
    """The least a layer can be."""

    def __init__(self, outputs: int, inputs: int) -> None:
        self.info = LayerInfo("x", inputs, (OutputShard("", outputs),), Parallel.REPLICATED, dtype="bfloat16")
        self.parameters: dict[str, torch.Tensor] = {}

    def get_parameter(self, target: str) -> torch.Tensor:
        """Return a parameter."""
        return self.parameters[target]

    def replace_parameters(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Take parameters."""
        self.parameters = dict(parameters)


class Chain:
    """One chain of one model, with its weights; ``rows`` sets the activations."""

    def __init__(self, chain: str, model: str, fp8: bool) -> None:
        self.chain, self.model, self.fp8 = chain, model, fp8
        sizes = sizes_of(chain, model)
        elements = sum(outputs * inputs for outputs, inputs in sizes)
        self.copies = min(MOST_COPIES, max(2, -(-CACHED_BYTES // ((1 if fp8 else 2) * elements))))
        self.wide, *behind = (Weight(outputs, inputs, self.copies, fp8) for outputs, inputs in sizes)
        self.down = behind[0] if behind else None
        self.normed, self.gate = "norm" in chain, "silu" if behind else ""
        facts = torch.cuda.get_device_properties(DEVICE)
        self.cores = facts.multi_processor_count
        device = DeviceFacts("cuda", capability=(facts.major, facts.minor))
        self.ops = {
            o: TritonOps.build(o, OpRequest(kind=o, device=device), Settings()) for o in (*OPS, *QUANTIZING_OPS)
        }
        self.rows(1)

    def rows(self, count: int) -> None:
        """Draw as many rows."""
        self.x, self.residual = torch.randn(2, count, self.wide.inputs, dtype=torch.bfloat16, device=DEVICE)
        self.factor = torch.rand(self.wide.inputs, device=DEVICE).add(0.5).bfloat16()
        self.total = torch.empty_like(self.x)

    def shape(self, weight: Weight) -> SkinnyShape | None:
        """Return the chosen launch."""
        sizes = (len(self.x), weight.outputs, weight.inputs, self.cores)
        return narrow_shape(*sizes) if self.fp8 else skinny_shape(*sizes)

    def unfolded(self, shape: SkinnyShape | None, copy: int) -> torch.Tensor:
        """Run kernels one after another; without ``shape`` the wide product is torch's."""
        quantized = "_quant" if self.fp8 and shape is None else ""
        given: Any = self.x
        if self.normed:
            given, _ = self.ops[f"fused_add_rms_norm{quantized}"](self.x, self.residual, self.factor, EPS)
        made = self.wide.librarys(given, copy) if shape is None else self.wide.launched(given, copy, shape)
        if self.down is None:
            return made
        active = self.ops[f"silu_and_mul{quantized}"](made)
        return self.down.librarys(active, copy) if quantized else self._behind(active, copy)

    def folded(self, shape: SkinnyShape, copy: int) -> torch.Tensor:
        """Run the wide product with everything else in it, and what is behind."""
        given = PendingNorm(self.x, self.residual, self.total, self.factor, EPS) if self.normed else self.x
        return self._behind(self.wide.launched(given, copy, shape, self.gate), copy)

    def _behind(self, x: torch.Tensor, copy: int) -> torch.Tensor:
        if self.down is None:
            return x
        shape = self.shape(self.down)
        return self.down.librarys(x, copy) if shape is None else self.down.launched(x, copy, shape)

    def old(self) -> Work:
        """Return the chain as it was."""
        outputs, inputs = self.wide.outputs, self.wide.inputs
        return partial(self.unfolded, None if self.fp8 else before(len(self.x), outputs, inputs, self.cores))

    def works(self, short: Callable[[SkinnyShape], str]) -> dict[str, Work]:
        """Return everything there is to time, by name."""
        chosen, found = self.shape(self.wide), {"unfolded": self.old()}
        if chosen is not None:
            found |= {"launched": partial(self.unfolded, chosen), "folded": partial(self.folded, chosen)}
        others = {label(shape, short): partial(self.folded, shape) for shape in FOLDING if shape != chosen}
        return found | others | {"again": self.old()}

    def measure(self, seconds_of: Callable[[Work, int], float], short: Callable[[SkinnyShape], str]) -> dict[str, Any]:
        """Return one line."""
        chosen, times, failed = self.shape(self.wide), {}, {}
        wanted = self.old()(0).double()
        for name, work in self.works(short).items():
            try:
                error = float((work(0).double() - wanted).norm() / wanted.norm())
                if not error < (NARROW_TOLERANCE if self.fp8 else TOLERANCE):
                    failed[name] = f"wrong: relative difference {error:.2e}"
                    continue
                times[name] = round(seconds_of(work, self.copies) * 1e6, 2)
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {error}"[:200]
        row: dict[str, Any] = {"chain": self.chain, "model": self.model, "T": len(self.x), "fp8": self.fp8}
        row |= {f"{n}_us": times.pop(n, None) for n in ("unfolded", "again", "launched", "folded")}
        row["chosen"] = "torch" if chosen is None else label(chosen, short)
        if row["folded_us"] and row["unfolded_us"]:
            row["ratio"] = round(row["unfolded_us"] / row["folded_us"], 3)
        return row | {"others_us": dict(sorted(times.items(), key=lambda item: item[1])), "failed": failed}


def chains(only: str, fp8: bool) -> Iterator[Chain]:
    """Yield those whose name contains ``only``."""
    for model in MODELS:
        for chain in CHAINS:
            if only in f"{model} {chain}":
                yield Chain(chain, model, fp8)


def compile_all(chain: Chain, short: Callable[[SkinnyShape], str]) -> None:
    """Run everything once, in parallel, so that compilers run side by side; what fails is reported when it is timed."""

    def first(work: Work) -> None:
        torch.cuda.set_device(DEVICE)
        work(0)

    with ThreadPoolExecutor(12) as pool:
        for done in [pool.submit(first, work) for work in chain.works(short).values()]:
            done.exception()
    torch.cuda.synchronize()


def run(
    only: str,
    counts: list[int],
    fp8: bool,
    seconds_of: Callable[[Work, int], float],
    short: Callable[[SkinnyShape], str],
) -> None:
    """Print a line for each chain and number of rows; raises SystemExit where something failed."""
    print(json.dumps({"device": torch.cuda.get_device_name(DEVICE), "torch": torch.__version__}), flush=True)
    failures = 0
    for chain in chains(only, fp8):
        for count in counts:
            chain.rows(count)
            compile_all(chain, short)
            row = chain.measure(seconds_of, short)
            failures += len(row["failed"])
            print(json.dumps(row), flush=True)
    if failures:
        raise SystemExit(f"{failures} launches failed; see the lines")
