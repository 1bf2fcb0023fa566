"""Level structure: headers, configs and small scalars; imports neither torch nor numba."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mmq.convert.modules import Module
from mmq.convert.safetensors_header import TensorInfo
from mmq.convert.stream import SourceReader
from mmq.convert.work import SOURCE
from mmq.report.findings import Finding
from mmq.verify.completeness import check_complete
from mmq.verify.expectation import Expectation
from mmq.verify.experts import (
    check_fused,
    check_input_scales,
    check_layouts,
    check_left_at_mxfp8,
    check_leftovers,
    check_mxfp8,
    check_scalars,
)
from mmq.verify.files import (
    check_folder,
    check_index,
    check_manifest_sizes,
    check_metadata,
    check_side_files,
    side_files_of,
)
from mmq.verify.kv_cache import check_kv_scales
from mmq.verify.log import LevelLog
from mmq.verify.model_config import check_model_config, check_mtp
from mmq.verify.plan_match import check_configs, check_sizes, check_tensors
from mmq.verify.quant_config import check_quantization
from mmq.verify.scan import STRUCTURE_LIMIT, scan_bytes, scan_module
from mmq.verify.subject import Subject


def check_structure(
    subject: Subject, expectation: Expectation | None, log: LevelLog, *, last_level: bool
) -> None:
    """Run the level.

    Args:
        expectation: the source and its plan, when there is a source.
        last_level: whether no weights level follows, which would scan the block scales.
    """
    readable = subject.root is not None and not subject.headers_only
    reader = SourceReader({SOURCE: subject.paths}) if readable else None
    try:
        _files(subject, log)
        _modules(subject, log, reader)
        _configs(subject, expectation, log)
        if expectation is not None:
            _against(subject, expectation, log)
        else:
            log.skip("comparison with the source: no --against")
        if last_level:
            _scan(subject, log, reader)
            log.skip(_values_reason(expectation))
            log.skip("SHA-256 of the shards: level weights")
    finally:
        if reader is not None:
            reader.close()


def _values_reason(expectation: Expectation | None) -> str:
    if expectation is not None and expectation.source.root is None:
        return "tensor values: the source is a header manifest, without weights"
    how = f"--against {expectation.source.location}" if expectation else "--against SRC"
    return f"tensor values, pass-through bytes included: mmq verify OUT {how}"


def _files(subject: Subject, log: LevelLog) -> None:
    if subject.root is None:
        log.skip("files, index and shard metadata: OUT is no folder of weights")
        return
    listed = len(subject.index.weight_map) if subject.index else 0
    log.run("index entries", listed, check_index(subject))
    log.run("shard headers", len(subject.shards), check_metadata(subject))
    log.run("folder", 1, check_folder(subject))
    if subject.manifest is None:
        log.skip("file sizes against a manifest: OUT has no mmq-manifest.json")
    else:
        log.run("manifest", 1, check_manifest_sizes(subject))


def _modules(subject: Subject, log: LevelLog, reader: SourceReader | None) -> None:
    nvfp4 = len(subject.nvfp4)
    log.run("nvfp4 modules", nvfp4, check_layouts(subject))
    log.run("leftovers", nvfp4, check_leftovers(subject))
    log.run("input scales", nvfp4, check_input_scales(subject))
    log.run("fused linears", len(subject.modules), check_fused(subject))
    log.run("mxfp8 modules", sum(m.format == "mxfp8" for m in subject.modules.values()),
            [*check_mxfp8(subject), *check_left_at_mxfp8(subject)])  # fmt: skip
    if reader is None:
        log.skip(f"values of global, input and KV scales: {_why_unread(subject)}")
        log.run("kv scales", 1, check_kv_scales(subject, None))
        return

    def read(tensor: TensorInfo) -> np.float32:
        return np.float32(reader.whole(tensor).view("<f4")[0])

    log.run("global scales", nvfp4, check_scalars(subject, read))
    log.run("kv scales", 1, check_kv_scales(subject, read))


def _configs(subject: Subject, expectation: Expectation | None, log: LevelLog) -> None:
    source = expectation.source.config if expectation else None
    names = expectation.modules if expectation else None
    mtp = expectation is not None and any(m.role.mtp for m in expectation.modules.values())
    log.run("config.json", 1, check_model_config(subject, source))
    log.run("modules of the model", len(subject.modules), check_complete(subject, names))
    log.run("mtp", 1, check_mtp(subject, source, mtp))
    log.run("quantised modules", sum(m.is_quantised for m in subject.modules.values()),
            check_quantization(subject))  # fmt: skip


def _against(subject: Subject, expectation: Expectation, log: LevelLog) -> None:
    if expectation.plan is not None:
        log.run("tensors of the plan", len(subject.tensors),
                check_tensors(subject, expectation, log.named))  # fmt: skip
        log.run("sizes", 1, check_sizes(subject, expectation))
        log.run("configs of the plan", 1, check_configs(subject, expectation))
    if expectation.source.root is not None and subject.root is not None:
        sides = side_files_of(expectation.source)
        log.run("side files", len(sides), check_side_files(subject, sides))


def _why_unread(subject: Subject) -> str:
    if subject.headers_only:
        return "only headers of OUT were read from the Hub"
    return "OUT is no folder of weights"


def _scan(subject: Subject, log: LevelLog, reader: SourceReader | None) -> None:
    modules = [m for m in subject.modules.values() if m.scale is not None]
    nbytes = scan_bytes(modules)
    if reader is None:
        log.skip(f"block scales (NaN, zero over data): {_why_unread(subject)}")
    elif nbytes > STRUCTURE_LIMIT:
        log.skip(
            f"block scales (NaN, zero over data): {nbytes / 1e9:.2f} GB of them, so level weights"
            " reads them: mmq verify OUT --against SRC"
        )
    else:
        log.run("block scales scanned", len(modules), _scanned(modules, reader))


def _scanned(modules: list[Module], reader: SourceReader) -> Iterator[Finding]:
    for module in modules:
        yield from scan_module(module, reader)
