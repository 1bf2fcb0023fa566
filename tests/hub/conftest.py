"""A loopback Hub that mmq takes for the real one, with short waits and small parts."""

from __future__ import annotations

import huggingface_hub.constants as constants
import pytest
from hostile import good, scatter_scales
from hub_runs import FIRST_READ, REPO, converted
from loopback_hub.hub_server import LoopbackHub
from m3_source import Size

from mmq.hub import download, retries, stand_in


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with LoopbackHub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf-cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 2)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setenv("HF_TOKEN", server.read_token)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr(retries, "FIRST_DELAY", 0.01)
        monkeypatch.setattr(download, "PART_BYTES", 64 << 10)
        yield server


@pytest.fixture(scope="session")
def hub_source(tmp_path_factory):
    """The good source, as a download of the repository leaves it: with its .gitattributes."""
    folder = good().write(tmp_path_factory.mktemp("hub") / "src")
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    return folder


@pytest.fixture
def repo(hub, hub_source):
    """The good source on the Hub; its commit."""
    return hub.add_folder(REPO, hub_source)


@pytest.fixture(scope="session")
def big_source(tmp_path_factory):
    """Six shards, each scale in the shard before its weight's."""
    source = good(Size(layers=6, experts=8), shards=6)
    scatter_scales(source)
    folder = source.write(tmp_path_factory.mktemp("rolling") / "src")
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    return folder


@pytest.fixture(scope="session")
def big_folder(big_source, tmp_path_factory):
    """Six shards converted from the folder into many; tests must not change it."""
    out = tmp_path_factory.mktemp("big") / "out"
    converted(big_source, out)
    return out


@pytest.fixture
def big_repo(hub, big_source, monkeypatch):
    """The six shards on the Hub, their headers read by small ranges; the commit."""
    monkeypatch.setattr(stand_in, "FIRST_READ", FIRST_READ)
    return hub.add_folder(REPO, big_source)
