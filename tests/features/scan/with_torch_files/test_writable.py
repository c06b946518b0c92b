"""The classes that files for torch.load may name are those that `scan` knows."""

from __future__ import annotations

from ckptconv.features.attacks import tables
from ckptconv.features.scan.grammar.table import grammar
from ckptconv.features.torch_files import writable
from ckptconv.pickles.nodes import Global, Opaque


def test_what_is_written_without_being_asked_for_is_known() -> None:
    entry = grammar().entry
    for names in (writable.CLASSES, writable.ENUMS, writable.TENSORS, writable.MENTIONED):
        for each in names:
            # The lists combine modules with names; Python 2 had two more types.
            assert entry(each) or each.module.startswith("numpy.random._") or each.name in ("long", "unicode"), each
            assert not tables.is_suspect(each)
    assert writable.unlisted(Opaque(Global("typing", "_eval_type"), ())) == "typing._eval_type"
