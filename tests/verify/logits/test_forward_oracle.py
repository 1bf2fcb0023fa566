"""The streamed forward against transformers' minimax_m3_vl, both in F32 on the bundled model."""

from __future__ import annotations

import json
import shutil

import m3_transformers
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from streamed import KeepingOperations, logits_of, open_model

from mmq.demo.bundled import bundled_model, bundled_texts
from mmq.demo.hub_config import ModelSize
from mmq.demo.small_model import build_small_model
from mmq.kernels import ops
from mmq.kernels.reference.moe import Swiglu
from mmq.verify.logits.tokens import open_tokenizer, read_texts
from mmq.verify.model import layer
from mmq.verify.model.operations import SelectionRule

#: Blocks of 16, four of them chosen: selection leaves blocks out from position 64 on.
LENGTH, WINDOWS = 192, 3
#: Two right implementations agree to about 1e-5 in F32; each mistake below moves some logit more.
AGREEMENT, MISTAKE = 1e-4, 1e-2


@pytest.fixture(scope="module")
def ids_WT():
    """Held-out text of three kinds."""
    texts, tokenizer = bundled_texts()[:WINDOWS], open_tokenizer(bundled_model())
    return read_texts(texts, tokenizer, LENGTH, WINDOWS).rows()


@pytest.fixture(scope="module")
def theirs(ids_WT):
    return m3_transformers.run(m3_transformers.load(bundled_model()), ids_WT)


def perplexity(logits_WTV, ids_WT):
    targets = torch.from_numpy(ids_WT[:, 1:]).long().flatten()
    nll = torch.nn.functional.cross_entropy(logits_WTV[:, :-1].flatten(0, 1).double(), targets)
    return nll.exp().item()


def test_logits_selections_and_experts(ids_WT, theirs, tmp_path):
    operations = KeepingOperations()
    ours = logits_of(open_model(bundled_model()), ids_WT, tmp_path / "work", operations)
    assert (ours - theirs.logits_WTV).abs().max() < AGREEMENT
    assert perplexity(ours, ids_WT) == pytest.approx(perplexity(theirs.logits_WTV, ids_WT), 1e-4)
    selections = torch.stack(operations.selections).unflatten(0, (-1, WINDOWS))
    for number, (name, expected) in enumerate(sorted(theirs.selections.items())):
        got = torch.cat(list(selections[number]), dim=1).sort(dim=2).values
        assert torch.equal(got.long(), expected), f"block selection of layer {name}"
    for (name, expected), got in zip(
        sorted(theirs.experts.items()), operations.routings, strict=True
    ):
        assert torch.equal(got.long(), expected), f"experts of layer {name}"
    assert sorted(theirs.selections) == [1, 2, 3] == sorted(theirs.experts)
    assert (selections >= 0).all(dim=-1).float().mean() > 0.6  # selection binds


class HeadsExchanged(KeepingOperations):
    def select(self, *arguments):
        return super().select(*arguments).flip(0)


class FullAttention(KeepingOperations):
    def select(self, *_):
        return None


class LocalBlockNotForced(KeepingOperations):
    def select(self, index_q, index_k, positions, rule, format):
        rule = SelectionRule(rule.block, rule.top_k, 0, rule.init_blocks)
        return super().select(index_q, index_k, positions, rule, format)


class IndexerWithoutRope(KeepingOperations):
    def heads(self, row, layout, norms, positions, rope):
        right = super().heads(row, layout, norms, positions, rope)
        unturned = super().heads(row, layout, norms, torch.zeros_like(positions), rope)
        return right._replace(index_q_TGE=unturned.index_q_TGE, index_k_TE=unturned.index_k_TE)


class BiasIgnored(KeepingOperations):
    def route(self, hidden, gate, bias, top_k, scaling):
        return super().route(hidden, gate, None, top_k, scaling)


class BiasInTheWeights(KeepingOperations):
    def route(self, hidden, gate, bias, top_k, scaling):
        routing = super().route(hidden, gate, bias, top_k, scaling)
        biased = (routing.scores_TE + bias).gather(1, routing.experts_TK.long())
        return routing._replace(shares_TK=biased / biased.sum(1, keepdim=True))


def gain_one(patch):
    patch.setattr(layer.Layer, "swiglu", property(lambda self: Swiglu(1.0, self.config.limit)))


def clamp_seven(patch):
    patch.setattr(layer.Layer, "swiglu", property(lambda self: Swiglu(limit=7.0)))


def no_one_plus(patch):
    right = layer.gemma_norm
    patch.setattr(layer, "gemma_norm", lambda x, w, eps, gemma: right(x, w, eps, False))


def scales_shifted(patch):
    right = ops.dequantize_mxfp8_f32
    patch.setattr(
        ops, "dequantize_mxfp8_f32", lambda codes, scale: right(codes, np.roll(scale, 1, axis=1))
    )


MISTAKES = {
    "selections of two KV heads exchanged": HeadsExchanged,
    "indexer ignored": FullAttention,
    "local block not forced": LocalBlockNotForced,
    "indexer without RoPE": IndexerWithoutRope,
    "router bias ignored": BiasIgnored,
    "router bias in the weights": BiasInTheWeights,
    "sigmoid gain 1": gain_one,
    "clamp 7": clamp_seven,
    "norm w instead of 1 + w": no_one_plus,
    "block scales shifted by one": scales_shifted,
    "w1 and w3 exchanged": lambda patch: patch.setattr(layer, "EXPERT", ("w3", "w1", "w2")),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_forward_is_seen(ids_WT, theirs, tmp_path, name, monkeypatch):
    mistake = MISTAKES[name]
    operations = KeepingOperations
    if isinstance(mistake, type):
        operations = mistake
    else:
        mistake(monkeypatch)
    ours = logits_of(open_model(bundled_model()), ids_WT, tmp_path / "work", operations())
    assert (ours - theirs.logits_WTV).abs().max() > MISTAKE


def test_blocks_of_128_and_sixteen_of_them(tmp_path):
    """The release's geometry of selection, past the 2,048 tokens up to which it leaves none out."""
    size = ModelSize(
        hidden=64, intermediate=32, dense_intermediate=64, layers=2, experts=8, vocab=256,
        heads=4, kv_heads=2, head_dim=32, index_dim=32, index_block=128, index_topk=16,
        vision_hidden=32, vision_heads=2, vision_layers=1, vision_intermediate=32,
    )  # fmt: skip
    folder = build_small_model(tmp_path / "model", size)
    ids_WT = np.random.default_rng(8).integers(0, 254, (1, 2300))
    theirs = m3_transformers.run(m3_transformers.load(folder, "sdpa"), ids_WT)
    operations = KeepingOperations()
    ours = logits_of(open_model(folder), ids_WT, tmp_path / "work", operations)
    assert (ours - theirs.logits_WTV).abs().max() < AGREEMENT
    (selection,) = operations.selections
    assert torch.equal(selection.sort(dim=2).values.long(), theirs.selections[1])
    left_out = 18 - selection[:, 2200].ge(0).sum(1)
    assert (left_out == 2).all()


def all_sparse(folder):
    """The bundled model in M3.1's form: its dense layer selects blocks too."""
    shutil.copytree(bundled_model(), folder)
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    sparse = text["sparse_attention_config"]
    for key in ("sparse_attention_freq", "sparse_disable_index_value"):
        sparse[key] = [1] * 4
    (folder / "config.json").write_text(json.dumps(config))
    attention = "language_model.model.layers.0.self_attn."
    rng = np.random.default_rng(11)
    tensors = {
        f"{attention}index_{part}.weight": torch.from_numpy(
            rng.standard_normal(shape).astype(np.float32) * 0.1
        ).bfloat16()
        for part, shape in (("q_proj", (64, 256)), ("k_proj", (32, 256)),
                            ("q_norm", (32,)), ("k_norm", (32,)))
    }  # fmt: skip
    save_file(tensors, folder / "index-of-layer-0.safetensors", {"format": "pt"})
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(tensors, "index-of-layer-0.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config["quantization_config"]["ignored_layers"] += [
        f"{attention}index_{part}_proj" for part in "qk"
    ]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_every_layer_sparse(ids_WT, tmp_path):
    """M3.1's form: a layer with a dense MLP selects blocks as well."""
    folder = all_sparse(tmp_path / "model")
    theirs = m3_transformers.run(m3_transformers.load(folder), ids_WT[:1])
    operations = KeepingOperations()
    ours = logits_of(open_model(folder), ids_WT[:1], tmp_path / "work", operations)
    assert sorted(theirs.selections) == [0, 1, 2, 3] and len(operations.selections) == 4
    for got, (name, expected) in zip(
        operations.selections, sorted(theirs.selections.items()), strict=True
    ):
        assert torch.equal(got.sort(dim=2).values.long(), expected), f"layer {name}"
    assert (ours - theirs.logits_WTV).abs().max() < AGREEMENT
