"""Which words name a repository: `org/name[@revision]`, unless a file or folder has that name."""

from __future__ import annotations

import pytest

from mmq.errors import UsageError
from mmq.hub.location import HubLocation, parse_location


@pytest.mark.parametrize(
    ("text", "repo", "revision"),
    [
        ("org/name", "org/name", "main"),
        ("MiniMaxAI/MiniMax-M3-MXFP8", "MiniMaxAI/MiniMax-M3-MXFP8", "main"),
        ("org/name@v1.0", "org/name", "v1.0"),
        ("org/name@refs/pr/3", "org/name", "refs/pr/3"),
        ("hf://org/name", "org/name", "main"),
        ("hf://org/name.json@x", "org/name.json", "x"),
        ("_o/n.a-m_e", "_o/n.a-m_e", "main"),
    ],
)
def test_repositories(text, repo, revision):
    assert parse_location(text) == HubLocation(repo, revision)


@pytest.mark.parametrize(
    "text",
    ["name", "/org/name", "./name", "../name", "a/b/c", "org/", "/name", "org/na me", "~/x",
     "org/name.safetensors", "out/manifest.json", "-o/name", "org/.hidden", "org/a..b", "org/a--b",
     "org/" + "x" * 100, "", "org\\name", "o\x00/x"],
)  # fmt: skip
def test_paths(text):
    assert parse_location(text) is None


@pytest.mark.parametrize(
    "text", ["hf://name", "hf://a/b/c", "hf://org/name@", "org/name@", "hf://./x", "hf://"]
)
def test_neither_path_nor_repository(text):
    with pytest.raises(UsageError) as error:
        parse_location(text)
    assert error.value.id == "hub-location"


def test_a_folder_of_that_name_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert parse_location("org/name") is None
    assert parse_location("org/name@main") == ("org/name", "main")
    assert parse_location("hf://org/name") == ("org/name", "main")
