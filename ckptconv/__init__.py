"""Offline conversion of checkpoints: any size, in little memory, and nothing in them runs."""

from __future__ import annotations

TYPE_CHECKING = False  # typing takes longer to import than all of this

if TYPE_CHECKING:
    from typing import Any

    from ckptconv.conversion import convert
    from ckptconv.errors import (
        CkptconvError,
        CorruptError,
        DifferenceError,
        FailedError,
        LimitError,
        MissingError,
        NoTensorError,
        OutOfRangeError,
        StoppedError,
        TruncatedError,
        UnsafeError,
        UnsupportedError,
        UsageError,
    )
    from ckptconv.features.arrays.checkpoint import Checkpoint
    from ckptconv.features.arrays.checkpoint import open_checkpoint as open  # noqa: A004
    from ckptconv.features.arrays.loading import load_state_dict
    from ckptconv.features.arrays.tensor import Tensor
    from ckptconv.features.average.averaging import average
    from ckptconv.features.dcp_reader.distributed import DistributedReader
    from ckptconv.features.deltas.patching import patch
    from ckptconv.features.diff.changes import Change
    from ckptconv.features.diff.comparing import diff
    from ckptconv.features.diff.difference import Difference, TensorDifference
    from ckptconv.features.inspect.inspecting import inspect
    from ckptconv.features.inspect.summary import Summary
    from ckptconv.features.merge.merging import merge
    from ckptconv.features.parts.finish import finish
    from ckptconv.features.rows.check import check as check_rows
    from ckptconv.features.rows.pack import pack as pack_rows
    from ckptconv.features.rows.split import split as split_rows
    from ckptconv.features.saving.saving import save_state_dict
    from ckptconv.features.scan.report import ScanReport
    from ckptconv.features.scan.scanning import scan
    from ckptconv.features.unflattening.decoder import unflatten
    from ckptconv.features.verify.report import Verification
    from ckptconv.features.verify.verifying import verify
    from ckptconv.features.virtual_files.files import VirtualFiles
    from ckptconv.features.virtual_files.filesystem import VirtualFileSystem
    from ckptconv.formats.source import Source
    from ckptconv.options.keywords import (
        AverageOptions,
        ConvertOptions,
        DiffOptions,
        DistributedOptions,
        FinishOptions,
        InspectOptions,
        LoadOptions,
        MergeOptions,
        OpenOptions,
        PatchOptions,
        RowsOptions,
        ScanOptions,
        VerifyOptions,
    )
    from ckptconv.options.table import Options
    from ckptconv.result import Report
    from ckptconv.structure.keymap import flatten
    from ckptconv.version import __version__

# The module of each public name; imported when first used, so that `import ckptconv` costs next to nothing. No module
# has the name of a function: the import system would replace the function with the module.
_HOMES = {
    "AverageOptions": ("options.keywords", "AverageOptions"),
    "Change": ("features.diff.changes", "Change"),
    "Checkpoint": ("features.arrays.checkpoint", "Checkpoint"),
    "CkptconvError": ("errors", "CkptconvError"),
    "ConvertOptions": ("options.keywords", "ConvertOptions"),
    "CorruptError": ("errors", "CorruptError"),
    "DiffOptions": ("options.keywords", "DiffOptions"),
    "Difference": ("features.diff.difference", "Difference"),
    "DifferenceError": ("errors", "DifferenceError"),
    "DistributedOptions": ("options.keywords", "DistributedOptions"),
    "DistributedReader": ("features.dcp_reader.distributed", "DistributedReader"),
    "FailedError": ("errors", "FailedError"),
    "FinishOptions": ("options.keywords", "FinishOptions"),
    "InspectOptions": ("options.keywords", "InspectOptions"),
    "LimitError": ("errors", "LimitError"),
    "LoadOptions": ("options.keywords", "LoadOptions"),
    "MergeOptions": ("options.keywords", "MergeOptions"),
    "MissingError": ("errors", "MissingError"),
    "NoTensorError": ("errors", "NoTensorError"),
    "OpenOptions": ("options.keywords", "OpenOptions"),
    "Options": ("options.table", "Options"),
    "OutOfRangeError": ("errors", "OutOfRangeError"),
    "Report": ("result", "Report"),
    "RowsOptions": ("options.keywords", "RowsOptions"),
    "PatchOptions": ("options.keywords", "PatchOptions"),
    "ScanOptions": ("options.keywords", "ScanOptions"),
    "VerifyOptions": ("options.keywords", "VerifyOptions"),
    "ScanReport": ("features.scan.report", "ScanReport"),
    "Source": ("formats.source", "Source"),
    "StoppedError": ("errors", "StoppedError"),
    "Summary": ("features.inspect.summary", "Summary"),
    "TruncatedError": ("errors", "TruncatedError"),
    "Tensor": ("features.arrays.tensor", "Tensor"),
    "TensorDifference": ("features.diff.difference", "TensorDifference"),
    "UnsafeError": ("errors", "UnsafeError"),
    "UnsupportedError": ("errors", "UnsupportedError"),
    "UsageError": ("errors", "UsageError"),
    "Verification": ("features.verify.report", "Verification"),
    "VirtualFileSystem": ("features.virtual_files.filesystem", "VirtualFileSystem"),
    "VirtualFiles": ("features.virtual_files.files", "VirtualFiles"),
    "__version__": ("version", "__version__"),
    "average": ("features.average.averaging", "average"),
    "check_rows": ("features.rows.check", "check"),
    "convert": ("conversion", "convert"),
    "diff": ("features.diff.comparing", "diff"),
    "finish": ("features.parts.finish", "finish"),
    "flatten": ("structure.keymap", "flatten"),
    "inspect": ("features.inspect.inspecting", "inspect"),
    "load_state_dict": ("features.arrays.loading", "load_state_dict"),
    "merge": ("features.merge.merging", "merge"),
    "open": ("features.arrays.checkpoint", "open_checkpoint"),
    "pack_rows": ("features.rows.pack", "pack"),
    "patch": ("features.deltas.patching", "patch"),
    "save_state_dict": ("features.saving.saving", "save_state_dict"),
    "scan": ("features.scan.scanning", "scan"),
    "split_rows": ("features.rows.split", "split"),
    "unflatten": ("features.unflattening.decoder", "unflatten"),
    "verify": ("features.verify.verifying", "verify"),
}

__all__ = [
    "AverageOptions",
    "Change",
    "Checkpoint",
    "CkptconvError",
    "ConvertOptions",
    "CorruptError",
    "DiffOptions",
    "Difference",
    "DifferenceError",
    "DistributedOptions",
    "DistributedReader",
    "FailedError",
    "FinishOptions",
    "InspectOptions",
    "LimitError",
    "LoadOptions",
    "MergeOptions",
    "MissingError",
    "NoTensorError",
    "OpenOptions",
    "Options",
    "OutOfRangeError",
    "PatchOptions",
    "Report",
    "RowsOptions",
    "ScanOptions",
    "ScanReport",
    "Source",
    "StoppedError",
    "Summary",
    "Tensor",
    "TensorDifference",
    "TruncatedError",
    "UnsafeError",
    "UnsupportedError",
    "UsageError",
    "Verification",
    "VerifyOptions",
    "VirtualFileSystem",
    "VirtualFiles",
    "__version__",
    "average",
    "check_rows",
    "convert",
    "diff",
    "finish",
    "flatten",
    "inspect",
    "load_state_dict",
    "merge",
    "open",
    "pack_rows",
    "patch",
    "save_state_dict",
    "scan",
    "split_rows",
    "unflatten",
    "verify",
]


if not TYPE_CHECKING:  # else every name would be right

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            word = {"safe_open": "open"}.get(name) or name.partition("_")[0] or name
            like = [known for known in __all__ if known.partition("_")[0] == word]
            meant = ["CkptconvError"] if name.endswith("Error") else like
            did = f". Did you mean {' or '.join(meant)}?" if meant else ""
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{did}")
        import importlib

        module, attribute = _HOMES[name]
        value = getattr(importlib.import_module(f".{module}", __name__), attribute)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
