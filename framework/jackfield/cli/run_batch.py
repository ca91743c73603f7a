"""``jackfield run-batch``."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from jackfield.cli.flags import EngineFlags
from jackfield.errors import ConfigError

if TYPE_CHECKING:
    from jackfield.client.batch import Counts
    from jackfield.client.batch_output import BatchOutput
    from jackfield.client.connection import Connection

_IN_PROCESS = "http://jackfield"


def run_batch(
    model: str | None = None,
    *,
    input_file: Annotated[Path, Parameter(name=["--input-file", "-i"])],
    output_file: Annotated[Path, Parameter(name=["--output-file", "-o"])],
    url: str | None = None,
    max_concurrency: int = 64,
    retries: int = 5,
    retry_failed: bool = False,
    timeout_s: float | None = None,
    engine: Annotated[EngineFlags, Parameter(parse=False)],
) -> int:
    """Run the requests of a file in the layout of OpenAI's batch API. What the output file has already is not run
    again, so that the same command goes on after an interruption.

    Parameters
    ----------
    model
        A folder, a file, hf:ORG/NAME or pypi:NAME, to run here; not with a URL.
    input_file
        Lines of JSON with custom_id, method, url and body.
    output_file
        One line is added for each request, in the order in which they end.
    url
        Address of a server that runs already; its key is `--api-key` or JACKFIELD_API_KEY.
    max_concurrency
        Most requests at a time.
    retries
        How often a request is tried again when the server is busy or the connection breaks.
    retry_failed
        Take lines of failed requests out of the output file and run these again.
    timeout_s
        A request that takes longer counts as broken.
    """
    from jackfield.cli.remote import check_writable
    from jackfield.client.batch_output import BatchOutput

    _check(model, url, max_concurrency, retries, timeout_s)
    total = _count(input_file)
    check_writable(output_file, "--output-file")
    if output_file.exists() and output_file.samefile(input_file):
        raise ConfigError("input and output are the same file", field="--output-file", value=str(output_file))
    with BatchOutput(output_file, retry_failed=retry_failed) as output:
        connecting = _connect(model, url, engine, timeout_s)
        try:
            counts = asyncio.run(_run(connecting, input_file, total, output, max_concurrency, retries))
        except KeyboardInterrupt:
            print("interrupted; the same command goes on from here", file=sys.stderr)
            return 130
    print(f"{counts.succeeded} succeeded, {counts.failed} failed, {counts.skipped} were done before", file=sys.stderr)
    return 0


async def _run(
    connecting: Any, input_file: Path, total: int, output: BatchOutput, concurrency: int, retries: int
) -> Counts:
    from jackfield.cli.remote import progress
    from jackfield.client.batch import BatchRun, Retries
    from jackfield.client.batch_lines import read_lines

    async with connecting as connection:
        with progress(total, always=True) as tick, input_file.open("rb") as lines:
            run = BatchRun(
                connection,
                output,
                concurrency=min(concurrency, max(1, total)),
                retries=Retries(retries),
                on_line=lambda _: tick(),
            )
            await run.run(read_lines(lines))
    return run.counts


@asynccontextmanager
async def _connect(
    model: str | None, url: str | None, engine: EngineFlags, timeout_s: float | None
) -> AsyncIterator[Connection]:
    """Give a connection to a server, or to one that lives in this process without a network."""
    from jackfield.cli.remote import key_of_flags
    from jackfield.client.connection import Connection

    if url is not None:
        async with Connection(url, api_key=key_of_flags(engine), timeout_s=timeout_s) as connection:
            await connection.model(None)
            yield connection
        return
    async with (
        _served_here(engine.config(model)) as app,
        Connection(_IN_PROCESS, timeout_s=timeout_s, app=app) as connection,
    ):
        yield connection


@asynccontextmanager
async def _served_here(config: Any) -> AsyncIterator[Any]:
    """Start an engine and give the application that serves it."""
    from jackfield.cli.output import progress_bars
    from jackfield.config import require_model

    require_model(config)
    logging.basicConfig(stream=sys.stderr, level=config.log.level.upper(), format="%(levelname)s %(name)s: %(message)s")
    try:
        from jackfield.server.app import build_app
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("jackfield"):
            raise
        raise ConfigError(
            f"running a batch needs the package '{error.name}', which is not installed",
            field="run-batch",
            value=error.name,
            remedy="pip install 'jackfield[serve]'",
        ) from error
    from jackfield.engine.async_llm import AsyncLLM

    with progress_bars() as progress:
        llm = await AsyncLLM.start(config=config, progress=progress)
    try:
        yield build_app(llm, config)
    finally:
        await llm.shutdown()


def _check(model: str | None, url: str | None, max_concurrency: int, retries: int, timeout_s: float | None) -> None:
    if model is not None and url is not None:
        raise ConfigError(
            "a batch runs either here or on a server", field="--url", value=url, remedy="leave out the model or the URL"
        )
    wrong = {
        "--max-concurrency must be at least 1": max_concurrency < 1,
        "--retries must be at least 0": retries < 0,
        "--timeout-s must be more than 0": timeout_s is not None and not timeout_s > 0,
    }
    texts = [text for text, is_wrong in wrong.items() if is_wrong]
    if texts:
        raise ConfigError("; ".join(texts), field="run-batch", value=None, remedy="change these flags")


def _count(path: Path) -> int:
    """Return how many lines there are to run."""
    try:
        with path.open("rb") as lines:
            return sum(1 for line in lines if line.strip())
    except OSError as error:
        raise ConfigError(
            f"the input file cannot be read: {error}", field="--input-file", value=str(path), remedy="name a file"
        ) from error
