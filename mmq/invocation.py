"""One run of the command line: global options, signals, and how failures become exit codes."""

from __future__ import annotations

import errno
import os
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

import click

from mmq.console import Console
from mmq.errors import IncompleteError, MachineError, MmqError, UsageError
from mmq.mistyped import explained, swallowed

_F = TypeVar("_F", bound=Callable[..., Any])
#: Errors of the machine rather than of mmq: no space, quota, memory or file descriptors.
_MACHINE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE})

#: click prints these itself, straight to stdout.
_HELP = frozenset({"-h", "--help", "--version"})


class _Terminated(BaseException):
    """SIGTERM arrived; unwinds like KeyboardInterrupt, past every `except Exception`."""


class Run:
    """What the global options set: the object of every command's context."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.debug = False


def _set_mode(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if not value:
        return
    console: Console = ctx.find_root().obj.console
    if console.mode not in ("human", param.name):
        raise click.UsageError("--json and --quiet exclude each other", ctx)
    console.mode = str(param.name)


def _set_debug(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.find_root().obj.debug = True


def global_options(command: _F) -> _F:
    """--json, --quiet and --debug; the group and every command take them, so either place works."""
    options = (
        ("--json", _set_mode, "JSON lines on stdout, ending in a result."),
        ("--quiet", _set_mode, "Only warnings and errors, on stderr; the exit code answers."),
        ("--debug", _set_debug, "Show the traceback of any error."),
    )
    for name, callback, text in reversed(options):
        command = click.option(
            name, is_flag=True, expose_value=False, is_eager=True, callback=callback, help=text
        )(command)
    return command


def invoke(cli: click.Group, argv: Sequence[str] | None = None) -> int:
    """Run one command of `cli` and return its exit code (see errors.EXIT_CODES).

    Args:
        argv: arguments after the program's name; the process's when None.
    """
    if argv is None:
        _use_utf8()
    arguments = list(sys.argv[1:] if argv is None else argv)
    run = Run(Console())
    try:
        _refuse_swallowed(cli, arguments)
        with _sigterm_raises(), cli.make_context("mmq", arguments.copy(), obj=run) as context:
            code = int(cli.invoke(context) or 0)
    except click.exceptions.Exit as stop:
        code = stop.exit_code
    except click.ClickException as error:
        code = _usage_error(run, cli, error, arguments)
    except (KeyboardInterrupt, click.Abort):
        code = _stopped(run, "interrupted", 130, arguments)
    except _Terminated:
        code = _stopped(run, "terminated", 143, arguments)
    except Exception as error:
        code = _failed(run, error, arguments)
    try:
        run.console.finish(code)
    except OSError as error:
        return _failed(run, error, arguments)
    return code


def _use_utf8() -> None:
    """Start again in UTF-8 mode where Python would read file names as ASCII (LC_ALL=C).

    Names of shards and side files are UTF-8 in indexes and manifests, whatever the locale.
    """
    if sys.getfilesystemencoding() != "utf-8" and sys.executable:
        os.execv(sys.executable, [sys.executable, "-P", "-X", "utf8", "-m", "mmq", *sys.argv[1:]])


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM unwinds the stack, so that locks go and partial files are removed."""

    def terminate(signum: int, frame: FrameType | None) -> None:
        raise _Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _usage_error(
    run: Run, cli: click.Group, error: click.ClickException, arguments: list[str]
) -> int:
    """click's own errors; options after the faulty one were not parsed, so --json is looked for."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return error.exit_code
    if "--json" in arguments:
        run.console.mode = "json"
    context = getattr(error, "ctx", None)
    name = _command_name(cli, arguments)
    command = context.command_path if context else f"mmq {name}" if name else "mmq"
    message, hint = error.format_message(), f"{command} --help"
    if name is not None and isinstance(error, click.UsageError):
        typed = arguments[arguments.index(name) + 1 :]
        message, hint = explained(cli.commands[name], command, typed, message, hint)
    run.console.error(UsageError("usage", message, hint=hint))
    return error.exit_code


def _command_name(cli: click.Group, arguments: list[str]) -> str | None:
    return next((word for word in arguments if word in cli.commands), None)


def _refuse_swallowed(cli: click.Group, arguments: list[str]) -> None:
    """click takes any word for a value, the next option too; `explained` says which it was.

    Raises:
        click.UsageError: an option has another one's name for its value.
    """
    name = _command_name(cli, arguments)
    if name is None:
        return
    typed = arguments[arguments.index(name) + 1 :]
    if any(swallowed(cli.commands[name], typed)):
        raise click.UsageError("an option has no value")


def _stopped(run: Run, how: str, code: int, arguments: list[str]) -> int:
    hint = None
    words = set(arguments)
    streams = {"verify", "logits"} <= words or ("calibrate" in words and "--merge" not in words)
    if (streams or words & {"convert", "publish"}) and "--dry-run" not in words:
        # --restart would throw away what the interrupted run finished
        again = [a for a in arguments if a != "--restart"]
        hint = f"resume with: {shlex.join(['mmq', *again])}"
    error = IncompleteError(how, f"{how} before the end", hint=hint)
    error.exit_code = code
    run.console.error(error)
    return code


def _failed(run: Run, error: Exception, arguments: list[str]) -> int:
    """Report a failure as an MmqError and return its exit code."""
    if run.debug:
        run.console.traceback(traceback.format_exc())
    if isinstance(error, BrokenPipeError) and _HELP.intersection(arguments):
        return run.console.abandon_stdout()
    known = error if isinstance(error, MmqError) else _unexpected(error)
    run.console.error(known)
    if os.environ.get("GITHUB_STEP_SUMMARY"):
        from mmq.report.github import error_command

        run.console.annotate([error_command(known)])
    return known.exit_code


def _unexpected(error: Exception) -> MmqError:
    """What mmq did not foresee, in one line."""
    if isinstance(error, MemoryError):
        return MachineError("out-of-memory", "not enough memory", hint="--jobs 1")
    debug = "run the same command with --debug for the traceback"
    if isinstance(error, OSError):
        kind = MachineError if error.errno in _MACHINE_ERRNOS else MmqError
        where = None if error.filename is None else str(error.filename)
        return kind("os-error", error.strerror or str(error), where=where, hint=debug)
    return MmqError("unexpected", f"{type(error).__name__}: {error}", hint=debug)
