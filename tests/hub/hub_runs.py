"""What the tests of Hub sources ask of runs and of the server's log."""

from __future__ import annotations

import json

from in_process import failed, run_mmq
from m3_source import hashes

from mmq.convert import source_files

REPO = "org/name"
MANIFEST = "mmq-manifest.json"
SMALL = ("--max-shard-size", "100KB")


def error_of(events):
    (error,) = [e for e in events if e["event"] == "error"]
    return error


def refused(*arguments):
    """(exit code, error id, error) of a run that fails."""
    code, error = failed(*arguments)
    return code, error["id"], error


def converted(source, out, *options):
    """Hashes of an output, and its manifest without what tells of the source's whereabouts."""
    jobs = () if "--jobs" in options else ("--jobs", "1")
    code, events, _ = run_mmq("convert", source, out, *SMALL, *jobs, *options)
    assert code == 0, events
    return without_origin(out)


def without_origin(out):
    found = hashes(out, leave_out=("mmq-convert.json", MANIFEST))
    manifest = json.loads((out / MANIFEST).read_bytes())
    for key in ("hub", "versions"):
        manifest.pop(key, None)
    for key in ("repo", "commit"):
        manifest["source"].pop(key, None)
    for shard in manifest["source"]["shards"]:
        shard.pop("sha256")
    for shard in (
        *manifest["fingerprint"]["source"].values(),
        *(s for o in manifest["fingerprint"]["others"].values() for s in o.values()),
    ):
        shard.pop("sha256", None)
    manifest["options"].pop("experts_from")
    return found, manifest


def shard_gets(hub, name=""):
    """Requests for weight files, at the Hub's own address."""
    return hub.log.of(rf"GET /.*/resolve/.*{name}.*\.safetensors$")


def cdn_bytes(hub):
    """Bytes that storage sent."""
    return sum(r.sent for r in hub.log.of(r"GET /cdn/"))


class Watch:
    """What lies in a folder of downloads, looked at whenever something changes."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.peak, self.fetched = folder, 0, []
        real, release = source_files.download, source_files.SourceFiles.release

        def download(snapshot, name, path, *rest):
            real(snapshot, name, path, *rest)
            if name.startswith("model-"):
                self.fetched.append(name)
                self.look()

        def released(files, unit):
            self.look()
            release(files, unit)

        monkeypatch.setattr(source_files, "download", download)
        monkeypatch.setattr(source_files.SourceFiles, "release", released)

    def look(self):
        sizes = []
        for path in self.folder.rglob("model-*"):
            try:
                sizes.append(path.stat().st_size)
            except FileNotFoundError:
                continue
        self.peak = max(self.peak, sum(sizes))


#: Of a shard, so that headers and data can be told apart in the log.
FIRST_READ = 16 << 10


def judge(out, source, report, *options):
    """`mmq verify` at level weights: exit code, report, events."""
    report.parent.mkdir(exist_ok=True)
    code, events, _ = run_mmq("verify", out, "--against", source, "-o", report, *options)
    return code, json.loads(report.read_bytes()), events


def data_gets(hub):
    """Names of the weight files that were fetched, their headers left aside."""
    header = f"bytes=0-{FIRST_READ - 1}"
    return {r.path.rpartition("/")[2] for r in shard_gets(hub) if r.range != header}
