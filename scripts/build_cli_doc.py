"""Write docs/cli.md: every command with its arguments and options, from the command line itself.

python scripts/build_cli_doc.py

Made from click's objects, not from what --help prints: no terminal and no version of click decides
how it looks.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import click

from mmq.cli import cli
from mmq.errors import EXIT_CODES

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "cli.md"

#: click's arguments have no help of their own: what stands for each, where a command differs.
ARGUMENTS = {
    "src": "The checkpoint: folder, file, header manifest, Hub repository or built-in source.",
    "out": "Folder of the converted checkpoint.",
    ("convert", "out"): "Folder to make.",
    ("calibrate", "src"): "The checkpoint to run; not with `--merge`.",
    ("verify", "out"): "The checkpoint to check; `--level kernels` needs none.",
    ("report", "file"): "A report, or the folder it is in.",
    ("report", "other"): "Another one, to compare with.",
    ("publish", "repo"): "Model repository, ORG/NAME; made if it is not there.",
    ("doctor", "path"): "Folder whose disk is measured.",
    ("completion", "shell"): "bash, zsh or fish.",
}
_DEFAULT = re.compile(r"\s*\[default: ([^\]]*)\]$")
_OPTION = re.compile(r"(?<![\w`/-])(--?[a-z][\w-]*)")


def prose(text: str) -> str:
    """A help text as Markdown: options as code, nothing else of it markup."""
    text = re.sub(r"([*<|])", r"\\\1", " ".join(text.split()))
    return _OPTION.sub(r"`\1`", text)


def paragraphs(text: str) -> str:
    r"""A docstring as Markdown; what `\b` keeps from being wrapped becomes a block."""
    parts = []
    for part in inspect.cleandoc(text).split("\n\n"):
        kept = part.startswith("\b")
        parts.append(f"```\n{part.lstrip(chr(8)).strip()}\n```" if kept else prose(part))
    return "\n\n".join(parts)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; nothing without rows."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *lines]) if lines else ""


def code(text: str) -> str:
    """In a table's cell."""
    return f"`{text}`".replace("|", "\\|")


def value_of(option: click.Option) -> str:
    """What an option takes, as a usage line has it; nothing for a flag."""
    if option.is_flag:
        return ""
    if isinstance(option.type, click.Choice):
        return "|".join(map(str, option.type.choices))
    number = "N" if isinstance(option.type, click.types.IntParamType) else "X"
    return option.metavar or number


def range_of(option: click.Option) -> str:
    """What an option's number must be."""
    kind = option.type
    low, high = getattr(kind, "min", None), getattr(kind, "max", None)
    if low is not None and high is not None:
        return f" From {low} to {high}."
    return f" At least {low}." if low else ""


def default_of(option: click.Option) -> tuple[str, str]:
    """(default, help without it): said by the help text itself, or click's."""
    text = option.help or ""
    if option.required:
        return "required", text
    if (found := _DEFAULT.search(text)) and text.count("[default:") == 1:
        return prose(found[1]), text[: found.start()]
    if option.show_default and option.secondary_opts:
        return prose(option.opts[0] if option.default else option.secondary_opts[0]), text
    return (prose(str(option.default)) if option.show_default else ""), text


def option_row(option: click.Option) -> tuple[str, str, str]:
    """Names with value, default, text."""
    names, value = [*option.opts, *option.secondary_opts], value_of(option)
    names[-1] += f" {value}" if value else ""
    default, text = default_of(option)
    return ", ".join(map(code, names)), default, prose(text) + range_of(option)


def usage(name: str, command: click.Command) -> str:
    """The usage line."""
    words = [
        p.name.upper() if p.required else f"[{p.name.upper()}]"
        for p in command.params
        if isinstance(p, click.Argument)
    ]
    needed = [
        f"{p.opts[0]} {value_of(p)}"
        for p in command.params
        if isinstance(p, click.Option) and p.required
    ]
    return " ".join(["mmq", name, *words, *needed, "[OPTIONS]"])


def section(name: str, command: click.Command) -> str:
    """One command."""
    everywhere = {p.name for p in cli.params}
    arguments = [
        (code(p.name.upper()), ARGUMENTS.get((name, p.name)) or ARGUMENTS[p.name])
        for p in command.params
        if isinstance(p, click.Argument)
    ]
    rows = [
        option_row(p)
        for p in command.params
        if isinstance(p, click.Option) and p.name not in everywhere
    ]
    parts = [
        f"## mmq {name}",
        f"```\n{usage(name, command)}\n```",
        paragraphs(command.help or ""),
        table(("argument", "meaning"), arguments),
        table(("option", "default", "meaning"), rows),
    ]
    return "\n\n".join(part for part in parts if part)


def document() -> str:
    """The page."""
    shared = [option_row(p) for p in cli.params if isinstance(p, click.Option)]
    commands = [
        (f"[`mmq {name}`](#mmq-{name})", prose((command.help or "").partition("\n\n")[0]))
        for name, command in cli.commands.items()
    ]
    codes = [(str(number), prose(meaning)) for number, meaning in EXIT_CODES.items()]
    parts = [
        "# The command line",
        "Generated by `python scripts/build_cli_doc.py`; a test keeps it equal to the code.",
        paragraphs(cli.help or ""),
        table(("command", "what it does"), commands),
        "Every command takes these, before its name or after it (`--version` only before):",
        table(
            ("option", "meaning"),
            [*((o, text) for o, _, text in shared), ("`-h`, `--help`", "What a command takes.")],
        ),
        "Answers go to stdout, talk and progress to stderr; colours end with `NO_COLOR`. A `~` at"
        " the start of a path is the home folder.",
        *(section(name, command) for name, command in cli.commands.items()),
        "## Exit codes",
        table(("code", "meaning"), codes),
        "Errors by id: [errors.md](errors.md).",
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    TARGET.write_text(document(), encoding="utf-8")
