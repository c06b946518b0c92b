"""A head that the base ties to the embedding of tokens, in an adapter. Pure.

transformers' files do not store such a head. If PEFT trains both as one, they stay one. If it trains the head apart, as
a module that is saved whole, the head must be stored apart, and the configuration must say so.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from ckptconv.errors import UnsupportedError
from ckptconv.features.merge.files import Adapter
from ckptconv.features.merge.peft import Module, unknown
from ckptconv.tensors.lazy import LazyTensor, same_bytes
from ckptconv.text import some

# The names of embeddings and heads in transformers' models, and the ends of the names of classes with a head.
EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in", "embed", "shared")
HEAD = "lm_head"
_HEADS = (HEAD, "embed_out")
_WITH_HEAD = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


class Base(NamedTuple):
    """A base for adapters: its path, its tensors by name, its own ties {alias: owner}, the content of the config.json
    next to it, and the key that was asked for."""

    path: str
    tensors: Mapping[str, LazyTensor]
    ties: Mapping[str, str]
    model: Mapping[str, Any]
    key: str = ""

    def place(self, name: str) -> Hashable:
        """Return a value that is equal for two names of one tensor."""
        identity = same_bytes(self.tensors.get(self.ties.get(name, name), self.tensors[name]))
        return name if identity is None else identity

    @property
    def ties_head(self) -> bool | None:
        """Whether the model has a head that is tied to the embedding; None if that is unknown."""
        text = self.model.get("text_config")
        for config in (self.model, text if isinstance(text, Mapping) else {}):
            if type(ties := config.get("tie_word_embeddings")) is bool:
                return ties
        classes = self.model.get("architectures")
        named = classes if isinstance(classes, list) else []
        return True if any(isinstance(cls, str) and cls.endswith(_WITH_HEAD) for cls in named) else None

    def embedding(self, called: str = "") -> str:
        """Return the name of the weight of its embedding of tokens, "" if there is none; `called` is the last part of
        its module's name, if known. Raise UnsupportedError if there are several, and a head may be tied to one of
        them."""
        names = (called,) if called else EMBEDDINGS
        known = [name for name in self.tensors if name.endswith(".weight") and module_of(name) in names]
        if len({self.place(name) for name in known}) > 1:
            if self.ties_head is False:
                return ""
            raise UnsupportedError(
                f"{self.path} has several embeddings, {some(known)}, and does not specify to which of them the head is "
                "tied."
            )
        return known[0] if known else ""


def moves_head(base: Base, adapter: Adapter, modules: Mapping[str, Module]) -> str:
    """Return the name of the embedding if its factors alone were trained, and change a tied head too; else ""."""
    name = next((name for name in modules if name.rpartition(".")[2] in EMBEDDINGS), "")
    owner, embedding = modules.get(name, Module()), base.embedding(name.rpartition(".")[2]) if name else ""
    others = [name for name in base.tensors if name != embedding and module_of(name) in _HEADS]
    is_stored = embedding and any(base.place(name) == base.place(embedding) for name in others)
    is_tied = is_stored or (base.ties_head is True and not others)
    return embedding if owner.factors and is_tied and not adapter.tied else ""


class Head(NamedTuple):
    """A head to store apart from the embedding that the base ties it to. `is_new`: the base does not store it."""

    name: str
    embedding: str
    is_new: bool


def module_of(name: str) -> str:
    """Return the last part of the name of the module of a parameter."""
    return name.rpartition(".")[0].rpartition(".")[2]


def is_saved(adapter: Adapter, module: str) -> bool:
    """Return whether the adapter's configuration lists `module`, or a module that contains it, as trained whole."""
    return any(f".{saved_end}." in f".{module}." for saved_end in adapter.saved)


def rows_of(adapter: Adapter, module: str) -> tuple[int, ...] | None:
    """Return the trained rows of `module`; None if the configuration does not mention it."""
    matching = (rows for end, rows in adapter.tokens.items() if end and f".{module}".endswith(f".{end}"))
    return next(matching, adapter.tokens.get(""))


def untied(base: Base, adapter: Adapter, modules: Mapping[str, Module]) -> tuple[Mapping[str, Module], Head | None]:
    """Return the `modules` of an adapter without a head that is one with the embedding; and the head to store apart.

    Raise UnsupportedError if it is unknown whether there is a head, and for factors of a head alone.
    """
    owner = next((name for name in modules if name.rpartition(".")[2] in EMBEDDINGS), "")
    head = next((name for name in modules if name.rpartition(".")[2] == HEAD), "")
    embedding = base.embedding(owner.rpartition(".")[2]) if owner or head else ""
    if not embedding:
        return modules, None
    others = [name for name in base.tensors if name != embedding and module_of(name) in _HEADS]
    alias = next((name for name in others if base.place(name) == base.place(embedding)), "")
    if not alias and (others or base.ties_head is False):
        return modules, None
    if head and _is_one(adapter, modules, owner, head):
        if not owner:
            raise unknown(adapter.source.path, head, "it is tied to the embedding, but was trained separately")
        return {name: parts for name, parts in modules.items() if name != head}, None
    if head and modules[head].factors:
        raise unknown(
            adapter.source.path,
            head,
            "the base ties it to the embedding, but it was trained separately. Use PEFT's ensure_weight_tying to train "
            "both as one tensor",
        )
    is_copy = bool(owner and modules[owner].whole) and is_saved(adapter, owner) and not adapter.tied
    if not head and not is_copy:
        return modules, None
    if not alias and not head and base.ties_head is None:
        raise UnsupportedError(
            f"{adapter.source.path} has a trained copy of {embedding!r}, and it is not known whether {base.path} ties "
            "the head to this embedding. The head would stay unchanged.",
            "Copy the config.json of the model next to the base.",
        )
    begin = "language_model." if embedding.startswith("language_model.model.") else ""
    return modules, Head(alias or f"{begin}{HEAD}.weight", embedding, not alias)


def _is_one(adapter: Adapter, modules: Mapping[str, Module], owner: str, head: str) -> bool:
    """Return whether the embedding and the head were trained as one tensor: by the configuration, or because both are
    frozen or have the same rows."""
    if adapter.tied:
        return True
    parts, others = modules[head], modules.get(owner, Module())
    if parts.factors or not owner:
        return False
    if parts.rows is not None and others.rows is not None and not parts.whole:
        return rows_of(adapter, owner) == rows_of(adapter, head)
    is_frozen = bool(parts.whole) and parts.rows is None and not is_saved(adapter, head)
    return is_frozen and not (others.whole and is_saved(adapter, owner))
