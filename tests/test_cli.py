"""The command line: what each command says in each mode, and what it hands to the library."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import pytest

import mmq
from mmq import errors
from mmq.cli import cli, main

HIDDEN, INTER, EXPERTS = 64, 64, 2
LAYER = "language_model.model.layers.{L}."


def mxfp8(name: str, rows: int, columns: int, **ranges: Any) -> list[dict[str, Any]]:
    tensors = (("weight", "F8_E4M3", columns), ("weight_scale_inv", "U8", columns // 32))
    return [
        {"name": f"{name}.{suffix}", "dtype": dtype, "shape": [rows, width], **ranges}
        for suffix, dtype, width in tensors
    ]


def small_manifest() -> dict[str, Any]:
    """A one-layer M3 as a header manifest; complete, and nowhere near the release's totals."""
    layers = {"layers": [0, 0]}
    norms = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
    plain = [(LAYER + f"{n}.weight", "BF16", [HIDDEN]) for n in norms]
    plain += [
        (LAYER + "block_sparse_moe.gate.weight", "F32", [EXPERTS, HIDDEN]),
        (LAYER + "block_sparse_moe.e_score_correction_bias", "F32", [EXPERTS]),
    ]
    tensors = [{"name": n, "dtype": d, "shape": s, **layers} for n, d, s in plain]
    for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
        tensors += mxfp8(LAYER + f"self_attn.{projection}", HIDDEN, HIDDEN, **layers)
    for projection in ("w1", "w2", "w3"):
        name = LAYER + f"block_sparse_moe.experts.{{E}}.{projection}"
        tensors += mxfp8(name, INTER, HIDDEN, **layers, experts=[0, EXPERTS - 1])
    for name in ("lm_head", "model.embed_tokens", "model.norm"):
        tensors.append({"name": f"language_model.{name}.weight", "dtype": "BF16", "shape": [64]})
    text = {
        "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64,
        "hidden_size": HIDDEN, "intermediate_size": INTER, "num_local_experts": EXPERTS,
        "moe_layer_freq": [1], "num_mtp_modules": 1,
    }  # fmt: skip
    config = {"model_type": "minimax_m3_vl", "text_config": text}
    quantisation = {"quant_method": "mxfp8", "weight_block_size": [1, 32]}
    return {"config": {**config, "quantization_config": quantisation}, "tensors": tensors}


@pytest.fixture
def small(tmp_path: Path) -> str:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(small_manifest()), "utf-8")
    return str(path)


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


# ---- the three modes side by side


def test_inspect_in_three_modes(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", small]) == 0
    human = capsys.readouterr()
    assert main(["--json", "inspect", small]) == 0
    as_json = capsys.readouterr()
    assert main(["--quiet", "inspect", small]) == 0
    quiet = capsys.readouterr()

    finding, result = events(as_json.out)
    assert (finding["event"], finding["id"]) == ("finding", "mtp-declared-absent")
    assert (result["event"], result["command"], result["exit_code"]) == ("result", "inspect", 0)
    assert result["bytes"] == sum(row["nbytes"] for row in result["components"])
    assert f"{result['bytes']:,} B" in human.out
    assert f"{result['convert']['output']['weights_bytes']:,} B" in human.out
    assert "note[mtp-declared-absent]" in human.err and as_json.err == ""
    assert (quiet.out, quiet.err) == ("", "")


def test_dry_run_in_three_modes(
    small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["convert", small, str(tmp_path / "out"), "--dry-run", "--ignore", "visual"]
    assert main(command) == 0
    human = capsys.readouterr()
    assert main([*command, "--json"]) == 0
    as_json = capsys.readouterr()
    assert main([*command, "--quiet"]) == 0
    quiet = capsys.readouterr()

    result = events(as_json.out)[-1]
    assert (result["event"], result["dry_run"]) == ("result", True)
    assert result["ignored"] == [{"pattern": "visual", "modules": 0, "would_be_quantised": 0}]
    assert result["output"]["kv_scale_bytes"] == 8
    assert "  visual: matches 0 modules, 0 of which would have been quantised" in human.out
    assert "warning[ignore-matches-nothing]" in human.err and human.out.count("[") == 0
    assert quiet.out == "" and "warning[ignore-matches-nothing]" in quiet.err
    assert "announced" not in human.out and result["announced"] is None
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("mode", [[], ["--quiet"]])
def test_an_error_in_the_text_modes(mode: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*mode, "inspect", "nowhere"]) == 4
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert lines[0].startswith("error[source-not-found]: nowhere ")
    assert [line.split(":")[0] for line in lines[1:]] == [
        "  where",
        "  got",
        "  expected",
        "  hint",
    ]


def test_an_error_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", "inspect", "nowhere"]) == 4
    out, err = capsys.readouterr()
    error, result = events(out)
    assert (error["event"], error["id"], error["exit_code"]) == ("error", "source-not-found", 4)
    assert result == {"event": "result", "ok": False, "exit_code": 4}
    assert err == ""


def test_a_module_that_loses_only_a_scale_still_counts_as_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = small_manifest()
    for side in "kv":
        name = LAYER + f"self_attn.{side}_proj.{side}_scale"
        manifest["tensors"].append({"name": name, "dtype": "F32", "shape": [], "layers": [0, 0]})
    path = tmp_path / "scales.json"
    path.write_text(json.dumps(manifest), "utf-8")
    assert main(["--json", "convert", str(path), "out", "--dry-run"]) == 0
    plan = events(capsys.readouterr().out)[-1]
    assert [(d["tensors"], d["bytes"]) for d in plan["dropped"]] == [(2, 8)]
    assert plan["formats"][0] == "NVFP4: 6 modules"
    assert plan["formats"][1].startswith("as in the source: 13 modules")


# ---- options


@pytest.mark.parametrize(
    "arguments",
    [["--json", "inspect", "{}"], ["inspect", "--json", "{}"], ["inspect", "{}", "--json"]],
)
def test_global_options_work_at_every_place(
    arguments: list[str], small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([a.format(small) for a in arguments]) == 0
    assert events(capsys.readouterr().out)[-1]["event"] == "result"


def test_every_command_takes_the_global_options() -> None:
    for command in (cli, *cli.commands.values()):
        assert {"json", "quiet", "debug"} <= {p.name for p in command.params}, command.name


@pytest.mark.parametrize("arguments", [["--json", "--quiet"], ["--quiet", "--json"]])
def test_two_modes_exclude_each_other(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([arguments[0], "inspect", "x", arguments[1]]) == 2
    assert "exclude each other" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect"],
        ["nonsense"],
        ["inspect", "x", "--nonsense"],
        ["convert", "x", "y", "--to", "fp3"],
        ["convert", "x", "y", "--jobs", "0"],
        ["convert", "x", "y", "--max-shard-size", "5XB"],
        ["verify"],
        ["verify", "x", "--level", "hope"],
    ],
)
def test_usage_errors_in_both_forms(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error[") and "Traceback" not in err
    # --json comes last, where click stops before it at the faulty option
    assert main([*arguments, "--json"]) == 2
    last = events(capsys.readouterr().out)[-1]
    assert last == {"event": "result", "ok": False, "exit_code": 2}


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "Usage: mmq" in capsys.readouterr().err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mmq, version {mmq.__version__}\n"
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for code, meaning in errors.EXIT_CODES.items():
        assert f"{code:>5}  {meaning}" in out


def test_the_home_folder_is_expanded(
    small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["inspect", "~/small.json"]) == 0
    assert main(["--json", "convert", "~/small.json", "~/out", "--dry-run"]) == 0
    assert events(capsys.readouterr().out.splitlines()[-1])[0]["resources"]["disk"] == str(tmp_path)
    assert main(["convert", small, "~/out", "--dry-run", "--kv-scales", "~/none.json"]) == 2
    assert str(tmp_path / "none.json") in capsys.readouterr().err


def test_strict_lets_a_plans_warning_fail(
    small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["convert", small, str(tmp_path / "out"), "--dry-run", "--strict"]
    assert main(command) == 0  # a note is no warning
    assert main([*command, "--ignore", "visual"]) == 3
    assert "ignore-matches-nothing" in capsys.readouterr().err


def test_inspect_says_what_convert_would_refuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = small_manifest()
    manifest["tensors"] = [t for t in manifest["tensors"] if ".w3." not in t["name"]]
    path = tmp_path / "no-w3.json"
    path.write_text(json.dumps(manifest), "utf-8")
    assert main(["inspect", str(path)]) == 0
    out, err = capsys.readouterr()
    assert "routed_experts" in out and "convert  " not in out
    assert "warning: convert --to nvfp4 would refuse this source: [module-missing]" in err
    assert main(["inspect", str(path), "--to", "nvfp4"]) == 4
    assert "error[module-missing]" in capsys.readouterr().err


# ---- what the other commands hand to the library


def test_convert_hands_over_every_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import mmq.convert.run

    calls: list[Any] = []
    monkeypatch.setattr(mmq.convert.run, "convert", lambda *args: calls.append(args))
    monkeypatch.setenv("HOME", str(tmp_path))
    command = "--to nvfp4 --layout minimax --mtp keep --input-scales unit --kv-scales unit"
    command += " --kv-format fp8 --ignore a.* --ignore b --experts-from ~/bf16"
    command += " --max-shard-size 4GB --jobs 7 --restart --overwrite --strict --hash-source"
    command += " --allow-nonfinite-passthrough --scale-search mse --importance ~/weights"
    (tmp_path / "bf16").mkdir()
    assert main(["convert", "SRC", "OUT", *command.split()]) == 0
    ((source, out, options, settings, _),) = calls
    assert (source, out) == ("SRC", Path("OUT"))
    assert options.as_dict() == {
        "to": "nvfp4", "layout": "minimax", "mtp": "keep", "input_scales": "unit",
        "kv_scales": "unit", "kv_format": "fp8", "ignore": ["a.*", "b"],
        "max_shard_bytes": 4_000_000_000, "experts_from": str(tmp_path / "bf16"),
        "allow_nonfinite": True, "scale_search": "mse", "importance": str(tmp_path / "weights"),
    }  # fmt: skip
    assert settings == mmq.convert.run.RunSettings(7, True, True, True, True)
    assert capsys.readouterr().out == "OUT is finished\n"


def test_convert_defaults_are_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    import mmq.convert.run
    from mmq.convert.options import ConvertOptions

    calls: list[Any] = []
    monkeypatch.setattr(mmq.convert.run, "convert", lambda *args: calls.append(args))
    assert main(["convert", "SRC", "OUT"]) == 0
    assert calls[0][2] == ConvertOptions()
    assert 1 <= calls[0][3].jobs <= 4


class Report(types.SimpleNamespace):
    """What `verify` returns, as far as the command line looks at it."""

    def model_dump(self) -> dict[str, Any]:
        level = {"level": "structure", "status": "pass", "checks": {"index": 3, "sizes": 1},
                 "skipped": ["values"], "seconds": 0.25}  # fmt: skip
        findings = [{"severity": "warning"}] if self.verdict == "warn" else []
        metrics = {"tensors": 1234.0, "sqnr_db": 20.4567}
        return {"verdict": self.verdict, "levels": [level], "metrics": metrics,
                "findings": findings}  # fmt: skip


@pytest.fixture
def verify_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls of a `verify` that gives the verdict named in OUT."""
    import mmq.verify.run

    calls: list[Any] = []

    def verify(*args: Any, console: Any, **kwargs: Any) -> Report:
        calls.append((args, kwargs))
        return Report(verdict=args[0])

    monkeypatch.setattr(mmq.verify.run, "verify", verify)
    return calls


def test_verify_hands_over_every_option(
    verify_calls: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from mmq.convert.downloads import DownloadSettings
    from mmq.verify.logits.settings import LogitsSettings

    monkeypatch.setenv("HOME", str(tmp_path))
    main(["verify", "pass"])
    options = ["--against", "~/src", "--level", "weights", "--strict", "-o", "~/report.json"]
    main(["verify", "pass", *options, "--download-dir", "~/shards", "--keep-downloads"])
    src, report = tmp_path / "src", tmp_path / "report.json"
    logits = "--level logits --text ~/a.txt --text b.txt --windows 3 --context 99 --layers 2"
    logits += " --kv nvfp4 --index-k fp8 --no-replay --dtype bfloat16 --gates ~/g --work-dir w"
    main(["verify", "pass", "--against", "src", *logits.split(), "--jobs", "3"])
    plain = LogitsSettings()
    asked = LogitsSettings(
        (tmp_path / "a.txt", Path("b.txt")), None, 99, 3, 2, "nvfp4", "fp8", False, "bfloat16",
        "cpu", tmp_path / "g", Path("w"),
    )  # fmt: skip
    same = {
        "strict": False, "report_path": None, "downloads": DownloadSettings(), "jobs": None,
    }  # fmt: skip
    kept = DownloadSettings(tmp_path / "shards", keep=True)
    assert verify_calls == [
        (("pass", None, None), {**same, "logits": plain}),
        (("pass", str(src), "weights"),
         {**same, "strict": True, "report_path": report, "downloads": kept, "logits": plain}),
        (("pass", "src", "logits"), {**same, "logits": asked, "jobs": 3}),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("verdict", "code", "strict_code"),
    [("pass", 0, 0), ("warn", 0, 3), ("inconclusive", 3, 3), ("fail", 3, 3)],
)
def test_the_verdict_is_the_exit_code_in_every_mode(
    verdict: str, code: int, strict_code: int, verify_calls: list[Any],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert main(["verify", verdict]) == code
    warnings = "1 warning" if verdict == "warn" else "0 warnings"
    assert capsys.readouterr().out.splitlines() == [
        "level    structure: pass, 4 things in 2 checks, 0.2 s",
        "skipped  values",
        "metric   tensors 1,234",
        "metric   sqnr_db 20.457",
        f"verdict  {verdict.upper()}: 0 errors, {warnings}, 0 notes",
    ]
    assert main(["verify", verdict, "--strict", "--json"]) == strict_code
    (result,) = events(capsys.readouterr().out)
    assert (result["command"], result["verdict"]) == ("verify", verdict)
    assert (result["exit_code"], result["ok"]) == (strict_code, strict_code == 0)
    assert main(["verify", verdict, "--quiet"]) == code
    assert capsys.readouterr() == ("", "")


def test_demo_gets_the_console(monkeypatch: pytest.MonkeyPatch) -> None:
    import mmq.demo

    modes: list[str] = []

    def run_demo(console: Any) -> int:
        modes.append(console.mode)
        return 3

    monkeypatch.setattr(mmq.demo, "run_demo", run_demo)
    assert (main(["demo"]), main(["demo", "--json"]), modes) == (3, 3, ["human", "json"])
