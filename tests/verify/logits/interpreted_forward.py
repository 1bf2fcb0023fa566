"""Run in a process of its own with TRITON_INTERPRET=1: the forward on Triton's operations.

    python interpreted_forward.py LAYERS TOKENS

Prints a JSON line: how the hidden states compare with the reference's, and what was decided.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from streamed import KeepingOperations, Kept, open_model, token_rows

from mmq.verify.logits.arms import Arm
from mmq.verify.logits.hidden_states import HiddenStates, flat
from mmq.verify.logits.layer_stats import cosine
from mmq.verify.logits.stream import Stream
from mmq.verify.model.on_triton import TritonOperations
from mmq.verify.model.operations import CacheMode

MODE = CacheMode("nvfp4", False, "nvfp4", 0.01, 0.02)


class KeptTriton(Kept, TritonOperations):
    pass


def hidden_states(folder: Path, ids_WT: np.ndarray, layers: int, operations) -> np.ndarray:
    model, tokens, arms = open_model(folder), token_rows(ids_WT), (Arm("source", "source", MODE),)
    with tempfile.TemporaryDirectory() as work:
        states = HiddenStates(Path(work), arms, tokens.count, model.config.hidden, {})
        both = {"source": model, "candidate": model}
        stream = Stream(both, arms, tokens, states, operations, lambda nbytes: None)
        stream.embed()
        for number in range(layers):
            stream.run_layer(number)
        return np.array(flat(states.inputs("source")))


def main() -> None:
    folder, layers, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    ids_WT = np.random.default_rng(9).integers(0, 1024, (1, count))
    reference, triton = KeepingOperations(), KeptTriton()
    theirs = hidden_states(folder, ids_WT, layers, reference)
    ours = hidden_states(folder, ids_WT, layers, triton)
    pairs = list(zip(reference.selections, triton.selections, strict=True))
    experts = list(zip(reference.routings, triton.routings, strict=True))
    found = {
        **cosine(ours, theirs),
        "selections": [float((a == b).all(2).float().mean()) for a, b in pairs],
        "experts": [float((a == b).all(1).float().mean()) for a, b in experts],
        "left_out": int(pairs[-1][0].shape[2] < -(-count // 16)),
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
