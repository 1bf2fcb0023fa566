"""Faults planted in a conversion of the bundled model: who notices, and what is named."""

from __future__ import annotations

import hashlib
import io

import pytest
from faults import FAULTS
from planted import Planted

from mmq.console import Console
from mmq.convert.options import ConvertOptions
from mmq.convert.run import RunSettings, convert
from mmq.demo.bundled import bundled_model, bundled_texts
from mmq.verify.logits.settings import LogitsSettings
from mmq.verify.run import verify


def quiet():
    return Console("quiet", stdout=io.StringIO(), stderr=io.StringIO())


def converted(folder, **options):
    options = ConvertOptions(max_shard_bytes=2_000_000, **options)
    convert(str(bundled_model()), folder, options, RunSettings(jobs=1), quiet())
    return Planted(folder, bundled_model())


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return converted(tmp_path_factory.mktemp("sound") / "out")


def logits(out, **changes):
    """A report over one window of 192 tokens of each bundled text."""
    settings = LogitsSettings(
        texts=tuple(bundled_texts()), windows=5, context=192, replay=False, **changes
    )
    return verify(
        str(out.folder), str(out.source), "logits", strict=False, report_path=None,
        console=quiet(), logits=settings,
    )  # fmt: skip


@pytest.fixture(scope="module")
def sound_report(sound):
    return logits(sound)


def arm(report, name="weights"):
    return report.logits.arms[name]


def layer(report, number, name="weights"):
    return report.logits.layers[number]["arms"][name]


def damaged(sound, tmp_path, name):
    out = Planted.copy(sound, tmp_path / "damaged")
    FAULTS[name].plant(out)
    return out


def test_a_sound_conversion_is_close(sound_report):
    assert {level.level: level.status for level in sound_report.levels}["weights"] == "pass"
    assert arm(sound_report).kld_mean.value < 0.01
    assert abs(arm(sound_report).delta_ppl_percent.value) < 2
    assert layer(sound_report, 2)["selection"]["overlap"] > 0.95


@pytest.mark.parametrize("name", FAULTS)
def test_structure_or_weights_name_the_tensor(sound, tmp_path, name):
    judged = damaged(sound, tmp_path, name).judge("weights")
    assert judged.verdict == "fail"
    named = {f.where for f in judged.report.findings if f.severity == "error"}
    assert named & {*FAULTS[name].named} or not FAULTS[name].named


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("nibbles swapped in one expert", 2),
        # One expert of 16, whose gate and up look alike: the weights level is the sharper judge.
        ("w1 and w3 exchanged", 1.2),
        ("global scale inverted", 2),
        ("w3 decoded by w1's global", 2),
        ("one expert zeroed", 2),
        ("two router rows exchanged", 2),
        ("a norm's 1 + w lost", 2),
        ("experts of another layer", 2),
    ],
)
def test_logits_show_it_and_the_layer(sound, sound_report, tmp_path, name, factor):
    """KLD well above the sound conversion's, and the hidden states part in the faulty layer."""
    report = logits(damaged(sound, tmp_path, name))
    assert arm(report).kld_mean.value > factor * arm(sound_report).kld_mean.value
    before = layer(report, 1)["cosine"]["mean"] - layer(sound_report, 1)["cosine"]["mean"]
    drops = [
        layer(sound_report, n)["cosine"]["mean"] - layer(report, n)["cosine"]["mean"]
        for n in range(4)
    ]
    assert before == 0 and drops[0] == 0 and drops[2] > 1e-4


def test_an_indexer_without_keys_shows_in_the_selection(sound, sound_report, tmp_path):
    report = logits(damaged(sound, tmp_path, "index_k zeroed"))
    assert layer(report, 2)["selection"]["overlap"] < 0.8
    assert layer(sound_report, 2)["selection"]["overlap"] > 0.95
    assert layer(report, 1)["selection"] == layer(sound_report, 1)["selection"]


def test_kv_scales_show_where_they_clip(sound, sound_report, tmp_path):
    """Four times too large is harmless in a floating-point format; 16 times too small is not."""
    harmless = logits(damaged(sound, tmp_path / "a", "KV scales × 4"))
    clipped = logits(damaged(sound, tmp_path / "b", "KV scales ÷ 16"))
    right = arm(sound_report, "kv").kld_mean
    assert arm(harmless, "kv").kld_mean.value < right.value + 3 * right.se
    assert arm(clipped, "kv").kld_mean.value > 3 * right.value
    assert arm(clipped, "weights") == arm(sound_report, "weights")


def test_max_scaling_is_measurably_worse_than_the_search(sound_report, tmp_path):
    """Paired over the same tokens: the report shows it in KLD and in SQNR."""
    report = logits(converted(tmp_path / "max", scale_search="max"))
    assert report.metrics["sqnr_db_mean"] < sound_report.metrics["sqnr_db_mean"] - 1
    assert arm(report).kld_mean.value > 1.1 * arm(sound_report).kld_mean.value


def test_layouts_decode_to_the_same_logits(sound, sound_report, tmp_path):
    """Codes and block scales are the same bytes; 1/s2 restores s2 exactly for searched scales."""
    minimax = converted(tmp_path / "minimax", layout="minimax")
    assert arm(logits(minimax)) == arm(sound_report)


def test_bf16_of_the_same_values_changes_nothing(tmp_path):
    """Every MXFP8 value of the model is a BF16 number: no forward can tell them apart."""
    report = logits(converted(tmp_path / "bf16", to="bf16"))
    assert arm(report).kld_max.value < 1e-9 and arm(report).top1.value == 1
    assert all(layer(report, n)["cosine"]["min"] > 1 - 1e-6 for n in range(4))


def test_layers_tell_of_each_text(sound_report):
    """Means over the texts' tokens give the whole: as many tokens of each."""
    for number in range(1, 4):
        whole = layer(sound_report, number)
        texts = whole["by_file"]
        assert set(texts) == {path.name for path in bundled_texts()}
        for kind, figure in (("routing", "same"), ("selection", "overlap"), ("cosine", "mean")):
            mean = sum(text[kind] for text in texts.values()) / len(texts)
            assert mean == pytest.approx(whole[kind][figure], abs=1e-9)


def test_the_report_says_which_files_it_judged(sound_report):
    shards = {shard.name: shard for shard in sound_report.against_files}
    assert set(shards) == {path.name for path in bundled_model().glob("*.safetensors")}
    for name, shard in shards.items():
        raw = (bundled_model() / name).read_bytes()
        length = int.from_bytes(raw[:8], "little")
        assert shard.header_sha256 == hashlib.sha256(raw[8 : 8 + length]).hexdigest()
        assert shard.bytes == len(raw)
