"""Open a source of which the first rows of the vocabulary are converted, with the sizes of its tokenizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptconv.features.companions import reading
from ckptconv.features.companions.directory import LARGEST, VOCABULARIES
from ckptconv.features.vocab.options import VocabularyOptions
from ckptconv.features.vocab.rows import Vocabulary
from ckptconv.formats.source import Source
from ckptconv.storage import strict_json
from ckptconv.storage.location import Location


def opened(source: Source, settings: Mapping[str, Any], reaching: Mapping[str, Any]) -> Source:
    """Return `source` with the number of rows that the options `settings` ask for; `reaching` are those of stores."""
    stores = dict(reaching.get("storage_options") or {})
    rows = VocabularyOptions(vocab=settings["vocab"]).vocab
    assert rows is not None  # it is asked for
    files = reading.read_files(source, stores, *VOCABULARIES)
    tokens = {name: _tokens(Location(file.path, stores)) for name, file in files.items()}
    return source.computing(vocab=Vocabulary(rows, tokens))


def _tokens(place: Location) -> int:
    """Return the number after the largest that a tokenizer gives to a token; 0 if its file has another form."""
    try:
        tokenizer = strict_json.parse(place.read_text(LARGEST))
    except ValueError:
        return 0
    vocabularies = [tokenizer]
    if isinstance(tokenizer, dict) and isinstance(tokenizer.get("model"), dict):
        added = tokenizer.get("added_tokens")
        tokens = [token for token in added if isinstance(token, dict)] if added else []
        vocabularies = [tokenizer["model"].get("vocab"), {str(at): token.get("id") for at, token in enumerate(tokens)}]
    by_token = [vocabulary.values() for vocabulary in vocabularies if isinstance(vocabulary, dict)]
    numbers = [number for values in by_token for number in values if type(number) is int]
    numbers += [len(vocabulary) - 1 for vocabulary in vocabularies if isinstance(vocabulary, list)]
    return max(numbers, default=-1) + 1
