"""Index, shards, metadata, manifest and side files: every fault is named."""

from __future__ import annotations

import shutil

import pytest
from hostile import NORM, W1
from m3_source import INDEX, shard_bytes
from planted import CONFIG, HF_CONFIG, MANIFEST, judge

from mmq.errors import BadInputError, UsageError
from mmq.verify.subject import refuse_same

FIRST = "model-00001-of-00005.safetensors"


@pytest.fixture
def shard(modelopt):
    """A shard that holds experts."""
    return modelopt.shard_of(f"{W1}.weight")


def test_index_maps_to_the_wrong_shard(modelopt):
    with modelopt.json(INDEX) as index:
        other = next(s for s in index["weight_map"].values() if s != index["weight_map"][NORM])
        index["weight_map"][NORM] = other
    finding = modelopt.judge().one("index-tensor-misplaced", NORM)
    assert finding.got == other and finding.expected != other


def test_index_names_an_absent_tensor(modelopt):
    with modelopt.json(INDEX) as index:
        index["weight_map"]["no.such.tensor"] = next(iter(index["weight_map"].values()))
    modelopt.alone().one("index-tensor-missing", "no.such.tensor")


def test_index_leaves_a_tensor_out(modelopt):
    with modelopt.json(INDEX) as index:
        del index["weight_map"][NORM]
    modelopt.alone().one("index-tensor-unlisted", NORM)


def test_index_total_size(modelopt):
    with modelopt.json(INDEX) as index:
        index["metadata"]["total_size"] *= 2
    modelopt.alone().one("index-total-size", INDEX, "warning")


@pytest.mark.parametrize("value", [float("inf"), "large", None])
def test_index_total_size_that_is_no_number(value, modelopt):
    with modelopt.json(INDEX) as index:
        index["metadata"]["total_size"] = value
    assert modelopt.foreign().judge().verdict == "pass"


def test_index_leaves_the_folder(modelopt):
    with modelopt.json(INDEX) as index:
        index["weight_map"][NORM] = "../elsewhere.safetensors"
    modelopt.alone().one("index-path", NORM)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {}}'])
def test_index_is_damaged(text, modelopt):
    (modelopt.folder / INDEX).write_text(text)
    judged = modelopt.judge()
    assert judged.verdict == "fail"
    assert {"index-invalid", "json-invalid"} & judged.ids
    judged.one("nothing-compared", str(modelopt.folder))


def test_folder_without_index_is_unfinished(modelopt):
    (modelopt.folder / INDEX).unlink()
    judged = modelopt.judge()
    judged.one("index-missing", INDEX)


def test_single_foreign_file_without_index(modelopt):
    with modelopt.tensors():
        pass
    path = next(modelopt.folder.glob("*.safetensors"))
    path.rename(modelopt.folder / "model.safetensors")
    (modelopt.folder / INDEX).unlink()
    judged = modelopt.foreign().judge()
    judged.one("index-missing", INDEX, "warning")
    assert judged.verdict == "warn"
    # the file itself may be named too
    assert judge(modelopt.folder / "model.safetensors", modelopt.source).verdict == "pass"


def test_missing_shard(modelopt, shard):
    shard.unlink()
    judged = modelopt.judge()
    judged.one("shard-missing", shard.name)
    # what was in it is not told tensor by tensor
    assert not judged.of("tensor-missing") and not judged.of("module-missing")
    assert "does not store as planned" in judged.skipped


def test_missing_shard_with_half_of_a_module(modelopt):
    """Other converters split modules; what is missing then is the shard, not a scale."""
    with modelopt.tensors() as tensors:
        pass
    names = [f"{W1}.weight_scale", f"{W1}.weight_scale_2", f"{W1}.input_scale"]
    halves = {
        "a.safetensors": {n: t for n, t in tensors.items() if n not in names},
        "b.safetensors": {n: tensors[n] for n in names},
    }
    for file, half in halves.items():
        (modelopt.folder / file).write_bytes(shard_bytes(half, {"format": "pt"}))
    with modelopt.json(INDEX) as index:
        index["weight_map"] = {n: file for file, half in halves.items() for n in half}
    (modelopt.folder / "model-00001-of-00001.safetensors").unlink()
    assert modelopt.foreign().judge().verdict == "pass"
    (modelopt.folder / "b.safetensors").unlink()
    judged = modelopt.judge()
    assert judged.ids == {"shard-missing"}


def test_dangling_shard(modelopt, shard):
    shard.unlink()
    shard.symlink_to("../blobs/gone")
    assert "../blobs/gone" in modelopt.alone().one("shard-missing", shard.name).message


@pytest.mark.parametrize("keep", [-100, 4, 200])
def test_truncated_shard(keep, modelopt, shard):
    shard.write_bytes(shard.read_bytes()[:keep])
    judged = modelopt.judge()
    id = "shard-truncated" if keep < 0 else "header-truncated"
    assert shard.name in judged.one(id, shard.name).message
    judged.one("file-size", shard.name)


def test_lfs_pointer(modelopt, shard):
    shard.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    assert "lfs-pointer" in modelopt.judge().ids


def test_unreadable_header(modelopt, shard):
    raw = bytearray(shard.read_bytes())
    raw[8:12] = b"\xff\xfe\x00{"
    shard.write_bytes(raw)
    modelopt.alone().one("header-not-json", shard.name)


def test_folder_in_place_of_a_shard(modelopt, shard):
    shard.unlink()
    shard.mkdir()
    assert "file-unreadable" in modelopt.alone().ids


def test_tensor_stored_twice(modelopt):
    shutil.copy(modelopt.shard_of(NORM), modelopt.folder / "copy.safetensors")
    with modelopt.json(INDEX) as index:
        index["weight_map"]["more"] = "copy.safetensors"
    modelopt.alone().one("tensor-twice", NORM)


def test_missing_format_metadata(modelopt, shard):
    raw = shard.read_bytes().replace(b'"format":"pt"', b'"format":"np"')
    shard.write_bytes(raw)
    finding = modelopt.alone().one("metadata-format", shard.name)
    assert (finding.got, finding.expected) == ("np", "pt")


@pytest.mark.parametrize("name", [".mmq", "model-00001-of-00005.safetensors.partial"])
def test_unfinished_conversion(name, modelopt):
    (modelopt.folder / name).mkdir()
    modelopt.alone().one("run-unfinished", name)


def test_stray_weights(modelopt):
    shutil.copy(modelopt.shard_of(NORM), modelopt.folder / "consolidated.safetensors")
    modelopt.alone().one("stray-weights", "consolidated.safetensors", "warning")


def test_file_of_the_manifest_is_gone(modelopt):
    (modelopt.folder / "LICENSE").unlink()
    modelopt.alone().one("file-missing", "LICENSE")


def test_file_of_the_manifest_has_another_size(modelopt):
    with (modelopt.folder / "tokenizer.json").open("a") as file:
        file.write(" ")
    modelopt.alone().one("file-size", "tokenizer.json")


def test_file_of_the_manifest_has_other_bytes(modelopt):
    path = modelopt.folder / "tokenizer.json"
    path.write_bytes(path.read_bytes().replace(b"vocab", b"VOCAB"))
    judged = modelopt.judge()
    judged.one("file-hash", "tokenizer.json")
    judged.one("side-file-differs", "tokenizer.json", "warning")


def test_shard_that_the_manifest_does_not_list(modelopt):
    with modelopt.json(MANIFEST) as manifest:
        dropped = manifest["files"].pop()
        manifest["files"] = [f for f in manifest["files"] if not f["name"].startswith("model-")]
    assert dropped
    modelopt.alone().one("file-unlisted", modelopt.shard_of(NORM).name)


@pytest.mark.parametrize("value", [{}, {"files": []}, {"files": [{"name": "../x", "bytes": 1}]}])
def test_manifest_without_files(value, modelopt):
    with modelopt.json(MANIFEST) as manifest:
        manifest.clear()
        manifest.update(value)
    modelopt.alone().one("manifest-invalid", MANIFEST)


@pytest.mark.parametrize(
    "change", [{"ignore": "no list"}, {"layout": "other"}, {"to": 5}, {"max_shard_bytes": "5GB"}]
)
def test_manifest_with_options_that_mean_nothing(change, modelopt):
    with modelopt.json(MANIFEST) as manifest:
        manifest["options"].update(change)
    judged = modelopt.judge()
    judged.one("manifest-invalid", MANIFEST)
    # it is compared by value then
    assert judged.report.metrics["quantised_tensors"] == 24


@pytest.mark.parametrize("name", [CONFIG, HF_CONFIG, MANIFEST])
def test_damaged_json(name, modelopt):
    (modelopt.folder / name).write_text("{")
    assert "json-invalid" in modelopt.judge().ids


@pytest.mark.parametrize(
    ("name", "severity"),
    [("tokenizer.json", "error"), ("chat_template.jinja", "error"), ("dspark/config.json", "error"),
     ("configuration_minimax_m3_vl.py", "error"), ("preprocessor_config.json", "error"),
     ("LICENSE", "warning"), ("README.md", "warning")],
)  # fmt: skip
def test_side_file_was_not_copied(name, severity, modelopt):
    (modelopt.folder / name).unlink()
    modelopt.foreign().judge().one("side-file-missing", name, severity)


@pytest.mark.parametrize(("name", "severity"), [("chat_template.jinja", "warning"),
                                                ("README.md", "note")])  # fmt: skip
@pytest.mark.parametrize("longer", [False, True])
def test_side_file_differs(name, severity, longer, modelopt):
    path = modelopt.folder / name
    raw = path.read_bytes()
    path.write_bytes(raw + b"x" if longer else raw[:-1] + b"x")
    modelopt.foreign().judge().one("side-file-differs", name, severity)


def test_output_that_is_not_there(modelopt, tmp_path):
    missing = str(tmp_path / "nowhere" / "out")
    for against in ((modelopt.source,), ()):
        # no report is made of it either
        with pytest.raises(BadInputError) as caught:
            judge(missing, *against)
        assert (caught.value.id, caught.value.where) == ("out-not-found", missing)
        assert caught.value.got == f"{tmp_path} holds no nowhere"


def test_out_and_source_are_the_same_folder(modelopt, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(modelopt.folder)
    for against in (modelopt.folder, link, f"{modelopt.folder}/."):
        with pytest.raises(UsageError) as caught:
            refuse_same(str(modelopt.folder), str(against))
        assert (caught.value.id, caught.value.exit_code) == ("source-is-output", 2)
        assert caught.value.message == f"OUT and SRC are the same folder, {modelopt.folder}"
    for against in (None, str(modelopt.source), str(tmp_path / "absent"), "org/name"):
        refuse_same(str(modelopt.folder), against)
