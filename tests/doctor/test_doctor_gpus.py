"""GPUs, as PyTorch tells of them."""

from __future__ import annotations

import collections

import pytest

from mmq.doctor import abilities, gpus
from mmq.doctor.facts import Fact


class FakeTorch:
    """A PyTorch that sees one GPU, or none."""

    __version__ = "2.13.0"

    def __init__(self, name="", *, hip=None, cuda=None, **properties):
        self.name, self.total_memory = name, 192 * 2**30
        self.__dict__.update(properties)
        self.version = type("version", (), {"hip": hip, "cuda": cuda})
        self.cuda = type(
            "cuda", (),
            {
                "is_available": lambda: bool(name), "device_count": lambda: 1,
                "get_device_properties": lambda index: self,
            },
        )  # fmt: skip


B200 = FakeTorch("B200", cuda="13.0", major=10, minor=0)


def seen(monkeypatch, torch):
    """`gpu_facts` beside that PyTorch."""
    real = gpus.load
    monkeypatch.setattr(gpus, "load", lambda name: torch if name == "torch" else real(name))
    return gpus.gpu_facts()


@pytest.mark.parametrize(
    ("torch", "target"),
    [
        (B200, "sm_100"),
        (FakeTorch("MI355X", hip="7.0", gcnArchName="gfx950:sramecc+"), "gfx950"),
        (FakeTorch("RTX 5090", cuda="13.0", major=12, minor=0), "sm_120"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_gpu_that_the_kernels_know(monkeypatch, torch, target):
    triton = pytest.importorskip("triton", reason="needs triton, which has wheels for Linux only")
    from mmq.verify.kernels.support_table import SUPPORTS, support_cells

    head, kernels = seen(monkeypatch, torch)
    assert head == Fact(f"0: {torch.name}", True, f"{target}, 192 GiB")
    paths = collections.Counter(c.path for c in support_cells() if c.target == target)
    assert kernels.text == (
        f"Triton {triton.__version__}, {len(SUPPORTS)} operations: {paths['native']} native,"
        f" {paths['fallback']} by fallback, {paths['unsupported']} not at all"
    )
    assert kernels.ok is (not paths["unsupported"])
    assert bool(kernels.remedy) is bool(paths["unsupported"])


def test_operations_that_do_not_run_at_all(monkeypatch):
    pytest.importorskip("triton", reason="needs triton, which has wheels for Linux only")
    from mmq.verify.kernels import support_table

    cells = [
        support_table.Cell(op, "sm_100", path, "so it is")
        for op, path in [("a", "native"), ("b", "native"), ("c", "fallback"), ("d", "unsupported")]
    ]
    monkeypatch.setattr(support_table, "support_cells", lambda: cells)
    kernels = seen(monkeypatch, B200)[1]
    assert kernels.text.endswith("4 operations: 2 native, 1 by fallback, 1 not at all")
    assert kernels.ok is False
    assert kernels.remedy.startswith("mmq doctor --kernels")


def test_a_gpu_that_they_do_not_know(monkeypatch):
    pytest.importorskip("triton", reason="needs triton, which has wheels for Linux only")
    (fact,) = seen(monkeypatch, FakeTorch("RTX 4090", cuda="13.0", major=8, minor=9))
    assert fact == Fact(
        "0: RTX 4090", False, "sm_89, 192 GiB; kernels were never compiled for it",
        "--device cpu gives the same bytes",
    )  # fmt: skip


def test_a_gpu_without_triton(monkeypatch):
    def load(name):
        if name == "torch":
            return B200
        raise ImportError("no triton here")

    monkeypatch.setattr(gpus, "load", load)
    (fact,) = gpus.gpu_facts()
    assert (fact.ok, fact.text) == (False, "sm_100, 192 GiB; no Triton: no triton here")
    assert fact.remedy


@pytest.mark.parametrize(
    ("cuda", "driver", "ok", "text", "remedy"),
    [
        (None, False, None, "this PyTorch is built for the CPU (torch 2.13.0)", None),
        ("13.0", False, None, "PyTorch sees no device (torch 2.13.0)", None),
        (None, True, False, "this PyTorch is built for the CPU (torch 2.13.0), but a driver is",
         "https://pytorch.org"),
        ("13.0", True, False, "PyTorch sees no device (torch 2.13.0), but a driver is loaded",
         "CUDA_VISIBLE_DEVICES"),
    ],
)  # fmt: skip
def test_no_gpu(monkeypatch, tmp_path, cuda, driver, ok, text, remedy):
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(gpus, "_DEVICE_FILES", [tmp_path / "nvidiactl"] if driver else [])
    (fact,) = seen(monkeypatch, FakeTorch(cuda=cuda))
    assert (fact.name, fact.ok) == ("none", ok)
    assert fact.text.startswith(text)
    assert remedy in fact.remedy if remedy else fact.remedy is None


def test_what_works_with_a_gpu(monkeypatch):
    pytest.importorskip("triton", reason="needs triton, which has wheels for Linux only")
    monkeypatch.setattr(abilities, "load", lambda name: B200)
    told = {f.name: f for f in abilities.ability_facts()}
    assert all(f.ok and f.remedy is None for f in told.values())
    assert told["verify --level kernels"].text == "executed natively"
