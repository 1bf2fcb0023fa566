"""No file that is sent may hold a token of the one who sends it.

A repository may be public, and its history keeps what a later commit removes.
"""

from __future__ import annotations

import io
from collections.abc import Iterable

from mmq.errors import RefusedError
from mmq.publish.upload_plan import Item

_CHUNK = 1 << 22
#: Shorter ones would be found by chance; the Hub's have 37 characters.
_LEAST = 8


def live_tokens(used: str | None) -> list[str]:
    """The token in use, and those that `hf auth login` keeps."""
    from huggingface_hub.utils._auth import get_stored_tokens

    found = {used, *get_stored_tokens().values()}
    return sorted(token for token in found if token and len(token) >= _LEAST)


def refuse_tokens(items: Iterable[Item], tokens: Iterable[str]) -> None:
    """Stop when a file that is to be sent holds one of the tokens; weights are not searched.

    Raises:
        RefusedError: one does; the message names the file, not the token.
    """
    words = [token.encode("utf-8") for token in tokens]
    held = [item.name for item in items if not item.weights and _holds(item, words)]
    if held:
        more = f" (and {len(held) - 1} more)" if len(held) > 1 else ""
        raise RefusedError(
            "publish-token-in-file", f"{held[0]} holds a token of yours for the Hub{more}",
            where=held[0],
            hint="revoke the token if the file has been anywhere, take it out, and convert again",
        )  # fmt: skip


def _holds(item: Item, words: list[bytes]) -> bool:
    overlap = max(map(len, words), default=1) - 1
    tail = b""
    with item.path.open("rb") if item.path else io.BytesIO(item.data or b"") as file:
        while chunk := file.read(_CHUNK):
            window = tail + chunk
            if any(word in window for word in words):
                return True
            tail = window[-overlap:] if overlap else b""
    return False
