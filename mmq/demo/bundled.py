"""The small trained model and the held-out texts that come with the package."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent


def bundled_model() -> Path:
    """Folder of a trained MiniMax-M3 of 5 million parameters in MXFP8, as the Hub would have it."""
    return _HERE / "model"


def bundled_texts() -> list[Path]:
    """Held-out texts, one file a kind (code, english, german, …), in the order of their names."""
    return sorted((_HERE / "text").glob("*.txt"))


def bundled_gates() -> Path:
    """The model's own limits: what a sound conversion of it gives, with a margin.

    A small model says nothing about the 428B one; its gates are frozen from measurements.
    """
    return _HERE / "gates.yaml"
