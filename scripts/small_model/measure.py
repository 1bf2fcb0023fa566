"""What the small model does, measured through transformers in F32, with and without mistakes.

Windows of 512 tokens: <bos> and 511 tokens of one text, all 511 scored; the rest of a text below a
whole window is dropped. Perplexity is e^(mean negative log-likelihood), KLD is Σ p·ln(p/q) with p
of the model as it is: likelihoods of ½ and ⅛ give perplexity 4; p (½, ½) against q (¼, ¾) gives
½ ln 2 + ½ ln ⅔ = .144. W windows, T tokens of a window, V vocabulary.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import MiniMaxM3SparseForConditionalGeneration

from .tokenizer import BOS

WINDOW = 512
Model = MiniMaxM3SparseForConditionalGeneration


class Scores(NamedTuple):
    """Of each scored token: its log-likelihood; and log-probabilities of the whole vocabulary."""

    likelihood_WT: torch.Tensor
    logp_WTV: torch.Tensor

    @property
    def perplexity(self) -> float:
        return float((-self.likelihood_WT.double().mean()).exp())


def load(folder: Path) -> Model:
    """The hub folder in F32: any other dtype argument would round the routers to BF16."""
    model = Model.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    return model.eval()


def windows(folder: Path, text: Path, length: int = WINDOW) -> torch.Tensor:
    """Token ids [W, length], each window with <bos> in front."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = torch.tensor(tokenizer.encode(text.read_text("utf-8")).ids)
    rows = ids[: len(ids) // (length - 1) * (length - 1)].view(-1, length - 1)
    bos = torch.full((len(rows), 1), tokenizer.token_to_id(BOS))
    return torch.cat([bos, rows], dim=1)


@torch.inference_mode()
def score(model: Model, ids_WT: torch.Tensor) -> Scores:
    """Scores of every token but the first of each window, one window at a time."""
    likelihoods, logps = [], []
    for row in ids_WT:
        logp = model(input_ids=row[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        likelihoods.append(logp.gather(1, row[1:, None])[:, 0])
        logps.append(logp)
    return Scores(torch.stack(likelihoods), torch.stack(logps))


def compare(right: Scores, other: Scores) -> dict[str, float]:
    """Perplexity, mean KLD and the share of equal first choices, against `right`."""
    p, q = right.logp_WTV, other.logp_WTV
    kld = (p.exp() * (p - q)).sum(-1)
    same = (p.argmax(-1) == q.argmax(-1)).float()
    return {"perplexity": other.perplexity, "kld": float(kld.mean()), "top1": float(same.mean())}


class Watch:
    """Counts what happens inside a model: tokens by expert, and clamped activations."""

    def __init__(self, model: Model) -> None:
        self.loads: dict[int, torch.Tensor] = {}
        self.clamped, self.activations = 0, 0
        for index, layer in enumerate(model.model.language_model.layers):
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.register_forward_hook(self._count(index))
                layer.mlp.experts._apply_gate = self._watched(layer.mlp.experts)

    def _count(self, index: int) -> Callable[..., None]:
        def count(router: Any, _inputs: Any, output: Any) -> None:
            load = torch.bincount(output[2].flatten(), minlength=router.num_experts)
            self.loads[index] = self.loads.get(index, 0) + load

        return count

    def _watched(self, experts: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        apply, limit = experts._apply_gate, experts.swiglu_limit

        def watched(gate_up: torch.Tensor) -> torch.Tensor:
            gate, up = gate_up.chunk(2, dim=-1)
            self.clamped += int(((gate > limit) | (up.abs() > limit)).sum())
            self.activations += gate.numel()
            return apply(gate_up)

        return watched


def mistakes() -> dict[str, Callable[[Model], None]]:
    """Ways to run the model wrongly, each as a change to a freshly loaded one."""
    return {
        "full attention instead of the chosen blocks": _everywhere("topk_blocks", 1 << 20),
        "the latest blocks instead of the best": lambda m: _reselect(m, _latest),
        "selections of the two KV heads exchanged": lambda m: _reselect(m, _exchanged),
        "clamp at 7.0 instead of 3.0": _unclamped,
        "router bias ignored": _unbiased,
    }


def _indexers(model: Model) -> Iterator[Any]:
    for layer in model.model.language_model.layers:
        if layer.self_attn.indexer is not None:
            yield layer.self_attn.indexer


def _everywhere(name: str, value: int) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        for indexer in _indexers(model):
            setattr(indexer, name, value)

    return change


def _reselect(model: Model, other: Callable[[torch.Tensor, Any], torch.Tensor]) -> None:
    for indexer in _indexers(model):
        forward = indexer.forward
        indexer.forward = lambda *a, f=forward, i=indexer, **k: other(f(*a, **k), i)


def _exchanged(blocks_BGTC: torch.Tensor, _indexer: Any) -> torch.Tensor:
    return blocks_BGTC.flip(1)


def _latest(blocks_BGTC: torch.Tensor, indexer: Any) -> torch.Tensor:
    length, count = blocks_BGTC.shape[2:]
    local = torch.arange(length)[:, None] // indexer.block_size - torch.arange(count)
    return local.clamp(min=-1).expand_as(blocks_BGTC).contiguous()


def _unclamped(model: Model) -> None:
    for module in model.model.language_model.modules():
        if hasattr(module, "swiglu_limit"):
            module.swiglu_limit = 7.0


def _unbiased(model: Model) -> None:
    for layer in model.model.language_model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.e_score_correction_bias.zero_()


def shift_scales(folder: Path, out: Path, part: str) -> None:
    """A copy of the model in which every block of `part`'s matrices has its neighbour's scale."""
    shutil.copytree(folder, out)
    for path in out.glob("*.safetensors"):
        tensors = load_file(path)
        for name in tensors:
            if name.endswith("_scale_inv") and part in name:
                tensors[name] = tensors[name].roll(1, dims=1)
        path.unlink()
        save_file(tensors, path, metadata={"format": "pt"})


def unevenness(folder: Path) -> dict[str, float]:
    """Mean octaves between the scales of neighbouring blocks of a row, by kind of matrix."""
    found: dict[str, list[float]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            if name.endswith("_scale_inv"):
                octaves = np.abs(np.diff(tensor.numpy().astype(int), axis=1)).mean()
                found.setdefault(name.split(".")[-2], []).append(float(octaves))
    return {kind: float(np.mean(values)) for kind, values in sorted(found.items())}
