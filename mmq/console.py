"""The only place that prints: answers on stdout, talk on stderr, in three modes.

    human   tables and findings on stdout; notes, warnings, errors and progress on stderr
    json    one JSON object a line on stdout ({"event": …}), the last one {"event": "result", …};
            progress stays on stderr
    quiet   nothing on stdout; warnings and errors on stderr; the exit code is the answer

Text is UTF-8 whatever the locale; what cannot be encoded is escaped, never an error. When nobody
reads stdout any more (`mmq … | head`), output stops quietly and the work goes on.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Protocol, TextIO

from mmq.errors import MmqError
from mmq.report.findings import Finding

#: Seconds between progress lines in a log; a line a second would bury the log's other lines.
LINE_INTERVAL = 30.0

_COLOURS = {"error": "\x1b[1;31m", "warning": "\x1b[33m", "note": "\x1b[36m"}
_RESET = "\x1b[0m"
#: C0 controls but newline and tab, DEL, C1: tensor and file names are input, a terminal obeys them.
_CONTROLS = {c: f"\\x{c:02x}" for c in (*range(32), *range(127, 160)) if chr(c) not in "\n\t"}


class Progress(Protocol):
    """A running total of bytes."""

    def advance(self, nbytes: int, label: str = "") -> None:
        """Count `nbytes` more; `label` says what they belonged to."""

    def __enter__(self) -> Progress: ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...  # fmt: skip


class Console:
    """Where commands and library functions say what they have to say.

    Args:
        mode: human, json or quiet; may be changed while options are being parsed.
        stdout / stderr: default to the process's, switched to UTF-8.
        environ: looked up for NO_COLOR and TERM.
        clock: seconds, for the interval of progress lines.
    """

    def __init__(
        self,
        mode: str = "human",
        *,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.mode = mode
        self._out: TextIO | None = _utf8(sys.stdout if stdout is None else stdout)
        self._err: TextIO | None = _utf8(sys.stderr if stderr is None else stderr)
        colour_wanted = not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
        self._err_colour = colour_wanted and _is_terminal(self._err)
        self._out_colour = colour_wanted and _is_terminal(self._out)
        self._clock = clock
        self._secrets: list[str] = []
        self._result: dict[str, Any] | None = None

    def hide(self, secret: str) -> None:
        """Never print this, whatever message, report or traceback it gets into."""
        if secret and secret not in self._secrets:
            self._secrets.append(secret)

    def hidden(self, text: str) -> str:
        """The text without secrets."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def note(self, message: str) -> None:
        """Something worth knowing that changes nothing."""
        self._talk("note", message)

    def warn(self, message: str) -> None:
        """Something that may be wrong, though work goes on."""
        self._talk("warning", message)

    def error(self, error: MmqError) -> None:
        """A failure, with where, got, expected and hint on lines of their own."""
        if self.mode == "json" and self._out is not None:
            self._event("error", error.as_dict())
            return
        head = self._paint("error", f"error[{error.id}]", self._err_colour)
        lines = [f"{head}: {_clean(error.message)}"]
        fields = (("where", error.where), ("got", error.got), ("expected", error.expected))
        lines += [f"  {k + ':':<10}{_clean(v)}" for k, v in fields if v]
        lines += [f"  {'hint:':<10}{_clean(error.hint)}"] if error.hint else []
        self._to_stderr("\n".join(lines))

    def finding(self, finding: Finding, *, talk: bool = False) -> None:
        """One finding of a check; quiet keeps those above a note.

        Args:
            talk: whether it comments on the work (stderr) instead of being the answer (stdout).
        """
        if self.mode == "json":
            self._event("finding", finding.as_dict())
        elif self.mode == "human" and not talk:
            self._to_stdout(self._render_finding(finding, self._out_colour))
        elif self.mode == "human" or finding.severity != "note":
            self._to_stderr(self._render_finding(finding, self._err_colour))

    def event(self, name: str, text: str = "", /, **data: Any) -> None:
        """A step of a longer job: `text` for people, `{"event": name, …data}` as JSON."""
        if self.mode == "json":
            self._event(name, data)
        elif self.mode == "human" and text:
            self._to_stdout(_clean(text))

    def result(self, text: str, data: Mapping[str, Any]) -> None:
        """The answer. As JSON it is held back until `finish`, which knows the exit code.

        A command made of several steps may answer several times: as JSON, all but the last
        become `{"event": "step", …}`.
        """
        if self.mode == "json":
            if self._result is not None:
                self._event("step", self._result)
            self._result = dict(data)
        elif self.mode == "human" and text:
            self._to_stdout(_clean(text))

    def finish(self, exit_code: int) -> None:
        """Say the last word (in JSON the result line) and flush."""
        if self.mode == "json":
            data = {**(self._result or {}), "ok": exit_code == 0, "exit_code": exit_code}
            self._result = None
            self._event("result", data)

    def abandon_stdout(self) -> int:
        """Write no more to stdout, whose reader is gone; returns 0, the exit code of that."""
        if self._out is not None:
            _discard(self._out)
        self._out = None
        return 0

    def traceback(self, text: str) -> None:
        """A Python traceback, for --debug; on stderr in every mode."""
        self._to_stderr(text.rstrip())

    def annotate(self, lines: Iterable[str]) -> None:
        """Workflow commands of GitHub Actions, on stderr in every mode: its runner reads both."""
        for line in lines:
            self._to_stderr(line)

    def progress(self, total: int, title: str) -> Progress:
        """Progress over `total` bytes: a bar on a terminal, else a line every 30 s.

        Use as a context manager: ``with console.progress(n, "converting") as p: p.advance(4096)``.
        """
        if self.mode == "quiet" or self._err is None:
            return _Silent()
        if _is_terminal(self._err):
            return _Bar(total, title, self._err)
        return _Lines(total, title, self._to_stderr, self._clock)

    def _talk(self, severity: str, message: str) -> None:
        if self.mode == "json":
            self._event(severity, {"message": message})
        elif self.mode == "human" or severity != "note":
            head = self._paint(severity, severity, self._err_colour)
            self._to_stderr(f"{head}: {_clean(message)}")

    def _render_finding(self, finding: Finding, colour: bool) -> str:
        head = self._paint(finding.severity, f"{finding.severity}[{finding.id}]", colour)
        lines = [f"{head}: {_clean(finding.message)}"]
        fields = (("where", finding.where), ("got", finding.got), ("expected", finding.expected))
        lines += [f"  {k + ':':<10}{_clean(v)}" for k, v in fields if v]
        return "\n".join(lines)

    def _paint(self, severity: str, text: str, colour: bool) -> str:
        return f"{_COLOURS[severity]}{text}{_RESET}" if colour and severity in _COLOURS else text

    def _event(self, name: str, data: Mapping[str, Any]) -> None:
        record = {"event": name, **{k: v for k, v in data.items() if k != "event"}}
        try:
            line = json.dumps(record, ensure_ascii=False, default=str, allow_nan=False)
        except ValueError:
            # JSON has no NaN or Infinity, and strict parsers refuse the whole line
            line = json.dumps(_finite(record), ensure_ascii=False, default=str)
        self._to_stdout(line)

    def _to_stdout(self, text: str) -> None:
        if self._out is None:
            return
        try:
            print(self.hidden(text), file=self._out, flush=True)
        except BrokenPipeError:
            self.abandon_stdout()
        except OSError:
            # a full disk: say so as an error, but do not fail again when Python flushes at exit
            self.abandon_stdout()
            raise

    def _to_stderr(self, text: str) -> None:
        if self._err is None:
            return
        try:
            print(self.hidden(text), file=self._err, flush=True)
        except OSError:
            _discard(self._err)
            self._err = None


class _Silent(contextlib.AbstractContextManager["_Silent"]):
    def __exit__(self, *exc: object) -> None:
        return None

    def advance(self, nbytes: int, label: str = "") -> None:
        """Nothing to show."""


class _Bar(contextlib.AbstractContextManager["_Bar"]):
    """tqdm on a terminal."""

    def __init__(self, total: int, title: str, stream: TextIO) -> None:
        from tqdm import tqdm

        self._tqdm = tqdm(
            total=total, desc=title, unit="B", unit_scale=True, file=stream, disable=None,
            dynamic_ncols=True, smoothing=0.05,
        )  # fmt: skip

    def __exit__(self, *exc: object) -> None:
        self._tqdm.close()

    def advance(self, nbytes: int, label: str = "") -> None:
        """Move the bar."""
        if label:
            self._tqdm.set_postfix_str(_clean(label), refresh=False)
        self._tqdm.update(nbytes)


class _Lines(contextlib.AbstractContextManager["_Lines"]):
    """Whole lines for a log: one every `LINE_INTERVAL`, and a last one if there was any."""

    def __init__(
        self, total: int, title: str, write: Callable[[str], None], clock: Callable[[], float]
    ) -> None:
        self._total, self._title, self._write, self._clock = total, title, write, clock
        self._start = self._last = clock()
        self._done = 0
        self._wrote = False

    def __exit__(self, *exc: object) -> None:
        if self._wrote:
            self._line(self._clock(), "")

    def advance(self, nbytes: int, label: str = "") -> None:
        """Count, and write a line when the last one is old enough."""
        self._done += nbytes
        now = self._clock()
        if now - self._last >= LINE_INTERVAL:
            self._line(now, label)

    def _line(self, now: float, label: str) -> None:
        self._last, self._wrote = now, True
        elapsed = max(now - self._start, 1e-9)
        rate = self._done / elapsed
        percent = 100 * self._done / self._total if self._total else 100.0
        text = (
            f"{self._title}: {self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB"
            f" ({percent:.1f} %), {rate / 1e9:.2f} GB/s, {_duration(elapsed)} elapsed"
        )
        if 0 < self._done < self._total:
            text += f", about {_duration((self._total - self._done) / rate)} left"
        self._write(text + (f", {_clean(label)}" if label else ""))


def _duration(seconds: float) -> str:
    minutes, secs = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


def _clean(text: str) -> str:
    return text.translate(_CONTROLS)


def _utf8(stream: TextIO | None) -> TextIO | None:
    """The stream in UTF-8 (stdout is None in a process without one, as under pythonw)."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    return stream


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


def _discard(stream: TextIO) -> None:
    """Point a broken stream at nothing, so that Python's flush at exit cannot fail on it."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def _finite(value: Any) -> Any:
    """The value with NaN and infinities as words."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value
