"""What goes wrong while a source on the Hub is read for `mmq verify`: named, bounded, resumable."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time

import pytest
from hub_runs import REPO, data_gets, judge, refused
from m3_source import snapshot

from mmq.convert import download_plan, downloads, source_files
from mmq.errors import BadInputError, IncompleteError, RefusedError
from mmq.hub import download
from mmq.verify import expectation, weights

SHARDS = 6


@pytest.fixture
def report(tmp_path):
    """In a folder of its own, beside which downloads lie by default."""
    return tmp_path / "reports" / "report.json"


def test_a_missing_need_is_an_error_not_zeros(hub, big_repo, big_folder, report, monkeypatch):
    """Break the plan: jobs that read more than they say they need."""
    real = download_plan.reads
    monkeypatch.setattr(
        download_plan, "reads", lambda task: (r for r in real(task) if "scale_inv" not in r[1].name)
    )
    code, id, _ = refused("verify", big_folder, "--against", REPO, "-o", report)
    assert (code, id) == (4, "file-unreadable")


def test_the_branch_moves_during_the_run(
    hub, big_repo, big_source, big_folder, report, tmp_path, monkeypatch
):
    moved = []
    real = source_files.download

    def fetch(*arguments):
        if not moved:
            moved.append(hub.add(REPO, {p.name: b"" for p in big_source.glob("*.safetensors")}))
        real(*arguments)

    monkeypatch.setattr(source_files, "download", fetch)
    code, answer, _ = judge(big_folder, REPO, report)
    assert code == 0 and answer["against"]["commit"] == big_repo
    assert moved and all(f"/resolve/{big_repo}/" in r.path for r in hub.log.of("/resolve/"))


def test_errors_for_ever_end_in_a_rerun(hub, big_repo, big_folder, report):
    hub.fault("GET .*/model-00004-of-00006", skip=1, times=None, status=500)
    code, id, error = refused("verify", big_folder, "--against", REPO, "-o", report)
    assert (code, id) == (5, "hub-unreachable") and "00004" in error["message"]
    assert "run the same command again" in error["hint"]
    assert not report.exists()
    here = {p.name for p in report.parent.rglob("model-*.safetensors")}
    assert here
    hub.heal()
    hub.log.clear()
    assert judge(big_folder, REPO, report)[0] == 0
    # finished jobs are done again; what lies here is not fetched again
    assert data_gets(hub) == {f"model-{i:05d}-of-00006.safetensors" for i in range(1, 7)} - here
    assert [p.name for p in report.parent.iterdir()] == [report.name]


def test_cut_connections_go_on(hub, big_repo, big_folder, report):
    fault = hub.fault("GET /cdn/", skip=SHARDS, times=6, cut_after=20_000)
    assert judge(big_folder, REPO, report)[0] == 0
    assert fault.met > SHARDS + 6


@pytest.mark.parametrize(("times", "code"), [(1, 0), (None, 4)])
def test_wrong_bytes(hub, big_repo, big_folder, report, times, code):
    fault = hub.fault("GET /cdn/", skip=SHARDS, times=times, corrupt=True)
    if code == 0:
        assert judge(big_folder, REPO, report)[0] == 0
    else:
        found = refused("verify", big_folder, "--against", REPO, "-o", report)
        assert found[:2] == (4, "hub-digest")
        assert not report.exists()
    assert fault.met > SHARDS


def test_the_hubs_silence_is_no_finding(hub, big_repo, big_folder, report, monkeypatch):
    """Planning may ask the Hub for small tensors; that it does not answer is not OUT's fault."""
    for kind, id in ((IncompleteError, "hub-unreachable"), (BadInputError, "hub-login")):

        def build(source, options, kind=kind, id=id):
            raise kind(id, "no answer")

        monkeypatch.setattr(expectation, "build_plan", build)
        code, found, _ = refused("verify", big_folder, "--against", REPO, "-o", report)
        assert (code, found) == (kind.exit_code, id)


def test_a_disk_that_fills_up(hub, big_repo, big_folder, report, monkeypatch):
    room = 700_000

    class Disk:
        """`os` with a disk of that size."""

        def __getattr__(self, name):
            return getattr(os, name)

        def write(self, fd, data):
            nonlocal room
            if len(data) > room:
                raise OSError(errno.ENOSPC, "No space left on device")
            room -= len(data)
            return os.write(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(download, "os", Disk())
        code, id, error = refused("verify", big_folder, "--against", REPO, "-o", report)
    assert (code, id) == (6, "download-disk") and "disk is full" in error["message"]
    assert judge(big_folder, REPO, report)[0] == 0
    assert [p.name for p in report.parent.iterdir()] == [report.name]


def test_a_run_that_fails_downloads_no_more(hub, big_repo, big_folder, report, monkeypatch):
    def run_job(*arguments):
        raise BadInputError("tensor-nonfinite", "the source holds NaN")

    monkeypatch.setattr(weights, "run_job", run_job)
    hub.fault("GET /cdn/", skip=SHARDS + 1, times=None, pause=0.2)
    found = refused("verify", big_folder, "--against", REPO, "-o", report)
    assert found[:2] == (4, "tensor-nonfinite")

    def here():
        return sum(p.stat().st_size for p in report.parent.rglob("model-*"))

    before = here()
    assert before
    time.sleep(1.5)
    assert here() == before


def test_a_place_that_is_none(hub, big_repo, big_folder, report, tmp_path):
    (tmp_path / "file").write_text("")
    options = ("-o", report, "--download-dir", tmp_path / "file" / "dir")
    code, id, error = refused("verify", big_folder, "--against", REPO, *options)
    assert (code, id) == (6, "download-disk") and "--download-dir" in error["hint"]


def test_one_run_at_a_time(hub, big_repo, big_folder, report, tmp_path):
    for folder, options in (
        (report.parent / ".mmq-verify" / "source", ()),
        (tmp_path / "dir", ("--download-dir", tmp_path / "dir")),
    ):
        lock = source_files.FolderLock(folder)
        mine = folder / "mine"
        mine.write_text("the other run's")
        try:
            arguments = ("verify", big_folder, "--against", REPO, "-o", report, *options)
            assert refused(*arguments)[:2] == (7, "locked")
        finally:
            lock.close()
        assert mine.exists()


def test_no_other_run_can_begin_meanwhile(hub, big_repo, big_folder, report, monkeypatch):
    real, tried = source_files.download, []

    def fetch(*arguments):
        if arguments[1].startswith("model-"):
            with pytest.raises(RefusedError):
                source_files.FolderLock(report.parent / ".mmq-verify" / "source")
            tried.append(arguments[1])
        real(*arguments)

    monkeypatch.setattr(source_files, "download", fetch)
    assert judge(big_folder, REPO, report)[0] == 0
    assert len(tried) == SHARDS


def test_another_runs_downloads_go(hub, big_repo, big_folder, report, monkeypatch):
    """The branch has moved since: its old shards make room before room is asked for."""
    monkeypatch.setattr(downloads, "free_bytes", lambda folder: 0)
    _, _, error = refused("verify", big_folder, "--against", REPO, "-o", report)
    disk = int(error["expected"].split()[0].replace(",", ""))
    left = report.parent / ".mmq-verify" / "source" / "org--name" / ("0" * 40) / "model-1"
    left.parent.mkdir(parents=True)
    left.write_bytes(bytes(300_000))
    hidden = report.parent / ".mmq-verify" / "state.json"
    hidden.write_text("of level logits")

    def free(folder):
        files = (p for p in (report.parent / ".mmq-verify" / "source").rglob("*") if p.is_file())
        return disk - sum(p.stat().st_size for p in files)

    monkeypatch.setattr(downloads, "free_bytes", free)
    assert judge(big_folder, REPO, report)[0] == 0
    assert {p.name for p in report.parent.rglob("*")} == {report.name, ".mmq-verify", "state.json"}


def start(hub, out, report):
    environment = {**os.environ, **hub.environment, "HF_HUB_CACHE": str(report.parent / "cache")}
    return subprocess.Popen(
        [sys.executable, "-m", "mmq", "verify", out, "--against", REPO, "-o", report],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_hurts_nobody(hub, big_repo, big_folder, report, tmp_path, number):
    report.parent.mkdir()
    before = snapshot(big_folder)
    slow = hub.fault("GET /cdn/", skip=SHARDS + 3, times=None, pause=1.0)
    run = start(hub, big_folder, report)
    folder = report.parent / ".mmq-verify" / "source"
    deadline = time.monotonic() + 60
    while not (slow.met > SHARDS + 3 and list(folder.rglob("*.safetensors.partial"))):
        assert run.poll() is None and time.monotonic() < deadline, run.communicate()
        time.sleep(0.01)
    time.sleep(0.6)
    run.send_signal(number)
    _, stderr = run.communicate(timeout=30)
    wanted = {signal.SIGINT: 130, signal.SIGTERM: 143}.get(number, -number)
    assert run.returncode == wanted, stderr
    assert hub.token not in stderr and "Traceback" not in stderr
    assert not report.exists() and snapshot(big_folder) == before
    hub.heal()
    hub.log.clear()
    here = {p.name for p in folder.rglob("model-*.safetensors")}
    assert judge(big_folder, REPO, report)[0] == 0
    assert not data_gets(hub) & here
    assert not (report.parent / ".mmq-verify").exists()
