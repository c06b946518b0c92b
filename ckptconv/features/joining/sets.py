"""The files of a checkpoint that has one for each rank, by their names.

Frameworks choose similar names: `model_world_size_8_rank_3.pt` (verl), `pytorch_model_fsdp_rank3.bin` (accelerate),
`model_rank3.pt`, `rank_3.pt`. One rule reads all of them: names that differ only in a number after a word for a rank
form a set. The other words of the name tell whether the set holds weights, an optimizer's states, or something else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ckptconv.errors import CkptconvError
from ckptconv.formats.torch import SUFFIXES
from ckptconv.pickles.nodes import is_distributed_class
from ckptconv.storage.location import Location
from ckptconv.storage.reading import Entry

# The number of a rank, and the words before it. DeepSpeed's and Megatron's files are formats of their own.
_RANK = r"(?<![a-zA-Z])(?<!mp_)(?<!pp_)(?:rank|fsdp|dp|shard|gpu|worker|process|proc)[-_.]?(\d{1,6})(?![0-9])"
# A number at the end of any name: a rank's if the files' content says so, as in torch's checkpoint_0.pt; else a step's.
_NUMBER = r"(?<![0-9])(?<!of[-_])(\d{1,6})(?=(?:[-_]of[-_]\d+)?\.[a-z]+$)"
_WORLD = r"(?:(?<![a-zA-Z])(?:world(?:[-_]?size)?|ws)[-_]?|[-_]of[-_])(\d{1,6})(?![0-9])"
MODEL, OPTIMIZER, OTHER = "model", "optimizer", "other"
_OPTIMIZERS = frozenset({"optim", "optimizer", "optimizers", "opt", "optimstate"})
_OTHERS = frozenset(
    {"extra", "rng", "random", "scheduler", "sched", "lr", "dataloader", "loader", "data", "sampler", "progress"}
)


class FileSet:
    """The files of all ranks, by rank. `world` is the number of ranks, if the names contain it. `twice` are two names
    of one rank, such as rank_1.pt and rank_01.pt.
    """

    def __init__(self, stem: str, world: int | None, files: dict[int, str] | None = None) -> None:
        self.stem, self.world = stem, world
        self.files = {} if files is None else files
        self.twice: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """The content of the files, by their names."""
        words = frozenset(re.findall(r"[a-z]+", self.stem.lower()))
        return OPTIMIZER if words & _OPTIMIZERS else OTHER if words & _OTHERS else MODEL

    @property
    def is_certain(self) -> bool:
        """Whether the files are certainly a set, and not one file with a number in its name."""
        return len(self.files) > 1 or self.world is not None or "rank" in self.stem


def parsed(name: str) -> tuple[str, int, int | None] | None:
    """Return the name of a file with {} for its rank, the rank, and the number of ranks, if the name contains it.
    Return None for a name that is not that of a rank's file.

    >>> parsed("model_world_size_8_rank_3.pt")
    ('model_world_size_8_rank_{}.pt', 3, 8)
    """
    return _parsed(name, _RANK)


def _parsed(name: str, pattern: str) -> tuple[str, int, int | None] | None:
    is_numbered = name.endswith(SUFFIXES) and any(map(str.isdigit, name))
    matches = list(re.finditer(pattern, name)) if is_numbered else []
    if not matches:
        return None
    start, stop = matches[-1].span(1)
    world = re.search(_WORLD, name)
    return f"{name[:start]}{{}}{name[stop:]}", int(name[start:stop]), int(world[1]) if world else None


def sets_of(names: Mapping[str, Entry] | Iterable[str], pattern: str = _RANK) -> list[FileSet]:
    """Return the sets of files of ranks among `names`, in the order of the names; `pattern` finds a rank's number."""
    sets: dict[str, FileSet] = {}
    for name in names:
        parts = _parsed(name, pattern)
        if parts is None or (isinstance(names, Mapping) and names[name].kind != "file"):
            continue
        stem, rank, world = parts
        file_set = sets.setdefault(stem, FileSet(stem, world))
        if rank in file_set.files:
            file_set.twice = (file_set.files[rank], name)
        file_set.files.setdefault(rank, name)
    return list(sets.values())


def sets_in(place: Location) -> list[FileSet]:
    """Return the sets of files of ranks in a directory: by their names, or, if no names form a set, by their content.

    Files whose names have only a number are a set if the first file has a rank's part of a tensor.
    """
    named_sets = sets_of(place.names)
    if any(map(holds_tensors, named_sets)):
        return named_sets
    others = [candidate for candidate in named_sets if candidate.is_certain]
    left = {name: entry for name, entry in place.names.items() if parsed(name) is None}
    numbered = (candidate for candidate in sets_of(left, _NUMBER) if len(candidate.files) > 1)
    parts = [candidate for candidate in numbered if is_distributed(place.join(candidate.files[min(candidate.files)]))]
    return [*parts, *others] if parts else named_sets


def is_distributed(place: Location) -> bool:
    """Return whether a file mentions distributed tensors, of which each rank has a part."""
    from ckptconv.formats.torch.file import read_torch  # the first that reads a file

    try:
        mentioned = read_torch(place).globals
    except CkptconvError:
        return False
    return any(is_distributed_class(str(name)) for name in mentioned)


def holds_tensors(files: FileSet) -> bool:
    """Return whether the names of files are those of a set of weights or of an optimizer's states."""
    return files.is_certain and files.kind != OTHER


def holds_parts(place: Location) -> bool:
    """Return whether a directory has a set of files with weights or an optimizer's states."""
    return any(map(holds_tensors, sets_in(place)))
