"""What was probably meant where click's own words leave a reader guessing."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator, Sequence

import click

#: Where a word too many belongs, by the option that takes it.
_WORD_FOR = ("--against",)
_REPEATED = "--text"


def explained(
    command: click.Command, path: str, typed: Sequence[str], message: str, hint: str
) -> tuple[str, str]:
    """The message and hint of a usage error, or better ones.

    Args:
        path: the command as typed, such as `mmq verify`.
        typed: the words behind it.
    """
    for option, value in swallowed(command, typed):
        return (
            f"{option} took {value!r} as its value: is a shell variable unset?",
            f"give {option} a value, or leave it out",
        )
    extra = _extra(command, typed) if "unexpected extra argument" in message else []
    options = set(_spellings(command))
    if extra and _REPEATED in options and (files := _behind(_REPEATED, typed))[1:]:
        words = " ".join(f"{_REPEATED} {shlex.quote(file)}" for file in files[:2])
        return f"{message}: {_REPEATED} takes one file", f"{_REPEATED} once for each file: {words}"
    for option in _WORD_FOR:
        if len(extra) == 1 and option in options and option not in typed:
            kept = [word for word in typed if word != extra[0]]
            return message, shlex.join([*path.split(), *kept, option, extra[0]])
    return message, hint


def swallowed(command: click.Command, typed: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(option, value) of options whose value is the name of another one."""
    spellings = _spellings(command)
    words = iter(typed)
    for word in words:
        if word == "--":
            return
        option = spellings.get(word)
        if option is None or option.is_flag or option.count:
            continue
        value = next(words, "")
        if value.partition("=")[0] in spellings:
            yield word, value


def _behind(option: str, typed: Sequence[str]) -> list[str]:
    """The words between an option and the next one."""
    if option not in typed:
        return []
    rest = typed[typed.index(option) + 1 :]
    return list(itertools.takewhile(lambda word: not word.startswith("-"), rest))


def _spellings(command: click.Command) -> dict[str, click.Option]:
    """Options by what is typed for them."""
    options = [param for param in command.params if isinstance(param, click.Option)]
    return {word: option for option in options for word in (*option.opts, *option.secondary_opts)}


def _extra(command: click.Command, typed: Sequence[str]) -> list[str]:
    """Words that no argument and no option of the command takes."""
    spellings, places = _spellings(command), []
    words = iter(typed)
    for word in words:
        option = spellings.get(word)
        if option is not None:
            if not (option.is_flag or option.count):
                next(words, "")
        elif not word.startswith("-"):
            places.append(word)
    arguments = [param for param in command.params if isinstance(param, click.Argument)]
    return places[sum(max(1, argument.nargs) for argument in arguments) :]
