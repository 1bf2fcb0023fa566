"""A loopback Hub that mmq takes for the real one, with short waits and small parts."""

from __future__ import annotations

import huggingface_hub.constants as constants
import pytest
from hostile import good
from loopback_hub.hub_server import LoopbackHub

from mmq.hub import download, retries

REPO = "org/name"


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
