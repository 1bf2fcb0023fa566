"""Make the small trained MiniMax-M3 that mmq ships, from texts to a folder as the Hub has it.

    python scripts/train_small_model.py --out DIR [--texts DIR] [--work DIR] [--steps N] [--stop N]

Texts and checkpoints lie in the work folder (default build/small-model); a run that was stopped
goes on from its last checkpoint. About 25 minutes on two quiet cores. What it needs beside mmq
itself: `pip install mmq-toolkit[test]`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

# first: what it sets must stand before torch is loaded
import small_model
import torch
from small_model.release import write_release, write_texts
from small_model.texts import gather
from small_model.tokenizer import BOS, streams, train_tokenizer
from small_model.train import Recipe, Run, Windows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the finished model")
    parser.add_argument("--texts", type=Path, help="folder for the held-out texts")
    parser.add_argument("--work", type=Path, default=Path("build/small-model"))
    parser.add_argument("--steps", type=int, default=Recipe.steps, help="length of the whole run")
    parser.add_argument("--stop", type=int, help="train to this step only, and export that")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    say(small_model.SETTINGS)

    recipe = Recipe(steps=options.steps)
    options.work.mkdir(parents=True, exist_ok=True)
    texts = gather(options.work / "texts")
    say(f"{len(texts.training)} documents to train on, {len(texts.held_out)} held out")
    tokenizer = train_tokenizer(texts.training, options.work / "tokenizer.json", recipe.seed)
    ids = streams(tokenizer, texts.training)
    say(", ".join(f"{kind} {len(stream):,} tokens" for kind, stream in ids.items()))
    run = Run(recipe, Windows(ids, tokenizer.token_to_id(BOS), recipe.seed), options.work)
    run.train(say, options.stop)

    steps = (run.step, recipe.steps)
    write_release(run.model, options.work / "tokenizer.json", texts, options.out, steps)
    if options.texts:
        write_texts(texts, options.texts, options.work / "texts")
    say(f"written to {options.out}")


def say(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, flush=True)


if __name__ == "__main__":
    main()
