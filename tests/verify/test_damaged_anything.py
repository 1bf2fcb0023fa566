"""Whatever OUT holds, verify answers with findings: it raises nothing, and never passes damage."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest
from hostile import W1
from m3_source import INDEX
from planted import CONFIG, HF_CONFIG, MANIFEST

from mmq.verify import log as log_module
from mmq.verify.values import MIN_SQNR_DB

JUNK: list[Any] = [None, True, -1, 0, 1e400, 3.5, "", "x", "../..", "[", "NVFP4", [], {}, [None],
                   ["*"], {"a": []}, [[1]], 10**30, "\ud800"]  # fmt: skip


def paths(value: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value, the larger containers not in full."""
    found = [prefix] if prefix else []
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value[:3] if isinstance(value, list) else ())
    )
    for key, item in list(items)[:12]:
        found += paths(item, (*prefix, key))
    return found


def put(value: Any, path: tuple[Any, ...], item: Any) -> None:
    for key in path[:-1]:
        value = value[key]
    value[path[-1]] = item


@pytest.mark.parametrize("name", [CONFIG, HF_CONFIG, MANIFEST, INDEX])
def test_junk_anywhere_in_the_json_files(name, modelopt):
    """Every key of every file, with a value of another kind; all that is asked is an answer."""
    path = modelopt.folder / name
    whole = json.loads(path.read_bytes())
    rng = random.Random(name)
    places = paths(whole)
    rng.shuffle(places)
    for place in places[:60]:
        damaged = copy.deepcopy(whole)
        put(damaged, place, rng.choice(JUNK))
        path.write_text(json.dumps(damaged))
        judged = modelopt.judge("structure")
        assert judged.verdict in ("pass", "warn", "fail")
        assert modelopt.alone().report.levels[0].level == "structure"


def test_random_bytes_in_shard_headers(modelopt):
    path = modelopt.shard_of(f"{W1}.weight")
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    rng = random.Random(1)
    for _ in range(40):
        damaged = bytearray(raw)
        for _ in range(rng.choice([1, 3, 50])):
            damaged[rng.randrange(8 + length)] = rng.randrange(256)
        if damaged == raw:
            continue
        path.write_bytes(damaged)
        assert modelopt.judge("structure").verdict == "fail"


def test_random_bytes_in_shard_data_are_all_found(modelopt):
    """Our own output: not one byte can change unnoticed."""
    path = modelopt.shard_of(f"{W1}.weight")
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    rng = random.Random(2)
    for _ in range(8):
        damaged = bytearray(raw)
        damaged[rng.randrange(start, len(raw))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        judged = modelopt.judge()
        assert judged.ids >= {"file-hash"} and len(judged.ids) >= 2, judged.ids


def test_many_findings_of_one_kind_are_summed_up(monkeypatch, modelopt):
    monkeypatch.setattr(log_module, "MAX_PER_ID", 5)
    with modelopt.json() as config:
        config["quantization_config"]["quantized_layers"] = {"no.such": {"quant_algo": "NVFP4"}}
    found = modelopt.alone().of("quantized-layers-missing")
    assert len(found) == 6 and found[-1].message == "44 more of quantized-layers-missing"
    assert found[-1].severity == "error" and found[-1].got == "49 in all"


def test_gate_is_the_documented_one():
    assert MIN_SQNR_DB == 19.5
