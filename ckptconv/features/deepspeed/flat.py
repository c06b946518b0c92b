"""Cutting the parameters of a ZeRO-1 or 2 group out of its ranks' partitions, which are parts of one flat vector."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.features.deepspeed import partitions as zero_layout
from ckptconv.features.deepspeed.cuts import Experts, Group, GroupCut
from ckptconv.features.deepspeed.partitions import Shape, Slice
from ckptconv.features.deepspeed.records import OptimFile
from ckptconv.storage.paths import basename
from ckptconv.text import brief, count_of


def cut_flat(
    group: int, shapes: Mapping[str, Shape], optims: Sequence[OptimFile], where: str, experts: Experts
) -> Group:
    """Cut a group of ZeRO-1 or 2, where the ranks that share it hold consecutive parts of one flat vector."""
    first, world = optims[0], len(optims)
    alignments = first.alignments[group] if group < len(first.alignments) else []
    if alignments and len(alignments) != len(shapes):
        raise CorruptError(
            f"{first.file.path}: param_alignment_paddings has {len(alignments)} values for group {group}, which has "
            f"{count_of(len(shapes), 'parameter')}."
        )
    slices, end = zero_layout.walk_flat(shapes, alignments)
    count = first.count(group) or world
    if world % count:
        raise CorruptError(
            f"{first.file.path}: group {group} is partitioned over {count} ranks, but {count} is not a divisor of "
            f"{world}, the number of data-parallel ranks."
        )
    fused = {name: experts.fused[name] for name in shapes if name in experts.fused}
    odd = [name for name in shapes if name not in fused and zero_layout.expert_of(name) is None]
    if odd and count < world:
        raise CorruptError(
            f"{first.file.path}: group {group} is partitioned over {count} of {world} ranks, as only experts are, but "
            f"its parameter {odd[0]!r} does not belong to an expert."
        )
    copies = zero_layout.ranks_of_group(world, count, experts.data_first)
    padded: list[tuple[int, ...]] = []
    for ranks in copies:
        held = sum(optims[rank].masters[group].numel for rank in ranks)
        needed = slices[-1].offset + math.prod(slices[-1].shape) if slices else 0
        # The flat vector is padded to a multiple of twice the ranks; most releases strip that. There is never more.
        if not needed <= held <= max(end, -(-end // (2 * count)) * 2 * count):
            raise CorruptError(
                f"{where}: group {group} has {held} elements on {count_of(count, 'rank')}, of "
                f"{basename(first.file.path)} and the other optimizer files, but its "
                f"{count_of(len(shapes), 'parameter')} require {brief(end)} with padding."
            )
        padded.append(_check_ranks(group, slices, end, [optims[rank] for rank in ranks], world))
    if len(copies) == 1:
        return Group([GroupCut(slices, copies[0], {name: name for name in shapes}, False, padded[0])], {})
    for name, held_by in fused.items():
        if len(held_by) != len(copies) or any(len(held) != shapes[name][0] for held in held_by):
            sizes = ", ".join(str(len(held)) for held in held_by)
            raise UnsupportedError(
                f"{where}: the experts of {name!r} are spread over the expert-parallel ranks as ({sizes}); only "
                f"{len(copies)} ranks with {shapes[name][0]} experts each are supported.",
                "First convert it to a universal checkpoint with DeepSpeed's ds_to_universal.py.",
            )
    return Group(
        [
            GroupCut(slices, ranks, zero_layout.global_names(shapes, ep_rank, experts.local), False, padded[ep_rank])
            for ep_rank, ranks in enumerate(copies)
        ],
        fused,
    )


def _check_ranks(
    group: int, slices: Sequence[Slice], end: int, optims: Sequence[OptimFile], world: int
) -> tuple[int, ...]:
    """Check what each rank states about its partition against the layout of `slices`, which ends at element `end`.

    Return the numbers of elements that a padded partition may have. `world` is the number of all ranks.
    """
    size = _partition_size(group, end, optims)
    for index, optim in enumerate(optims):
        held = optim.masters[group].numel
        padding = optim.paddings[group] if group < len(optim.paddings) else size - held
        # Releases that noted all padding on the last rank strip it by [: size - padding], where Python counts a
        # negative stop from the end.
        lean = size - padding if padding <= size else max(2 * size - padding, 0)
        if held not in (size, lean):
            expected = f"{brief(size)}, or {brief(lean)} without padding," if lean != size else brief(size)
            raise CorruptError(
                f"{optim.file.path}: its partition of group {group} has {held} elements, but {expected} were expected."
            )
        if held < size and any(other.masters[group].numel for other in optims[index + 1 :]):
            raise CorruptError(
                f"{optim.file.path}: its partition of group {group} has {held} of {brief(size)} elements, but later "
                "partitions are not empty."
            )
        _check_fragments(group, slices, index, size, size * len(optims) // world, optim)
    if all(group < len(optim.paddings) for optim in optims):
        return (size,)
    # The file does not state the padding: up to the next multiple of the ranks, or of twice as many.
    return size, -(-end // len(optims)), -(-end // (2 * len(optims))) * 2


def _partition_size(group: int, end: int, optims: Sequence[OptimFile]) -> int:
    """Return the number of elements of each rank's partition of a group, with padding."""
    largest = max(optim.masters[group].numel for optim in optims)
    if any(group >= len(optim.paddings) for optim in optims):
        return largest  # releases before 0.8.0 do not state the padding
    padding = sum(optim.paddings[group] for optim in optims)
    size, rest = divmod(end + padding, len(optims))
    if rest or size < largest:
        raise CorruptError(
            f"{optims[0].file.path} and the files of the other ranks record {brief(padding)} elements of padding "
            f"for group {group}. With {brief(end)} elements of parameters, the sum is {brief(end + padding)}, which "
            f"is not {len(optims)} equal partitions of at least {largest} elements."
        )
    return size


def _check_fragments(
    group: int, slices: Sequence[Slice], index: int, size: int, as_mapped: int, optim: OptimFile
) -> None:
    """Check the places in its partition that a rank states for parameters; it is partition `index`, of `size` elements.

    For experts, releases before 0.14.5 state places as if partitions had `as_mapped` elements.
    """
    said = optim.fragments[group] if group < len(optim.fragments) else {}
    if not said or not optim.zero or optim.round_robin:
        return  # with round robin, the file states places as they would be without it
    walked = _fragments_in(slices, index * size, size)
    if said in (walked, _fragments_in(slices, index * as_mapped, as_mapped)):
        return
    name = next(name for name in {**walked, **said} if said.get(name) != walked.get(name))
    texts = [
        f"at element {place[0]} with {place[1]} elements" if place else "nowhere"
        for place in (said.get(name), walked.get(name))
    ]
    raise CorruptError(
        f"{optim.file.path}: param_slice_mappings places {name!r} of group {group} {texts[0]}, but the shapes place "
        f"it {texts[1]}."
    )


def _fragments_in(slices: Sequence[Slice], start: int, size: int) -> dict[str, tuple[int, int]]:
    """Return the place and number of the elements that each parameter has in `size` elements from `start`."""
    fragments = {}
    for name, shape, offset, _ in slices:
        low, high = max(offset - start, 0), min(offset - start + math.prod(shape), size)
        if low < high:
            fragments[name] = (low, high - low)
    return fragments
