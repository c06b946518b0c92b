"""The places that outputs claim, and the permissions that go with them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ckptconv.formats.source import Source
from ckptconv.outputs.kinds import DIVIDED
from ckptconv.outputs.targets import FORMS, final_path, is_beside
from ckptconv.plan import FilePlan
from ckptconv.storage.paths import dirname, resolved_name
from ckptconv.text import Proposed

if TYPE_CHECKING:
    from ckptconv.options.table import Options
    from ckptconv.outputs.planning import Output

# Forms of safetensors, which may lie in the directory of their input.
_BESIDE_INPUT = frozenset(FORMS.values())
# Prefixes of permissions that name inputs: in the directory of the output, and anywhere.
READ, INPUT = "read/", "input/"
NEW_NAME = "Give another name, or --overwrite to replace it."


class Claim(NamedTuple):
    """The place of an output to be written, and facts of that output.

    `form` is its form (see `Target.form`), `made_as` its kind, as in marks, and `names` are those of its files; `plans`
    has the plans of some. `proposed` is set if the user did not type the path as OUTPUT. `beside`: the directory is
    that of the input. `within` is the directory that the user gave, if several outputs are put there. `read` are the
    names there in which the input lies.
    """

    path: str
    form: str
    made_as: str
    names: Sequence[str]
    proposed: Proposed | None = None
    beside: bool = False
    overwrite: bool = False
    plans: Mapping[str, FilePlan] = {}
    within: str = ""
    read: frozenset[str] = frozenset()

    @property
    def kind(self) -> str:
        """The kind of its content, whichever command writes it."""
        return self.made_as.partition("/")[0]

    def final(self, name: str) -> str:
        """Return the final path of one of its files."""
        return final_path(self.path, self.form, name)

    def permissions(self) -> list[str]:
        """Return the permissions of this claim, for the process that publishes what others have staged."""
        granted = {"typed": self.proposed is None, "beside": self.beside, "overwrite": self.overwrite}
        return [name for name, is_so in granted.items() if is_so] + [f"{READ}{name}" for name in sorted(self.read)]


def claim_of(output: Output, sources: Sequence[Source], options: Options) -> Claim:
    """Return the claim of a planned output of `sources`."""
    target = output.target
    within = dirname(target.path) if target.kind in DIVIDED or options.per_rank else ""
    # Weights computed from several checkpoints are not the weights of any of them.
    is_plain = output.made_as == "weights" and target.form in _BESIDE_INPUT
    return Claim(
        target.path,
        target.form,
        output.made_as,
        [file.name for file in output.plan.files],
        target.proposed,
        is_plain and is_beside(within or target.path, sources),
        options.overwrite,
        # A directory with a manifest is identified by that.
        {} if output.has_manifest else {file.name: file for file in output.plan.files},
        within,
        frozenset(_entries(within or target.path, sources)),
    )


def _entries(directory: str, sources: Iterable[Source]) -> Iterator[str]:
    """Yield the names in `directory` that are, or contain, the `sources`."""
    above = f"{resolved_name(directory)}/"
    for source in sources:
        place = resolved_name(source.path)
        if place.startswith(above):
            yield place.removeprefix(above).partition("/")[0]
