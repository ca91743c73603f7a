"""Runs one command line: parses, dispatches, and turns errors into exit codes and short texts.

Exit codes: 0 done, 1 an internal error, 2 a user's error, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from cyclopts import CycloptsError

from jackfield.cli.app import COMMANDS_WITH_ENGINE, add_plugin_commands, build_app
from jackfield.cli.flags import EngineFlags, extract, suggest
from jackfield.errors import EngineDeadError, JackfieldError


def run(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit code."""
    tokens = list(sys.argv[1:] if argv is None else argv)
    traceback = "--traceback" in tokens
    tokens = [token for token in tokens if token != "--traceback"]
    try:
        return _dispatch(tokens)
    except KeyboardInterrupt:
        return _fail("interrupted", 130, traceback=False)
    except BrokenPipeError:
        return _reader_gone()
    except JackfieldError as error:
        # 2 is for what the user can mend; an engine that died is not.
        return _fail(f"error: {error}", 1 if isinstance(error, EngineDeadError) else 2, traceback)
    except Exception as error:
        text = f"internal error: {type(error).__name__}: {error}\n  remedy: run again with --traceback to see where"
        return _fail(text, 1, traceback)


def _dispatch(tokens: list[str]) -> int:
    engine = EngineFlags()
    command = engine_command(tokens)
    if command:
        tokens, engine = extract(tokens)
    app = build_app(with_flags_help=bool(command) and ("--help" in tokens or "-h" in tokens))
    if tokens and not tokens[0].startswith("-") and tokens[0] not in app:
        add_plugin_commands(app)
    try:
        function, bound, hidden = app.parse_args(tokens, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        return _usage(str(error), tokens, engine_flags=bool(command))
    code = function(*bound.args, **bound.kwargs, **({"engine": engine} if "engine" in hidden else {}))
    return code if isinstance(code, int) else 0


def _reader_gone() -> int:
    """Whoever read stdout left: that is no error, and what is still buffered goes nowhere."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def engine_command(tokens: Sequence[str]) -> str:
    """Return the command of a command line when it takes engine flags, or ``""``."""
    for name in COMMANDS_WITH_ENGINE:
        if tuple(tokens[: len(name.split())]) == tuple(name.split()):
            return name
    return ""


def _usage(message: str, tokens: Sequence[str], *, engine_flags: bool) -> int:
    hint = suggest(message, tokens) if engine_flags else ""
    text = f"error: {message.partition(' Did you mean')[0] if hint else message}"
    return _fail(f"{text}\n  remedy: {hint}" if hint else f"{text}\n  remedy: see --help", 2, traceback=False)


def _fail(text: str, code: int, traceback: bool) -> int:
    if traceback:
        import traceback as formatter

        text = f"{formatter.format_exc()}{text}"
    print(text, file=sys.stderr)
    return code
