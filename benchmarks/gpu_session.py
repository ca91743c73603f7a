"""One call on a GPU machine: ceilings, kernel tests, kernel rates, and the engine workloads of ``engine_bench.py``.

    python benchmarks/gpu_session.py --out DIR [--models qwen3-0.6b qwen3-8b qwen3-8b+fp8] [--skip tests kernels]
        [--budget SECONDS]

A model with ``+METHOD`` is quantized at load.

Every part runs in its own process with a time limit; its output goes to DIR/PART.log and its JSON lines to
DIR/figures.jsonl.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="*", default=["qwen3-0.6b", "qwen3-8b", "qwen3-8b+fp8"])
    parser.add_argument("--works", nargs="*", default=[])
    parser.add_argument("--skip", nargs="*", default=[])
    parser.add_argument("--budget", type=float, default=560)
    args = parser.parse_args()
    deadline = time.monotonic() + args.budget
    parts: dict[str, list[str]] = {
        "roofline": [str(HERE / "gpu_roofline.py")],
        "tests": [
            "-m",
            "pytest",
            "-q",
            "-x",
            "--timeout=120",
            "-p",
            "no:cacheprovider",
            str(HERE.parent / "tests/device"),
        ],
        "kernels": [str(HERE / "gpu_kernels.py")],
    }
    only = ["--only", *args.works] if args.works else []
    for name in args.models:
        model, _, method = name.partition("+")
        options = ["--quantization", method] if method else []
        parts[name] = [str(HERE / "engine_bench.py"), "--engine", "jackfield", "--model", model, *options, *only]
    for name, command in parts.items():
        if name not in args.skip:
            run(name, command, args.out, deadline - time.monotonic())


def run(name: str, command: list[str], out: Path, limit: float) -> None:
    """Run one part and keep what it printed."""
    if limit < 20:
        print(f"{name}: no time left", flush=True)
        return
    start = time.monotonic()
    log = out / f"{name}.log"
    with log.open("w") as file:
        try:
            code = subprocess.run(
                [sys.executable, *command], stdout=file, stderr=subprocess.STDOUT, timeout=limit, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
    lines = log.read_text(errors="replace").splitlines()
    figures = [line for line in lines if line.startswith("{")]
    with (out / "figures.jsonl").open("a") as file:
        file.writelines(f"{line}\n" for line in figures if _is_json(line))
    shown = figures if code == 0 else [*figures, *lines[-25:]]
    print(f"== {name}: exit {code}, {time.monotonic() - start:.1f} s", *shown, sep="\n", flush=True)


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


if __name__ == "__main__":
    main()
