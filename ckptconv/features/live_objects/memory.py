"""The live objects of one tree: tensors that get the kind, the layout and the memory that its record says."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from ckptconv.features.live_objects import objects
from ckptconv.features.live_objects.tensors import is_plain
from ckptconv.pickles.nodes import Composite
from ckptconv.structure import leaves
from ckptconv.tensors.lazy import TensorFacts
from ckptconv.tensors.strides import is_contiguous

# A storage is rebuilt for its views unless that takes more than _SPREAD times their own memory, plus _SPARE bytes.
_SPREAD = 64
_SPARE = 1 << 20


class Memory:
    """The live objects of a record. Attributes and shared memory are given at the end, by `finish`.

    `lay_out`: a tensor that is alone in its memory is copied to the order of dimensions that it had.
    """

    def __init__(self, lay_out: bool) -> None:
        self._lay_out = lay_out
        self._attributes: list[tuple[Any, Any]] = []
        self._views: dict[Hashable, tuple[int, list[LiveView]]] = {}
        self._storages: list[tuple[Any, Any]] = []

    @staticmethod
    def has_elements(tensor: Any) -> bool:
        """Return whether a value of a file is a plain torch tensor, which has facts; others are put back unchanged."""
        return leaves.is_tensor(tensor) and is_plain(tensor)

    def tensor(self, bits: Any, facts: TensorFacts, fresh: bool) -> Any:
        """Return a torch tensor, or a storage, with the elements of `bits` and these `facts`. It is a new object if it
        has to be, or if `fresh`."""
        shares = facts.storage is not None
        tensor = _tensor(bits, facts, () if shares or not self._lay_out else facts.strides, fresh or shares)
        if shares:
            _, views = self._views.setdefault((facts.storage, tensor.device), (facts.storage_nbytes, []))
            views.append(LiveView(tensor, facts.storage_offset, facts.strides))
        if facts.attributes is not None:
            self._attributes.append((tensor, facts.attributes))
        if facts.kind != "storage":
            return tensor
        torch = sys.modules["torch"]
        typed = torch.storage.TypedStorage(wrap_storage=tensor.untyped_storage(), dtype=tensor.dtype, _internal=True)
        self._storages.append((typed, tensor))
        return typed

    def revived(self, node: Any) -> Any:
        """Return the live object that `node` stands for; `node` itself if there is none."""
        value = objects.revived(node)
        if value is not node and type(node) is Composite and "attributes" in node.parts:
            self._attributes.append((value, node.parts["attributes"]))
        return value

    @staticmethod
    def same(left: Any, right: Any) -> bool:
        """Return whether two tensors of one dtype and shape have the same bits. Tensors at one address are not read."""
        if not leaves.is_tensor(left):
            return True
        if not is_plain(left) or not is_plain(right):
            return left is right
        together = left.data_ptr() == right.data_ptr() and left.stride() == right.stride()
        return together or _equal(left, right)

    def finish(self) -> None:
        """Give tensors their attributes, and the memory that they share."""
        for tensor, attributes in self._attributes:
            vars(tensor).update(_named(attributes))
        for nbytes, views in self._views.values():
            _share(views, nbytes)
        for storage, tensor in self._storages:
            _hold(storage, tensor)


def _tensor(bits: Any, facts: TensorFacts, strides: Sequence[int], fresh: bool) -> Any:
    """Return a torch tensor with the elements of `bits` and the kind of `facts`, laid out by `strides` (elements), if
    any."""
    torch = sys.modules["torch"]
    data = bits
    if strides and strides != tuple(bits.stride()) and len(strides) == bits.dim():
        data = torch.empty_strided(bits.shape, strides, dtype=bits.dtype, device=bits.device)
        _bits(data).copy_(_bits(bits))
    requires_grad = facts.requires_grad and bool(data.is_floating_point() or data.is_complex())
    if facts.kind == "parameter":
        return torch.nn.Parameter(data.detach(), requires_grad=requires_grad)
    if facts.kind == "buffer" and hasattr(torch.nn, "Buffer"):
        data = torch.nn.Buffer(data.detach())
    elif fresh or facts.requires_grad or data.requires_grad:
        data = data.detach()
    return data.requires_grad_() if requires_grad else data


def _named(attributes: Any) -> dict[str, Any]:
    """Return a tensor's attributes by name; a subclass's state of any other form becomes the attribute "state"."""
    parts = attributes if type(attributes) is tuple and len(attributes) == 2 else (attributes,)
    named: dict[str, Any] = {}
    for part in parts:
        if type(part) is dict and all(type(name) is str for name in part):
            named |= part
        elif part is not None:
            return {"state": attributes}
    return named


def _hold(storage: Any, tensor: Any) -> None:
    """Make a flat tensor's elements those of a typed storage: its own memory, even in the middle of a larger one."""
    memory, start = tensor.untyped_storage(), tensor.storage_offset() * tensor.element_size()
    if (start, memory.nbytes()) != (0, tensor.nbytes):
        memory = memory[start : start + tensor.nbytes]
    storage._untyped_storage = memory


def _bits(tensor: Any) -> Any:
    """Return the same elements as integers: no operation on these changes a bit."""
    torch = sys.modules["torch"]
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.element_size() == 16:
        return torch.view_as_real(tensor).view(torch.int64)
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


class LiveView(NamedTuple):
    """A torch tensor, and its offset and strides in a storage (in elements)."""

    tensor: Any
    offset: int
    strides: tuple[int, ...]

    @property
    def span(self) -> tuple[int, int]:
        """The offset of the first byte it touches, and that after the last."""
        last = sum((extent - 1) * stride for extent, stride in zip(self.tensor.shape, self.strides, strict=True))
        item = self.tensor.element_size()
        return self.offset * item, (self.offset + last + 1) * item

    @property
    def place(self) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
        return self.offset, self.tensor.element_size(), self.strides, tuple(self.tensor.shape)


def _share(views: Sequence[LiveView], storage_nbytes: int) -> None:
    """Make tensors views of one storage, in place, with their values. If overlapping values disagree, do nothing.

    The storage has `storage_nbytes` bytes if the views cover at least half of it, else the span of the views. Bytes
    that no view covers are zero.
    """
    first = views[0]
    if len(views) < 2 or _lie_so_already(views):
        return
    contiguous = is_contiguous(first.tensor.shape, first.strides)
    if contiguous and all(view.place == first.place for view in views):
        if all(_equal(first.tensor, view.tensor) for view in views[1:]):
            data = first.tensor.detach().contiguous()
            for view in views:
                view.tensor.data = data.view(view.tensor.dtype)
        return
    pieces = _rebuilt(views, storage_nbytes)
    for view, piece in zip(views, pieces, strict=False):
        view.tensor.data = piece


def _lie_so_already(views: Sequence[LiveView]) -> bool:
    """Return whether the tensors already are these views, as after a tree that never left memory."""
    origins = {(v.tensor.untyped_storage().data_ptr(), v.tensor.data_ptr() - v.span[0]) for v in views}
    return len(origins) == 1 and all(tuple(view.tensor.stride()) == view.strides for view in views)


def _equal(left: Any, right: Any) -> bool:
    return bool(sys.modules["torch"].equal(_bits(left), _bits(right)))


def _rebuilt(views: Sequence[LiveView], storage_nbytes: int) -> list[Any]:
    """Return new tensors with the values of `views`, laid out in one storage; [] if that is impossible."""
    torch = sys.modules["torch"]
    spans = [view.span for view in views]
    low, high = min(low for low, _ in spans), max(high for _, high in spans)
    covered = sum(min(view.tensor.nbytes, high - low) for view, (low, high) in zip(views, spans, strict=True))
    low, high = (0, storage_nbytes) if storage_nbytes <= 2 * covered else (low - low % 16, high)
    if high - low > _SPREAD * covered + _SPARE:
        return []
    storage = torch.zeros(high - low, dtype=torch.uint8, device=views[0].tensor.device).untyped_storage()
    pieces = []
    for view in views:
        source = view.tensor.detach()
        piece = torch.empty(0, dtype=source.dtype, device=source.device).set_(
            storage, view.offset - low // source.element_size(), source.shape, view.strides
        )
        _fill(_bits(piece), _bits(source))
        pieces.append(piece)
    return pieces if all(_equal(piece, view.tensor) for piece, view in zip(pieces, views, strict=True)) else []


def _fill(target: Any, source: Any) -> None:
    """Copy `source` into `target`, whose elements may overlap."""
    torch = sys.modules["torch"]
    for dim, stride in enumerate(target.stride()):
        if stride == 0 and target.shape[dim] > 1:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    reach = 0
    overlaps = False
    for stride, extent in sorted((s, e) for s, e in zip(target.stride(), target.shape, strict=True) if e > 1):
        overlaps |= stride <= reach
        reach += (extent - 1) * stride
    if not overlaps:
        target.copy_(source)
        return
    # Overlapping windows: torch copies into such a tensor only by index.
    line = torch.as_strided(target, (reach + 1,), (1,), target.storage_offset())
    places = torch.arange(reach + 1).as_strided(target.shape, target.stride(), 0)
    line[places.reshape(-1)] = source.reshape(-1)
