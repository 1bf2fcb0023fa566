"""The errors mmq raises on purpose: what, where, got, expected, a hint, and an exit code.

Ids are stable words; they are the JSON code, the JUnit class and the anchor in docs/errors.md.
"""

from __future__ import annotations


class MmqError(Exception):
    """A failure the user can act on.

    Args:
        id: stable lower-case words joined by hyphens, such as ``shard-truncated``.
        message: one sentence that names the thing at fault.
        where: file, tensor or option concerned.
        got / expected: the two sides of the disagreement, when there are two.
        hint: one command or action that fixes it.
    """

    exit_code = 1

    def __init__(
        self,
        id: str,
        message: str,
        *,
        where: str | None = None,
        got: object = None,
        expected: object = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.id = id
        self.message = message
        self.where = where
        self.got = None if got is None else str(got)
        self.expected = None if expected is None else str(expected)
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        """Errors cross process boundaries; keyword arguments need help to be pickled."""
        fields = {k: getattr(self, k) for k in ("where", "got", "expected", "hint")}
        return (_rebuild, (type(self), self.id, self.message, fields))

    def as_dict(self) -> dict[str, str | int | None]:
        """The error as JSON output writes it."""
        return {
            "id": self.id,
            "message": self.message,
            "where": self.where,
            "got": self.got,
            "expected": self.expected,
            "hint": self.hint,
            "exit_code": self.exit_code,
        }


def _rebuild(cls: type[MmqError], id: str, message: str, fields: dict[str, str | None]) -> MmqError:
    return cls(id, message, **fields)


class UsageError(MmqError):
    """The command line asks for something that makes no sense."""

    exit_code = 2


class VerdictError(MmqError):
    """The work ran and the answer is no (or a warning under --strict)."""

    exit_code = 3


class BadInputError(MmqError):
    """The source is damaged, incomplete, inconsistent or of an unknown architecture."""

    exit_code = 4


class IncompleteError(MmqError):
    """The run stopped before the end; the same command resumes it."""

    exit_code = 5


class MachineError(MmqError):
    """This machine cannot do it: disk, memory or backend."""

    exit_code = 6


class RefusedError(MmqError):
    """Doing it would damage something: another run's output, a locked or different run."""

    exit_code = 7


EXIT_CODES: dict[int, str] = {
    0: "done, or verdict pass",
    1: "unexpected error (traceback with --debug)",
    2: "usage",
    3: "ran: fail, or inconclusive (warn too under --strict)",
    4: "bad input: shard, header, hash, unknown architecture",
    5: "incomplete: rerun the same command to resume",
    6: "this machine cannot: no backend, disk, memory or access to the Hub",
    7: "refused: another run's output, fingerprint differs, locked",
    130: "interrupted, resumable",
    143: "terminated, resumable",
}
