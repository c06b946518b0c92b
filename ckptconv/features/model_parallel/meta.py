"""Llama's files as Meta released them: consolidated.00.pth and so on, one for each tensor-parallel rank.

Source: llama/model.py of Meta's llama and llama3. Each file is a state dict with parts of the same tensors: of rows or
columns of matrices, as fairscale's layers cut them. Vectors, which are norms and rotary frequencies, are whole in each.
"""

from __future__ import annotations

import re

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.features.model_parallel.parts import Parts, read_all
from ckptconv.formats.alone import LoneKind, is_numbered
from ckptconv.formats.format import CERTAIN, Guess, Probe
from ckptconv.formats.lone_file import LoneFile
from ckptconv.formats.model_files import holds_whole
from ckptconv.formats.nesting import tensors_in
from ckptconv.formats.source import Source, Wanted
from ckptconv.formats.torch import file as torch_file
from ckptconv.storage.location import Location
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.text import some

_FILE = re.compile(r"consolidated\.(\d{2,3})\.pth")
# A lone file of a rank.
_META = r"consolidated\.(\d{2,3})\.(?:pth|pt|safetensors)"
_GUESS = Guess(CERTAIN, "Llama's files as Meta released them", "pt2safetensors {} OUTPUT --map meta-llama3")


def sniff(probe: Probe) -> Guess | None:
    """Recognize a directory with such files, unless a whole model is next to them."""
    is_meant = probe.is_directory and _files(probe.place) and not holds_whole(probe.place.names)
    return _GUESS if is_meant else None


def read(place: Location, wanted: Wanted) -> Source:
    """Open the only file, or for a map the parts of all files, those of rank 1 as `1.<name>`.

    Raise UnsupportedError if there are several, and no map; CorruptError if one is missing or has other tensors.
    """
    numbered = _files(place)
    missing = [f"consolidated.{number:02d}.pth" for number in range(max(numbered) + 1) if number not in numbered]
    if missing:
        raise CorruptError(f"{place} lacks {some(missing, form=str)}.", "Download or copy the files again.")
    files = [numbered[number] for number in sorted(numbered)]
    if len(files) == 1:
        return torch_file.read(files[0], wanted)._replace(path=place.path)
    if not wanted.parts:
        raise UnsupportedError(
            f"{place} contains {len(files)} files of Meta's tensor-parallel ranks. Each has a part of every tensor, "
            "and the files do not record how to join the parts.",
            "Join them with --map meta-llama3 (for Llama 3) or --map meta-llama2, which convert the names to "
            "Hugging Face names; or convert one file with --alone.",
        )
    opened, log = read_all({file.name: file for file in files})
    parts = Parts(place.path)
    ranks = [tensors_in(file.value if isinstance(file.value, dict) else {}) for file in opened]
    parts.check_same_names(ranks, files)
    for rank, tensors in enumerate(ranks):
        for name, tensor in tensors.items():
            if len(tensor.shape) < 2:
                parts.add_whole(name, tensor)
            else:
                parts.add(f"{rank}.{name}", tensor)
    called = f"{len(files)} files of Meta's tensor-parallel ranks"
    facts = {"ranks": len(files), "files": len(files), "size": log.size}
    return parts.source(place, called, log, facts, wanted)


def _files(place: Location) -> dict[int, Location]:
    names = {int(match[1]): name for name in place.names if (match := _FILE.fullmatch(name))}
    return {number: place.join(name) for number, name in names.items() if place.names[name].kind == "file"}


def _of_meta(file: LoneFile) -> bool:
    norm, embeddings = file.get("norm.weight"), file.get("tok_embeddings.weight")
    output = file.get("layers.0.attention.wo.weight")
    if all(isinstance(tensor, LazyTensor) and tensor.shape for tensor in (norm, embeddings, output)):
        # Ranks split the columns of the output's matrix, and in Llama 1 and 2 those of the embeddings. In some models
        # the heads together are narrower than the model, but their width is no fraction of the model's.
        width = norm.shape[0]
        if embeddings.shape[-1] < width or (0 < output.shape[-1] < width and width % output.shape[-1] == 0):
            return True
    return is_numbered(file.place, _META)


# Files that are one of many, and the paths to give in their place.
LONE = (
    LoneKind(
        "belongs to one of Meta's tensor-parallel ranks.",
        "Specify the directory and a map that joins the ranks: ckptconv convert {} OUTPUT --map meta-llama3, or "
        "meta-llama2.",
        _of_meta,
    ),
)
