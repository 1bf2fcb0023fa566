"""What was typed for a checkpoint names nothing: how far the path leads, and what is near it."""

from __future__ import annotations

import difflib
from pathlib import Path

from mmq.convert.header_manifest import BUILTIN
from mmq.errors import BadInputError
from mmq.hub.location import DEFAULT_REVISION, named_by_address, parse_location

#: What need not be written.
_MAIN = f"@{DEFAULT_REVISION}"
#: Likeness from which on a name is taken for a mistyped one; names share endings such as `.txt`.
_ALIKE = 0.75


def not_found(text: str, option: str = "") -> BadInputError:
    """What was typed names nothing: how far the path leads, or how an address is written here.

    Args:
        option: that the word was given to; none for SRC.
    """
    repository = named_by_address(text)
    if repository is None:
        got, hint = nearest(text)
    else:
        got, hint = "a web address", f"write {str(repository).removesuffix(_MAIN)}"
    return BadInputError(
        "source-not-found",
        f"{option} {text}".lstrip() + " is neither a folder, a .safetensors file, a header"
        " manifest, a built-in source nor a Hub repository",
        where=text, got=got, expected=f"a path, org/name, or one of {', '.join(BUILTIN)}",
        hint=hint,
    )  # fmt: skip


def refuse_absent(text: str, option: str) -> None:
    """Stop where an option's word names no checkpoint, before anything is read.

    Raises:
        BadInputError: it does.
    """
    if not Path(text).expanduser().exists() and text not in BUILTIN and not parse_location(text):
        raise not_found(text, option)


def nearest(text: str) -> tuple[str, str]:
    """How far a path leads, and what to look at there."""
    path = Path(text).expanduser().absolute()
    for folder in path.parents:
        try:
            if folder.is_file():
                return f"{folder} is a file", f"ls -l {folder}"
            if not folder.is_dir():
                continue
            names = [entry.name for entry in folder.iterdir()]
        except PermissionError:
            return f"{folder} may not be read", f"ls -ld {folder}"
        except OSError:
            continue
        missing = path.relative_to(folder).parts[0]
        close = difflib.get_close_matches(missing, names, 1, _ALIKE)
        hint = f"did you mean {folder / close[0]}?" if close else f"ls {folder}"
        return f"{folder} holds no {missing}", hint
    return "no folder on the way there", "ls"
