"""How grouped products are launched: found by a tuner for sizes, type and device, or else by rules.

A file of tuned launches is a JSON object: ``up`` and ``down``, each from a number of rows to a launch; the launch for
the largest number that is not above the rows of a step is taken.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jackfield.errors import ConfigError
from jackfield.interfaces import ExpertsRequest


@dataclass(frozen=True, slots=True)
class Launch:
    """One way to launch a product.

    Args:
        rows, columns, depth: of a tile: pairs, outputs, inputs. swizzle: blocks of rows whose programs follow one
            another. warps: of a program. stages: tiles in flight. tma: where it can, the copy engine of capability
            9.0 brings weights.
    """

    rows: int
    columns: int
    depth: int
    swizzle: int
    warps: int
    stages: int
    tma: bool = False


@dataclass(frozen=True, slots=True)
class FewLaunch:
    """One way to launch the products of few rows.

    Args:
        up_columns, down_columns: outputs of a program. up_depth, down_depth: inputs of a tile; one of the second
            product has them of each expert. warps: of a program. stages: tiles in flight.
    """

    up_columns: int = 8
    up_depth: int = 512
    down_columns: int = 8
    down_depth: int = 128
    warps: int = 4
    stages: int = 3


def few_launch(rows: int, layout: str = "dense") -> FewLaunch:
    """Return how the products of so many rows are launched: one row fills a device by narrower programs, and numbers
    of four bits need registers to be taken apart in.
    """
    if layout in ("int4", "mxfp4"):
        return FewLaunch(down_columns=4)
    return FewLaunch(down_columns=4, down_depth=256) if rows == 1 else FewLaunch()


FEW_ROWS = 4
"""Up to so many rows, weights are read for each pair on its own: experts that rows share are rare."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Launches of both products, by least number of rows, ascending. Where both have the same rows in a tile, pairs are
    sorted once.
    """

    up: tuple[tuple[int, Launch], ...]
    down: tuple[tuple[int, Launch], ...]
    source: str = "rules"

    @property
    def starts(self) -> tuple[int, ...]:
        """The numbers of rows from which on other launches are taken."""
        return tuple(sorted({rows for rows, _ in (*self.up, *self.down)}))

    def of(self, rows: int) -> tuple[Launch, Launch]:
        """Return the launches for that many rows."""
        return _at(self.up, rows), _at(self.down, rows)


def _at(launches: tuple[tuple[int, Launch], ...], rows: int) -> Launch:
    fitting = [launch for least, launch in launches if least <= rows]
    return fitting[-1] if fitting else launches[0][1]


def default_launch(pairs: int, experts: int, width: int, layout: str = "dense") -> Launch:
    """Return a launch from the average number of pairs of an expert that has some.

    Args:
        pairs: of rows and experts. experts: X. width: bytes of an activation. layout: of the matrices.
    """
    average = pairs / max(1, min(pairs, experts))
    depth = 128 // width
    # Numbers of four bits are taken apart in registers, which wide tiles would not leave.
    columns = 32 if layout in ("int4", "mxfp4") else 64
    if average <= 8:
        return Launch(16, columns, 2 * depth, 1, 4, 4)
    if average <= 24:
        return Launch(32, columns, 2 * depth, 1, 4, 4)
    if average <= 64:
        return Launch(64, 2 * columns, depth, 1, 4, 4)
    return Launch(128, 2 * columns, depth, 16, 8, 3)


MEASURED: tuple[tuple[int, Launch, Launch], ...] = (
    (0, Launch(16, 64, 128, 1, 4, 4), Launch(16, 128, 64, 1, 4, 4, tma=True)),
    (9, Launch(32, 64, 128, 1, 4, 3, tma=True), Launch(16, 128, 64, 1, 4, 3, tma=True)),
    (25, Launch(32, 64, 128, 1, 4, 3, tma=True), Launch(32, 128, 64, 1, 4, 4, tma=True)),
    (65, Launch(64, 256, 64, 1, 8, 3, tma=True), Launch(64, 256, 64, 1, 8, 4, tma=True)),
    (257, Launch(128, 128, 64, 1, 8, 4, tma=True), Launch(128, 256, 64, 1, 8, 3)),
)
"""Launches by pairs of an expert, of a gated product and of one that is not: numbers of two bytes on capability 9.0, as
measured there (docs/benchmarks.md).
"""


def default_plan(request: ExpertsRequest, *, hopper: bool = False) -> Plan:
    """Return launches by rules, at the numbers of rows where they change. ``hopper``: see
    :func:`has_copy_engine`.
    """
    if hopper and request.kind == "dense" and request.dtype in ("bfloat16", "float16"):
        least = [max(1, -(-pairs * request.num_experts // max(1, request.top_k))) for pairs, _, _ in MEASURED]
        ups = (up if request.gated else down for _, up, down in MEASURED)
        return Plan(tuple(zip(least, ups, strict=True)), tuple(zip(least, (d for _, _, d in MEASURED), strict=True)))
    width = 4 if request.dtype == "float32" else 2
    each, chosen = request.num_experts, max(1, request.top_k)
    steps = [1, *(-(-average * each // chosen) for average in (9, 25, 65))]
    launches = tuple((rows, default_launch(rows * chosen, each, width, request.kind)) for rows in sorted(set(steps)))
    return Plan(launches, launches)


def file_name(request: ExpertsRequest, device: str) -> str:
    """Return the name of the file of a block on a device, without its ending."""
    sizes = f"X{request.num_experts}-S{request.top_k}-E{request.hidden_size}-F{request.intermediate_size}"
    return f"{sizes}-{request.dtype}-{request.kind}-{'_'.join(device.split()) or 'device'}"


def plan_for(request: ExpertsRequest, device: str, folders: tuple[Path, ...], *, hopper: bool = False) -> Plan:
    """Return the tuned launches of the first folder that has some, or those of the rules.

    Raises:
        ConfigError: a file is not what a tuner writes.
    """
    for folder in folders:
        path = folder / f"{file_name(request, device)}.json"
        if path.is_file():
            return read_plan(path)
    return default_plan(request, hopper=hopper)


def has_copy_engine(capability: tuple[int, int]) -> bool:
    """Return whether kernels can have tiles brought by the copy engine, with room for those of :data:`MEASURED`:
    capability 12 has a third of the memory that 9 and 10 have.
    """
    return (9, 0) <= capability < (12, 0) and find_spec("triton.tools.tensor_descriptor") is not None


def read_plan(path: Path) -> Plan:
    """Return the launches of a file; raises ConfigError for one that no tuner wrote."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Plan(_launches(content["up"]), _launches(content["down"]), str(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"a file of tuned launches cannot be read: {type(error).__name__}: {error}",
            field="tuned launches",
            value=str(path),
            remedy="delete it, or write it again with: jackfield tune moe MODEL",
        ) from error


def _launches(content: Mapping[str, Mapping[str, Any]]) -> tuple[tuple[int, Launch], ...]:
    found = tuple(sorted(((int(rows), Launch(**launch)) for rows, launch in content.items()), key=lambda pair: pair[0]))
    if not found:
        raise ValueError("no launches")
    return found


def plan_content(plan: Plan) -> dict[str, Any]:
    """Return what a file of these launches holds."""
    parts = {"up": plan.up, "down": plan.down}
    return {part: {str(rows): asdict(launch) for rows, launch in launches} for part, launches in parts.items()}
