"""``jackfield bench serve``."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from jackfield.cli.bench_flags import DatasetFlags, DrawFlags, LoadFlags, ServeReportFlags
from jackfield.errors import ConfigError

if TYPE_CHECKING:
    from jackfield.benchmarking.load import Load, Outcome
    from jackfield.benchmarking.serving import Ready, ServeSettings

_PROMPTS, _LOAD, _REPORT, _SAMPLING = DatasetFlags(), LoadFlags(), ServeReportFlags(), DrawFlags()


def serve(
    *,
    url: str,
    model: str | None = None,
    endpoint: str = "/v1/completions",
    prompts: DatasetFlags = _PROMPTS,
    load: LoadFlags = _LOAD,
    seed: int = 0,
    warmup: int = 1,
    ignore_eos: bool = False,
    sampling: DrawFlags = _SAMPLING,
    timeout_s: float = 600.0,
    api_key: str | None = None,
    report: ServeReportFlags = _REPORT,
) -> int:
    """Measure a server that runs: throughput, and latencies as its clients see them.

    Parameters
    ----------
    url
        Address of the server.
    model
        Name of the model there; the server's first one when not given.
    endpoint
        `/v1/completions` or `/v1/chat/completions`.
    seed
        Of random prompts and arrival times.
    warmup
        Requests before anything is measured.
    ignore_eos
        Let every answer reach its full length (field `ignore_eos`, which not all servers know).
    timeout_s
        A request that takes longer has failed.
    api_key
        Key of the server; JACKFIELD_API_KEY when not given.
    """
    from jackfield.benchmarking.load import Load
    from jackfield.benchmarking.serving import ServeSettings, sweep
    from jackfield.cli.remote import server_key
    from jackfield.client.connection import Connection

    _check(load, timeout_s)
    report.check()
    base = Load(
        rate=load.request_rate,
        burstiness=load.burstiness,
        concurrency=load.max_concurrency,
        seed=seed,
        timeout_s=timeout_s,
    )
    settings = ServeSettings(
        dataset=prompts.dataset_for(seed),
        loads=sweep(base, load.sweep, load.sweep_by),
        endpoint=endpoint,
        model=model,
        warmup=warmup,
        fields=sampling.fields(ignore_eos=ignore_eos),
    )
    connection = Connection(url, api_key=server_key(api_key), timeout_s=timeout_s)
    ready, outcomes = asyncio.run(_measure(connection, settings))
    return _report(settings, url, ready, outcomes, report, swept=load.sweep is not None)


def _check(load: LoadFlags, timeout_s: float) -> None:
    if load.sweep_by not in ("concurrency", "rate"):
        raise ConfigError(
            "a sweep changes one of two things", field="--sweep-by", value=load.sweep_by, remedy="concurrency or rate"
        )
    if not timeout_s > 0:
        raise ConfigError("must be more than 0", field="--timeout-s", value=timeout_s, remedy="raise --timeout-s")


async def _measure(connection: Any, settings: ServeSettings) -> tuple[Ready, list[tuple[Load, Outcome]]]:
    from jackfield.benchmarking.serving import prepare, run
    from jackfield.cli.output import tell
    from jackfield.cli.remote import progress

    async with connection, connection.wire() as wire:
        ready = await prepare(connection, wire, settings)
        if settings.dataset.name != "random" and len(settings.loads) + settings.warmup > 1:
            tell("prompts of a file are sent again in each run; a server that caches prefixes answers them sooner")
        with progress(sum(map(len, ready.turns))) as tick:
            return ready, await run(wire, ready, settings.loads, tick)


def _report(
    settings: ServeSettings,
    url: str,
    ready: Ready,
    outcomes: list[tuple[Load, Outcome]],
    flags: ServeReportFlags,
    *,
    swept: bool,
) -> int:
    from jackfield.cli.bench_output import heading, print_report, write_json

    percentiles = flags.parsed_percentiles()
    runs = [_run_entry(load, outcome, flags) for load, outcome in outcomes]
    for run in runs:
        if swept:
            print(f"\nrequest rate {run['request_rate']}, max concurrency {run['max_concurrency'] or 'unbounded'}")
        print_report(run, percentiles)
    head = {**heading("serve"), "url": url, **_described(settings, ready, flags)}
    write_json(flags.output, {**head, "runs": runs} if swept else {**head, **runs[0]})
    if flags.picture is not None:
        _draw(flags, f"{ready.plan.model}: latency against load", runs)
    if any(outcome.interrupted for _, outcome in outcomes):
        return 130
    return 0 if all(run["completed"] for run in runs) else 1


def _run_entry(load: Load, outcome: Outcome, flags: ServeReportFlags) -> dict[str, Any]:
    from jackfield.benchmarking.report import details, serve_report

    entry = {
        "request_rate": "inf" if load.rate == float("inf") else load.rate,
        "burstiness": load.burstiness,
        "max_concurrency": load.concurrency,
        "interrupted": outcome.interrupted,
        **serve_report(outcome, flags.goals(), flags.parsed_percentiles()),
    }
    return {**entry, "requests": details(outcome)} if flags.detailed else entry


def _described(settings: ServeSettings, ready: Ready, flags: ServeReportFlags) -> dict[str, Any]:
    data = settings.dataset
    shape = data.shape() if data.name == "random" else None
    return {
        "endpoint": ready.plan.endpoint,
        "model_id": ready.plan.model,
        "server": ready.server,
        "dataset": data.name,
        "dataset_path": str(data.path) if data.path is not None else None,
        "num_prompts": len(ready.turns[0]),
        "input_len": shape.input_len if shape else None,
        "output_len": shape.output_len if shape else data.output_len,
        "range_ratio": shape.range_ratio if shape else None,
        "prefix_len": shape.prefix_len if shape else None,
        "prompts_as_token_ids": isinstance(ready.turns[0][0].prompt, list),
        "seed": data.seed,
        "warmup": settings.warmup,
        "request_fields": dict(settings.fields),
        "goals_ms": {goal.metric: goal.limit_s * 1000 for goal in flags.goals()},
    }


def _draw(flags: ServeReportFlags, title: str, runs: list[dict[str, Any]]) -> None:
    from jackfield.benchmarking.picture import picture
    from jackfield.cli.output import tell

    by_rate = len({run["request_rate"] for run in runs}) > 1
    named = [{**run, "load": run["request_rate"] if by_rate else run["max_concurrency"] or "all"} for run in runs]
    note = f"Numbers at points: {'requests per second' if by_rate else 'most requests at a time'}"
    assert flags.picture is not None
    flags.picture.write_text(picture(title, note, named, flags.parsed_percentiles()), encoding="utf-8")
    tell(f"wrote {flags.picture}")
