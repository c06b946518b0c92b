"""Regular expressions out of files: as `re` matches them, and in time that a name's length bounds."""

from __future__ import annotations

import re
import warnings

import pytest
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

from ckptconv.formats.deepspeed import patterns
from ckptconv.formats.deepspeed.patterns import Expressions, PatternError

PIECES = [
    *"ab.1_\n", r"\d", r"\.", r"\w", "[ab]", "[^a]", "[a-b1]", "(", "(?:", ")", "|", "*", "+", "?", "{2}", "{1,2}",
    "{,1}", "{,}", "^", "$", ".*", "*?", r"\Z", r"\A", "[]a]", "[^]", "a-", "]", "{", "}",
]  # fmt: skip
PATTERNS = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)
NAMES = st.text("ab.1_\nx", max_size=6)


@examples(150)
@given(PATTERNS, st.lists(NAMES, min_size=1, max_size=5))
def test_what_is_known_matches_as_python_does(pattern: str, names: list[str]) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            python = re.compile(pattern)
    except re.error:
        with pytest.raises(PatternError):
            Expressions([pattern])
        return
    try:
        ours = Expressions([pattern])
    except PatternError:
        return
    for name in names:
        assert (ours.first(name) is not None) == (python.match(name) is not None), (pattern, name)


@given(st.lists(PATTERNS, max_size=4), NAMES)
def test_of_several_the_first_is_found(several: list[str], name: str) -> None:
    known = []
    for pattern in several:
        try:
            Expressions([pattern])
        except PatternError:
            continue
        known.append(pattern)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [number for number, pattern in enumerate(known) if re.match(pattern, name)]
    assert Expressions(known).first(name) == (found[0] if found else None)


# What Megatron-DeepSpeed and DeepSpeed's AutoTP write, and a name that each is meant for.
WRITTEN = {
    r"tied_modules.embed.word_embeddings.norm.weight": "tied_modules.embed.word_embeddings.norm.weight",
    r"\d+.input_layernorm.weight": "12.input_layernorm.weight",
    r"\d+.self_attention.query_key_value.bias": "3.self_attention.query_key_value.bias",
    r".*\.mlp\.dense_h_to_4h\.weight$": "language_model.encoder.layers.0.mlp.dense_h_to_4h.weight",
    r"^model\.layers\.0\.mlp\.down_proj\.weight$": "model.layers.0.mlp.down_proj.weight",
    r"(module|_orig_mod)\.h\.\d+\.attn\.(q|k|v)_proj\.weight": "module.h.11.attn.k_proj.weight",
}


@pytest.mark.parametrize(("pattern", "name"), WRITTEN.items())
def test_what_frameworks_write_is_known(pattern: str, name: str) -> None:
    assert Expressions(["nothing", pattern]).first(name) == 1
    assert Expressions(["nothing", pattern]).first(f"other.{name[1:]}") in (
        None,
        1 if pattern.startswith(".*") else None,
    )


@pytest.mark.parametrize(
    "pattern",
    [r"(a)\1", "(?=a)", "(?<=a)b", "(?i)a", "(?P<x>a)", r"\ba", "(a+)+b", "a*+", "(a", "a)", "[a", "*a", "{2}",
     "a{3,2}", "\\", r"\x41", "[[:alpha:]]", "(" * 100 + ")" * 100, "a{99999}", "(a{100}b){100}"],
)  # fmt: skip
def test_what_is_not_known_is_refused_with_its_number(pattern: str) -> None:
    with pytest.raises(PatternError) as caught:
        Expressions(["a", pattern])
    assert caught.value.args[0] == 1


def test_work_grows_with_the_length_of_names_and_not_with_the_ways_to_match(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python would try some 10^20 ways."""
    monkeypatch.setattr(patterns, "MOST_STEPS", 200_000)
    assert Expressions([".*a.*a.*a.*a.*a.*a.*a.*a.*ab" * 2]).first("a" * 2000) is None


def test_work_for_all_names_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "MOST_STEPS", 10_000)
    monkeypatch.setattr(patterns, "REMEMBERED", 4)
    known = Expressions([f".*a.{{{n}}}b" for n in range(20)])
    with pytest.raises(PatternError, match="too long"):
        [known.first(f"{number}{'xa' * 50}") for number in range(1000)]
