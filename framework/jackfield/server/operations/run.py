"""``serve``: from a configuration to a server that runs until it is told to stop."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from jackfield.config import EngineConfig, ServerSection
from jackfield.engine.async_llm import AsyncLLM
from jackfield.engine.host import Seat
from jackfield.errors import EngineDeadError
from jackfield.server.app import build_app
from jackfield.server.engine_view import Engine
from jackfield.server.operations.calls import Listener
from jackfield.server.operations.drain import Outcome, StopSignals, first_of, supervise
from jackfield.server.operations.exchange import Exchange
from jackfield.server.operations.keys import read_keys
from jackfield.server.operations.lifetime import Lifetimes
from jackfield.server.operations.logs import log_call, logging_to
from jackfield.server.operations.observed_engine import observed
from jackfield.server.operations.processes import serve_many
from jackfield.server.operations.prometheus import ServerMetrics
from jackfield.server.operations.settings import check_settings
from jackfield.server.operations.sockets import address_text, bound_socket
from jackfield.server.operations.stack import wrap
from jackfield.server.state import state_of

KEEP_ALIVE_SECONDS = 75
"""How long an idle connection stays open: longer than usual proxies keep theirs, so that they close first."""
INTERRUPTED = 130
"""Exit code of a server that was told to stop at once, or before it was ready."""
_CLOSE_SECONDS = 5
"""How long connections may take to close at the end."""

_logger = logging.getLogger("jackfield.server")


def serve(config: EngineConfig) -> int:
    """Load the model, serve it until SIGTERM or SIGINT, and return the exit code: 0 after running requests finished or
    had their time, 130 when a second signal ended them or the first one came while the model was loaded.

    Raises:
        ConfigError: a setting, a key file, a certificate or the address is at fault; nothing was loaded.
        JackfieldError: as :meth:`jackfield.AsyncLLM.start`. EngineDeadError: the engine died while it served.
    """
    check_settings(config)
    keys = read_keys(config.server)
    with (
        logging_to(sys.stderr, config, keys),
        bound_socket(config.server) as sock,
        asyncio.Runner(loop_factory=_loop_factory()) as runner,
    ):
        return runner.run(_serve(config, sock))


def serve_seat(seat: Seat, config: EngineConfig, sock: socket.socket, folder: Path) -> Outcome:
    """Serve as one of several API processes, until a signal comes or the engine dies.

    Args:
        seat: at the engine. config: as it was loaded. sock: shared with the others. folder: for numbers they exchange.
    """

    async def run() -> Outcome:
        engine = await AsyncLLM.attach(seat)
        try:
            return await run_api(engine, config, [sock], exchange=Exchange(folder, seat.number))
        finally:
            await engine.shutdown()

    keys = read_keys(config.server)
    with logging_to(sys.stderr, config, keys), asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(run())


async def _serve(config: EngineConfig, sock: socket.socket) -> int:
    signals = StopSignals()
    with signals.listening():
        if config.server.api_processes > 1:
            sock.listen()
            outcome = await serve_many(config, sock, signals, _progress())
            return INTERRUPTED if outcome is Outcome.FORCED else 0
        engine = await _load(config, signals)
        if engine is None:
            return INTERRUPTED
        try:
            outcome = await run_api(engine, config, [sock], signals)
            if outcome is Outcome.ENGINE_DIED:
                raise engine.error or EngineDeadError("the engine stopped")
        finally:
            await engine.shutdown()
    _logger.info("stopped")
    return INTERRUPTED if outcome is Outcome.FORCED else 0


async def run_api(
    engine: Engine,
    config: EngineConfig,
    sockets: Sequence[socket.socket],
    signals: StopSignals | None = None,
    exchange: Exchange | None = None,
) -> Outcome:
    """Run one API before ``engine`` on bound sockets, in this event loop, until a signal comes or the engine dies.
    The engine is not shut down. Several processes may do this before one engine, each with a copy of the sockets.

    Args:
        engine: what runs the model. config: as it was loaded. sockets: to listen on; closed at the end.
        signals: the signals that are listened to; when None, this function listens itself, in the main thread.
        exchange: where API processes of one server tell their numbers, or None when this is the only one.
    """
    lifetimes = Lifetimes()
    with ExitStack() as stack:
        if signals is None:
            signals = StopSignals()
            stack.enter_context(signals.listening())
        listeners = [log_call, *stack.enter_context(_tracing(config))]
        metrics = ServerMetrics(
            engine.metrics, _model_name(config), vllm_names=config.server.vllm_metric_names, exchange=exchange
        )
        app = _application(engine, config, lifetimes, metrics, listeners)
        telling = exchange.telling(metrics.numbers) if exchange is not None else nullcontext()
        async with telling, _http(app, config, sockets, signals):
            return await supervise(engine, lifetimes, signals, config.server.drain_timeout_s)


def _application(
    engine: Engine, config: EngineConfig, lifetimes: Lifetimes, metrics: ServerMetrics, listeners: list[Listener]
) -> ASGIApp:
    routes = build_app(observed(engine), config)
    state = state_of(routes)
    lifetimes.on_close(lambda: setattr(state, "draining", True))
    return wrap(
        routes,
        config.server,
        keys=read_keys(config.server),
        metrics=metrics,
        lifetimes=lifetimes,
        listeners=[metrics.count, *listeners],
    )


@asynccontextmanager
async def _http(
    app: ASGIApp, config: EngineConfig, sockets: Sequence[socket.socket], signals: StopSignals
) -> AsyncIterator[None]:
    """Answer HTTP while the context lasts."""
    server = _Server(_uvicorn_config(app, config.server))
    serving = asyncio.create_task(server.serve(list(sockets)), name="jackfield-http")
    # Should it end by itself, there is nothing left to wait for; its error comes out below.
    serving.add_done_callback(lambda _: signals.notice())
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        for sock in sockets:
            _logger.info("listening on %s", address_text(sock, config.server))
        yield
    finally:
        server.should_exit = True
        await serving


class _Server(uvicorn.Server):
    """uvicorn, without its own handling of signals: it would kill the process with the signal once more."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _uvicorn_config(app: ASGIApp, settings: ServerSection) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        # The parser's own limit breaks the connection off; ours, which is lower, answers.
        h11_max_incomplete_event_size=4 * settings.max_header_bytes,
    )


async def _load(config: EngineConfig, signals: StopSignals) -> AsyncLLM | None:
    """Return the engine, or None when a signal came first."""
    started = time.monotonic()
    _logger.info("loading %s", config.model.model)
    loading = asyncio.create_task(AsyncLLM.start(config=config, progress=_progress()))
    await first_of(_settled(loading), signals.first.wait())
    if not loading.done():
        loading.cancel()
        await _settled(loading)
    if loading.cancelled():
        return None
    engine = loading.result()
    _logger.info("%s; ready after %.1f s", engine.report.summary(), time.monotonic() - started)
    return engine


async def _settled(task: asyncio.Task[AsyncLLM]) -> None:
    """Wait until a task is over, whatever became of it."""
    await asyncio.wait([task])


def _progress() -> Callable[[str, int, int], None]:
    """Return a listener that logs a download at each tenth of it."""
    told: dict[str, int] = {}

    def progress(what: str, done: int, total: int) -> None:
        tenth = 10 * done // total if total else 0
        if tenth > told.get(what, -1):
            told[what] = tenth
            _logger.info("%s: %d%% of %.0f MB", what, 10 * tenth, total / 1e6)

    return progress


def _model_name(config: EngineConfig) -> str:
    return (*config.server.served_model_name, config.model.model)[0]


@contextmanager
def _tracing(config: EngineConfig) -> Iterator[list[Listener]]:
    endpoint = config.server.otlp_endpoint
    if endpoint is None:
        yield []
        return
    from jackfield.server.operations.tracing import to_endpoint

    tracing = to_endpoint(_model_name(config), endpoint)
    try:
        yield [tracing.record]
    finally:
        tracing.close()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the maker of uvloop's event loops where that is installed."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    return factory
