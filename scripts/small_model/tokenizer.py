"""A byte-level BPE tokenizer of 1,024 tokens, special tokens last as in the release."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from .texts import Document

VOCABULARY = 1024
BOS, EOS, ROLE, PAD = "<bos>", "<eos>", "<role>", "<pad>"
#: The two image tokens come last: config.json names them by number.
SPECIAL = (BOS, EOS, ROLE, PAD, "<image>", "<video>")
#: Characters per document kind that the merges are learnt from.
_SAMPLE = 600_000
_WEIGHTS = {"english": 2.0, "code": 2.0}


def train_tokenizer(documents: list[Document], path: Path, seed: int) -> Tokenizer:
    """Learn the merges from an even mixture of kinds, and write tokenizer.json to `path`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(documents, seed), trainer)
    tokenizer.add_special_tokens(list(SPECIAL))
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise SystemExit(f"the tokenizer has {tokenizer.get_vocab_size()} tokens")
    tokenizer.save(str(path), pretty=False)
    return tokenizer


def streams(tokenizer: Tokenizer, documents: list[Document]) -> dict[str, npt.NDArray[np.uint16]]:
    """Token ids by kind of text: every document between <bos> and <eos>, one after another."""
    bos, eos = tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)
    found = {}
    for kind in sorted({d.kind for d in documents}):
        encoded = tokenizer.encode_batch([d.text for d in documents if d.kind == kind])
        found[kind] = np.array([i for e in encoded for i in (bos, *e.ids, eos)], dtype=np.uint16)
    return found


def _sample(documents: list[Document], seed: int) -> list[str]:
    texts: list[str] = []
    for kind in sorted({d.kind for d in documents}):
        own = [d.text for d in documents if d.kind == kind]
        random.Random(seed).shuffle(own)
        left = int(_SAMPLE * _WEIGHTS.get(kind, 1.0))
        for text in own:
            texts.append(text[:left])
            left -= len(text)
            if left <= 0:
                break
    return texts
