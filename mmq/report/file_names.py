"""What mmq writes beside a checkpoint's own files; `mmq.convert` replaces them, none is copied."""

from __future__ import annotations

CONVERT_REPORT, VERIFY_REPORT = "mmq-convert.json", "mmq-verify.json"
#: The tokens that level logits scored.
VERIFY_TOKENS = "mmq-verify-tokens.npy"
#: Beside the report: what a verification needs while it lasts; an interrupted one leaves it.
VERIFY_FOLDER = ".mmq-verify"
