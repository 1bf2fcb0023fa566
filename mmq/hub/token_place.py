"""Where the Hub's token comes from, and what to do about one that is wrong.

huggingface_hub takes the environment's before the stored one, so `hf auth login` mends nothing
while HF_TOKEN holds a wrong one. Source: huggingface_hub, utils/_auth.py, `get_token`.
"""

from __future__ import annotations

import os
from pathlib import Path

LOGIN = "hf auth login"
#: Environment variables, in huggingface_hub's own order.
_VARIABLES = ("HF_OIDC_RESOURCE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


def token_place() -> str | None:
    """The variable or the file that the token is from; None without one."""
    for name in _VARIABLES:
        if os.environ.get(name, "").strip():
            return name
    from huggingface_hub import constants

    file = Path(constants.HF_TOKEN_PATH)
    try:
        return str(file) if file.read_text("utf-8").strip() else None
    except (OSError, ValueError):
        return None


def token_remedy() -> str:
    """What to do about a token that the Hub does not take."""
    place = token_place()
    if place in _VARIABLES:
        return f"correct {place}; or unset it, since it wins over the token of {LOGIN}"
    return LOGIN
