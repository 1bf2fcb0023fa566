"""How each engine serves a checkpoint: image, least version, command, and what to know.

What each loader takes, and where that was read, is docs/engines.md. Images are named by tag, and by
digest where the publisher gives one: a tag can be moved to another build.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from mmq.errors import UsageError
from mmq.publish.traits import Traits

#: Versions whose loaders the layouts were checked against; the least ones that a card promises.
VLLM, SGLANG = "0.33.0", "0.5.23"

VLLM_CUDA, VLLM_ROCM, SGLANG_ENGINE, TENSORRT = "vllm", "vllm-rocm", "sglang", "tensorrt-llm"
ENGINES = (VLLM_CUDA, VLLM_ROCM, SGLANG_ENGINE, TENSORRT)
_TITLES = {
    VLLM_CUDA: "vLLM on NVIDIA GPUs", VLLM_ROCM: "vLLM on AMD GPUs", SGLANG_ENGINE: "SGLang",
    TENSORRT: "TensorRT-LLM",
}  # fmt: skip
_M3_IMAGES = {
    VLLM_CUDA: f"vllm/vllm-openai:v{VLLM}",
    VLLM_ROCM: f"vllm/vllm-openai-rocm:v{VLLM}",
    SGLANG_ENGINE: f"lmsysorg/sglang:v{SGLANG}",
    TENSORRT: "",
}
_M31_IMAGES = {
    VLLM_CUDA: "vllm/vllm-openai:minimax-m31-flash",
    VLLM_ROCM: "vllm/vllm-openai-rocm:minimax-m31-flash",
    SGLANG_ENGINE: "lmsysorg/sglang:dev-minimax-m31-flash",
    TENSORRT: "",
}
#: Attention works on blocks of 128 keys, so the cache's pages must hold 128.
BLOCK = 128
_IMAGE = re.compile(r"[\w./:-]+?:[\w.-]+(@sha256:[0-9a-f]{64})?")
_PARSERS = ("--tool-call-parser minimax_m3", "--enable-auto-tool-choice",
            "--reasoning-parser minimax_m3")  # fmt: skip


@dataclass(frozen=True)
class Serving:
    """One engine's recipe.

    Attributes:
        image: container image with its tag, and its digest where one was given; "" for none.
        minimum: least version or build, in words (what is known of it, for M3.1).
        command: words of the command line, one option with its value each; empty when the engine
            cannot load the checkpoint.
        notes: sentences to know before.
    """

    engine: str
    image: str
    minimum: str
    command: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def title(self) -> str:
        """The engine's name for people."""
        return _TITLES[self.engine]


def parse_images(words: tuple[str, ...]) -> dict[str, str]:
    """`ENGINE=IMAGE:TAG[@sha256:DIGEST]` by engine.

    Raises:
        UsageError: another form, or an unknown engine.
    """
    images = {}
    for word in words:
        engine, _, image = word.partition("=")
        if engine not in ENGINES or not _IMAGE.fullmatch(image):
            raise UsageError(
                "option-value", f"--image {word} names no engine's image", got=word,
                expected=f"{'|'.join(ENGINES)}=IMAGE:TAG[@sha256:DIGEST]",
            )  # fmt: skip
        images[engine] = image
    return images


def servings(repo: str, traits: Traits, images: Mapping[str, str]) -> list[Serving]:
    """A recipe for each engine; those that cannot load the checkpoint say why."""
    chosen = {**(_M31_IMAGES if traits.m31 else _M3_IMAGES), **images}
    return [
        _vllm(VLLM_CUDA, repo, traits, chosen[VLLM_CUDA]),
        _vllm(VLLM_ROCM, repo, traits, chosen[VLLM_ROCM]),
        _sglang(repo, traits, chosen[SGLANG_ENGINE]),
        _tensorrt(repo, traits, chosen[TENSORRT]),
    ]


def vllm_arguments(traits: Traits, engine: str = VLLM_CUDA) -> list[str]:
    """vLLM's options for this checkpoint, one with its value each."""
    words = [f"--block-size {BLOCK}", f"--kv-cache-dtype {_vllm_cache(traits, engine)}"]
    if engine == VLLM_ROCM:
        words.append("--attention-backend TRITON_ATTN")
    return words


def _vllm_cache(traits: Traits, engine: str) -> str:
    if traits.kv == "NVFP4" and engine == VLLM_CUDA:
        return "nvfp4"
    return "fp8" if traits.kv else "auto"


def _vllm(engine: str, repo: str, traits: Traits, image: str) -> Serving:
    minimum = _minimum("vLLM", VLLM, traits)
    if traits.layout == "minimax" and not traits.m31:
        why = f"vLLM {VLLM} stops at the experts' scales of this layout; use `--layout modelopt`."
        return Serving(engine, "", "", (), (why,))
    notes = [
        f"`--block-size {BLOCK}` is not optional: attention chooses among blocks of {BLOCK} keys."
    ]
    if engine == VLLM_ROCM and traits.layout in ("modelopt", "minimax"):
        notes.append(
            "AMD GPUs have no NVFP4 matrix instruction: vLLM emulates it (pull requests 35733,"
            " 35737, 44667)."
        )
    if traits.kv == "NVFP4":
        notes.append(
            "The declared NVFP4 KV cache needs SM100; elsewhere vLLM refuses it."
            if engine == VLLM_CUDA else
            "vLLM's NVFP4 KV cache needs SM100, so this asks for FP8; where vLLM still refuses the"
            " declared NVFP4, convert with `--kv-format fp8`."
        )  # fmt: skip
    elif traits.kv and not traits.m31:
        notes.append(
            f"vLLM {VLLM} uses K and V scales in M3's dense-attention layers only; the sparse ones"
            " run with 1.0."
        )
    command = ("vllm serve " + repo, f"--tensor-parallel-size {traits.gpus}",
               *vllm_arguments(traits, engine), *_PARSERS)  # fmt: skip
    return Serving(engine, image, minimum, command, tuple(notes))


def _minimum(name: str, version: str, traits: Traits) -> str:
    """The least release, in words; for M3.1 as much as is known of it."""
    if not traits.m31:
        return f"{name} {version}"
    if traits.layout == "minimax" and name == "SGLang":
        # its loader of this layout was read; that it runs M3.1 as a whole was not seen
        return f"{name} {version}, which has this layout's loader"
    stops = f" ({version} stops at this layout's experts)" if traits.layout == "minimax" else ""
    return f"that build: in which release of {name} M3.1 is first is not known{stops}"


def _sglang(repo: str, traits: Traits, image: str) -> Serving:
    cache = "fp8_e4m3" if traits.kv else "auto"
    words = [f"python -m sglang.launch_server --model-path {repo}", f"--tp {traits.gpus}",
             f"--kv-cache-dtype {cache}"]  # fmt: skip
    notes = ["The router is F32 in the files; SGLang rounds it to BF16 unless told otherwise."]
    if traits.layout == "minimax":
        words.append(f"--page-size {BLOCK}")
        if not traits.m31:
            notes.append(
                "M3's dense-attention layers keep this layout off Blackwell: SGLang's packed KV"
                " pool wants sparse attention in every layer. Hopper works."
            )
    if traits.kv == "NVFP4":
        notes.append("Without the option SGLang takes a declared NVFP4 for the model's own dtype.")
    minimum = _minimum("SGLang", SGLANG, traits)
    words[0] = f"SGLANG_OPT_USE_BF16_ROUTER_GEMM=0 {words[0]}"
    return Serving(SGLANG_ENGINE, image, minimum, tuple(words), tuple(notes))


def _tensorrt(repo: str, traits: Traits, image: str) -> Serving:
    if traits.layout == "minimax":
        why = "TensorRT-LLM has no rule for this layout's names; use `--layout modelopt`."
        return Serving(TENSORRT, "", "", (), (why,))
    pulls = "15857" if traits.layout == "modelopt" else "14962 and 15687"
    minimum = f"a build that has pull request(s) {pulls}"
    if traits.kv == "NVFP4":
        notes = ["The NVFP4 KV cache needs pull request 17985: NVFP4 in the sparse-attention"
                 " layers, FP8 in the dense ones."]  # fmt: skip
    else:
        notes = ["A declared FP8 cache is not read; K and V scales are used for NVFP4 only"
                 " (convert with `--kv-format nvfp4`)."]  # fmt: skip
    command = (f"trtllm-serve serve {repo}", "--backend pytorch", f"--tp_size {traits.gpus}")
    return Serving(TENSORRT, image, minimum, command, tuple(notes))
