"""``jackfield bench``: its commands."""

from __future__ import annotations

from cyclopts import App

from jackfield.cli import bench_offline, bench_serve


def bench_app(epilogue: str | None) -> App:
    """Return the app of all benchmarks; ``epilogue`` ends the help of those that take engine flags."""
    app = App(name="bench", help="Measure a server, or an engine in this process.")
    app.command(bench_serve.serve, name="serve")
    app.command(bench_offline.latency, name="latency", help_epilogue=epilogue)
    app.command(bench_offline.throughput, name="throughput", help_epilogue=epilogue)
    return app
