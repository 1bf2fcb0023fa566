"""Training: AdamW on the language model, the indexer taught beside it, experts kept even.

Every step draws its windows from a generator seeded by its own number, so a run that was stopped
goes on with the same batches from its last checkpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import MiniMaxM3SparseForConditionalGeneration

from .attention import Trainer, start_indexer
from .shape import new_model


@dataclass(frozen=True)
class Recipe:
    """What a run is made of; the defaults are the ones of the bundled model.

    Attributes:
        tokens: per step; short windows first, long ones in the last part of the run.
        distil_from, sparse_from, long_from: shares of the run at which the indexer starts to
            learn, attention becomes sparse, and windows become long.
        bias_step: what an expert's router bias moves a step, against its load.
    """

    steps: int = 2200
    tokens: int = 2048
    window: int = 512
    long_window: int = 1024
    distil_from: float = 0.5
    sparse_from: float = 0.6
    long_from: float = 0.92
    rate: float = 2e-3
    indexer_rate: float = 1e-3
    warm_up: int = 100
    decay: float = 0.1
    bias_step: float = 2e-3
    seed: int = 20261130

    def schedule(self, step: int) -> float:
        """Share of the full rate: a linear rise, then a cosine down to a twentieth."""
        share = min(step / self.steps, 1.0)
        return min(1.0, (step + 1) / self.warm_up) * (
            0.05 + 0.475 * (1 + math.cos(math.pi * share))
        )


class Windows:
    """Windows of token ids from one stream per kind of text."""

    def __init__(self, streams: dict[str, np.ndarray], bos: int, seed: int) -> None:
        self.streams, self.bos, self.seed = streams, bos, seed
        sizes = np.array([len(s) for s in streams.values()], dtype=np.float64)
        # small kinds more often than their size, so that they are learnt as well
        self.weights = sizes**0.75 / (sizes**0.75).sum()

    def batch(self, step: int, count: int, length: int) -> torch.Tensor:
        """[count, length + 1]; half of them begin with <bos>, wherever they begin."""
        generator = np.random.Generator(np.random.PCG64([self.seed, step]))
        kinds = list(self.streams.values())
        rows = []
        for _ in range(count):
            stream = kinds[generator.choice(len(kinds), p=self.weights)]
            start = generator.integers(0, len(stream) - length)
            row = stream[start : start + length + 1].astype(np.int64)
            if generator.random() < 0.5:
                row[0] = self.bos
            rows.append(row)
        return torch.from_numpy(np.stack(rows))


class Run:
    """A training run: its model, its optimizer, and where it stands."""

    def __init__(self, recipe: Recipe, windows: Windows, folder: Path) -> None:
        self.recipe, self.windows, self.folder = recipe, windows, folder
        self.model: MiniMaxM3SparseForConditionalGeneration = new_model(recipe.seed)
        self.text = self.model.model.language_model
        self.text.config._experts_implementation = "eager"
        self.trainer = Trainer(self.model)
        self.routers = [layer.mlp.gate for layer in self.text.layers if hasattr(layer.mlp, "gate")]
        self.loads: list[torch.Tensor] = []
        for router in self.routers:
            router.forward = _in_f32(router.forward)
            router.register_forward_hook(self._count)
        self.optimizer = self._optimizer()
        self.step = 0
        self._load()

    def train(self, say: Callable[[str], None], stop: int | None = None) -> None:
        """Go on to the end, or to step `stop`; a checkpoint every 200 steps."""
        began, since, seen = time.time(), self.step, []
        last = min(stop or self.recipe.steps, self.recipe.steps)
        while self.step < last:
            seen.append(self._step())
            self.step += 1
            if self.step % 25 == 0 or self.step == last:
                pace = (time.time() - began) / (self.step - since)
                loss, kl = np.mean(seen, axis=0)
                say(f"step {self.step}  loss {loss:.3f}  indexer {kl:.3f}  {pace:.2f} s a step")
                seen = []
            if self.step % 200 == 0 or self.step == last:
                self._save()

    def _step(self) -> tuple[float, float]:
        recipe, share = self.recipe, self.step / self.recipe.steps
        if not self.trainer.distil and share >= recipe.distil_from:
            for layer in self._sparse_layers():
                start_indexer(layer.self_attn)
        self._phase()
        window = recipe.long_window if share >= recipe.long_from else recipe.window
        batch = self.windows.batch(self.step, recipe.tokens // window, window)
        self.trainer.losses.clear()
        self.loads.clear()
        with torch.autocast("cpu", torch.bfloat16):
            states = self.text(
                input_ids=batch[:, :-1], attention_mask={"causal": None}, use_cache=False
            ).last_hidden_state
            logits = self.model.lm_head(states)
        loss = cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        taught = torch.stack(self.trainer.losses).sum() if self.trainer.losses else torch.zeros(())
        (loss + taught).backward()
        for group in self.optimizer.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 1.0)
            group["lr"] = group["full_rate"] * recipe.schedule(self.step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._balance()
        return loss.item(), taught.item()

    def _phase(self) -> None:
        share = self.step / self.recipe.steps
        self.trainer.distil = share >= self.recipe.distil_from
        self.trainer.sparse = share >= self.recipe.sparse_from

    def _balance(self) -> None:
        """Raise the bias of experts with too few tokens; frozen in the last twentieth."""
        if self.step > 0.95 * self.recipe.steps:
            return
        for router, load in zip(self.routers, self.loads, strict=True):
            router.e_score_correction_bias += self.recipe.bias_step * (load.mean() - load).sign()

    def _count(self, router: nn.Module, _inputs: Any, output: Any) -> None:
        self.loads.append(torch.bincount(output[2].flatten(), minlength=router.num_experts).float())

    def _sparse_layers(self) -> list[nn.Module]:
        return [layer for layer in self.text.layers if layer.self_attn.indexer is not None]

    def _optimizer(self) -> torch.optim.Optimizer:
        recipe, groups = self.recipe, {}
        named = [*self.text.named_parameters(), ("lm_head", self.model.lm_head.weight)]
        for name, weight in named:
            rate = recipe.indexer_rate if "indexer" in name else recipe.rate
            decay = recipe.decay if weight.dim() > 1 and "embed" not in name else 0.0
            groups.setdefault((rate, decay), []).append(weight)
        return torch.optim.AdamW(
            [{"params": weights, "weight_decay": decay, "full_rate": rate}
             for (rate, decay), weights in groups.items()],
            betas=(0.9, 0.95), fused=True,
        )  # fmt: skip

    def _load(self) -> None:
        path = self.folder / "checkpoint.pt"
        if path.exists():
            state = torch.load(path, weights_only=True)
            if state["recipe"] != repr(self.recipe):
                raise SystemExit(f"{path} belongs to another recipe: {state['recipe']}")
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step = state["step"]
            # a run that stops just before the indexer starts still has to start it
            self.trainer.distil = (self.step - 1) / self.recipe.steps >= self.recipe.distil_from

    def _save(self) -> None:
        state = {"step": self.step, "recipe": repr(self.recipe), "model": self.model.state_dict(),
                 "optimizer": self.optimizer.state_dict()}  # fmt: skip
        partial = self.folder / "checkpoint.partial"
        torch.save(state, partial)
        partial.replace(self.folder / "checkpoint.pt")


def _in_f32(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A router's choice is made in F32, as in every engine that follows the release."""

    def in_f32(hidden_states: torch.Tensor) -> Any:
        with torch.autocast("cpu", enabled=False):
            return forward(hidden_states.float())

    return in_f32
