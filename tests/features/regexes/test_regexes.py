"""Regular expressions out of files: as `re` matches them, and no longer than they may take."""

from __future__ import annotations

import re
import subprocess

import pytest
from effort import every

from ckptconv.features.regexes import regexes
from ckptconv.features.regexes.regexes import ExpressionError, LimitsError, first_matches

# What Megatron-DeepSpeed and DeepSpeed's AutoTP write, and a name that each is meant for.
WRITTEN = {
    r"tied_modules.embed.word_embeddings.norm.weight": "tied_modules.embed.word_embeddings.norm.weight",
    r"\d+.input_layernorm.weight": "12.input_layernorm.weight",
    r"\d+.self_attention.query_key_value.bias": "3.self_attention.query_key_value.bias",
    r".*\.mlp\.dense_h_to_4h\.weight$": "language_model.encoder.layers.0.mlp.dense_h_to_4h.weight",
    r"^model\.layers\.0\.mlp\.down_proj\.weight$": "model.layers.0.mlp.down_proj.weight",
    r"(module|_orig_mod)\.h\.\d+\.attn\.(q|k|v)_proj\.weight": "module.h.11.attn.k_proj.weight",
    r"(?!lm_head)(?P<head>head)\.\w+": "head.weight",
}


def test_of_several_the_first_that_matches_is_found_as_python_finds_it() -> None:
    lists = [["nothing", *WRITTEN], [*reversed(WRITTEN)], ["\ud800", "é"]]
    names = [*WRITTEN.values(), "other", "", "é", "\ud800"]
    expected = [
        [next((number for number, each in enumerate(own) if re.match(each, name)), None) for name in names]
        for own in lists
    ]
    assert first_matches(lists, names) == expected
    assert expected[0][: len(WRITTEN)] == [*range(1, 1 + len(WRITTEN))]


@every("pattern", ["(a", "a)", "[a", "*a", "{1}*+?", "a{3,2}", "\\", "(" * 5000, "a{99999999999}"])
def test_what_is_no_expression_is_refused_with_its_number(pattern: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        first_matches([["a"], ["b", pattern]], ["name"])
    assert (caught.value.at, caught.value.number) == (1, 1)


def test_what_takes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regexes, "MOST_SECONDS", 1)
    monkeypatch.setattr(regexes, "LONGEST_WAIT", 600)
    with pytest.raises(LimitsError) as caught:
        first_matches([["(a+)+$"]], ["a" * 60 + "!"])
    assert isinstance(caught.value.__cause__, subprocess.CalledProcessError)
    assert caught.value.__cause__.returncode < 0


def test_a_process_that_gets_no_processor_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regexes, "LONGEST_WAIT", 0.5)
    monkeypatch.setattr(regexes, "CHILD", "import time\ntime.sleep(600)")
    with pytest.raises(LimitsError) as caught:
        first_matches([["a"]], ["a"])
    assert isinstance(caught.value.__cause__, subprocess.TimeoutExpired)
