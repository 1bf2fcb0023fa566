"""Text and ids become windows by the stated convention."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mmq.demo.small_model import build_small_model
from mmq.errors import BadInputError, UsageError
from mmq.verify.logits.tokens import check_ids, open_tokenizer, read_texts, read_tokens

BOS = 0


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a byte-level tokenizer: two special tokens, then the bytes."""
    return build_small_model(tmp_path_factory.mktemp("tokens") / "model")


def written(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, "utf-8")
    return path


def ids_of(text):
    return [2 + byte for byte in text.encode()]


def with_bos(model, tmp_path):
    folder = tmp_path / "bos"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((model / name).read_bytes())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "add_bos_token": True}))
    return open_tokenizer(folder)


def test_windows_do_not_overlap_and_the_tail_is_left_out(model, tmp_path):
    text = "abcdefghijk"
    tokens = read_texts([written(tmp_path, "a.txt", text)], open_tokenizer(model), 4, None)
    assert tokens.rows().tolist() == [ids_of(text[:4]), ids_of(text[4:8])]
    assert tokens.scored == 6 and tokens.count == 8
    assert tokens.convention["tail"] == "left out" and tokens.convention["bos"] == "none"


def test_a_file_shorter_than_a_window_is_one(model, tmp_path):
    tokens = read_texts([written(tmp_path, "a.txt", "abc")], open_tokenizer(model), 8, None)
    assert tokens.rows().tolist() == [ids_of("abc")]


def test_bos_once_per_window_takes_a_tokens_place(model, tmp_path):
    tokenizer = with_bos(model, tmp_path)
    tokens = read_texts([written(tmp_path, "a.txt", "abcdef")], tokenizer, 4, None)
    assert tokens.rows().tolist() == [[BOS, *ids_of("abc")], [BOS, *ids_of("def")]]
    assert tokens.convention["bos"] == "once per window" and tokens.doubled_bos == 0


def test_files_take_turns(model, tmp_path):
    """A limit leaves no language out, and windows stay in the files' order."""
    files = [written(tmp_path, f"{name}.txt", name * 20) for name in "ab"]
    tokens = read_texts(files, open_tokenizer(model), 4, 3)
    assert [w.file for w in tokens.windows] == [0, 0, 1]
    assert tokens.files == ("a.txt", "b.txt")
    assert set(tokens.convention["text_sha256"]) == {"a.txt", "b.txt"}


def test_ids_as_a_stream_and_as_windows(tmp_path):
    np.save(tmp_path / "stream.npy", np.arange(10))
    stream = read_tokens(tmp_path / "stream.npy", 4, None)
    assert stream.rows().tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    np.save(tmp_path / "rows.npy", np.array([[5, 6, 7], [8, 9, -1]]))
    rows = read_tokens(tmp_path / "rows.npy", 4, None)
    assert [w.length for w in rows.windows] == [3, 2]
    assert rows.scored == 3  # padding is not scored
    assert rows.rows().tolist() == [[5, 6, 7], [8, 9, -1]]


def test_the_stored_ids_score_the_same_tokens(model, tmp_path):
    tokens = read_texts([written(tmp_path, "a.txt", "abcdefgh")], open_tokenizer(model), 4, None)
    np.save(tmp_path / "again.npy", tokens.rows())
    assert read_tokens(tmp_path / "again.npy", 99, None).sha256 == tokens.sha256


def test_a_second_bos_is_seen(tmp_path):
    np.save(tmp_path / "rows.npy", np.array([[BOS, BOS, 7], [BOS, 8, 9]]))
    assert read_tokens(tmp_path / "rows.npy", 4, None, BOS).doubled_bos == 1


@pytest.mark.parametrize(
    ("array", "id"),
    [
        (np.array([[-1, 5, 6]]), "tokens-padding"),
        (np.array([[5, -1, 6]]), "tokens-padding"),
        (np.array([0.5, 1.5]), "tokens-unreadable"),
        (np.zeros((2, 2, 2), int), "tokens-unreadable"),
    ],
)
def test_ids_that_are_none(tmp_path, array, id):
    np.save(tmp_path / "bad.npy", array)
    with pytest.raises(UsageError) as caught:
        read_tokens(tmp_path / "bad.npy", 4, None)
    assert caught.value.id == id


def test_files_that_cannot_be_read(model, tmp_path):
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9")
    for path in (latin, tmp_path / "absent.txt"):
        with pytest.raises(UsageError, match=path.name) as caught:
            read_texts([path], open_tokenizer(model), 4, None)
        assert caught.value.id == "text-unreadable"
    for path, why, hint in (
        (latin, "it is not UTF-8, at byte 3", f"iconv -t UTF-8 {latin}"),
        (tmp_path / "absent.txt", "no such file", f"ls {tmp_path}"),
        (tmp_path / "latim.txt", "no such file", f"did you mean {latin}?"),
        (tmp_path, "it is a folder", "--text FILE, repeatable"),
    ):
        with pytest.raises(UsageError) as caught:
            read_texts([path], open_tokenizer(model), 4, None)
        assert caught.value.message == f"--text {path}: {why}"
        assert (caught.value.where, caught.value.hint) == (str(path), hint)
    with pytest.raises(UsageError) as caught:
        read_tokens(tmp_path / "nowhere.npy", 4, None)
    assert caught.value.id == "tokens-unreadable"
    assert caught.value.message == f"--tokens {tmp_path / 'nowhere.npy'}: no such file"
    (tmp_path / "no.npy").write_bytes(b"not numpy")
    with pytest.raises(UsageError):
        read_tokens(tmp_path / "no.npy", 4, None)
    with pytest.raises(BadInputError) as missing:
        open_tokenizer(tmp_path)
    assert missing.value.id == "tokenizer-missing"


def test_nothing_to_score_and_ids_beyond_the_vocabulary(tmp_path):
    np.save(tmp_path / "one.npy", np.array([[7, -1]]))
    with pytest.raises(UsageError) as nothing:
        check_ids(read_tokens(tmp_path / "one.npy", 4, None), 512, "m")
    assert nothing.value.id == "nothing-scored"
    np.save(tmp_path / "big.npy", np.array([[7, 512]]))
    with pytest.raises(UsageError) as beyond:
        check_ids(read_tokens(tmp_path / "big.npy", 4, None), 512, "m")
    assert beyond.value.id == "token-out-of-range"
