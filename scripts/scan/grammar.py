"""Makes the productions in ckptconv/features/scan/grammar/made.txt from the libraries themselves.

    python scripts/scan/grammar.py LIBRARY …     writes the sections of these libraries anew (of all it knows: no name)
    python scripts/scan/grammar.py --older …     writes what only these older releases have, in sections of their own
    python scripts/scan/grammar.py --check …     changes nothing; exit code 1 if a section differs from its library

A class gets a production if nothing but its attributes comes from the pickle: pickling it is Python's own, no code of
the class runs when it is loaded, or only a `__setstate__` that was reviewed here. An object of each class is pickled,
and what is written compared with the production. Productions that need arguments are in reviewed.txt, by hand.
Run it with a Python that has the libraries: a section of one that it lacks stays as it is.
"""

from __future__ import annotations

import argparse
import enum
import importlib
import inspect
import io
import os
import pickle
import pickletools
import pkgutil
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

ROOT = Path(__file__).resolve().parents[2]
REVIEWED, MADE = (ROOT / "ckptconv" / "features" / "scan" / "grammar" / name for name in ("reviewed.txt", "made.txt"))
# By distribution: the packages whose classes are listed.
LIBRARIES = {
    "accelerate": "accelerate.utils accelerate.state",
    "catboost": "catboost",
    "gensim": "gensim",
    "imbalanced-learn": "imblearn",
    "diffusers": "diffusers.schedulers diffusers.configuration_utils diffusers.models.autoencoders "
    "diffusers.models.unets diffusers.models.resnet diffusers.models.attention diffusers.models.attention_processor "
    "diffusers.models.embeddings diffusers.models.downsampling diffusers.models.upsampling",
    "lightgbm": "lightgbm",
    "lightning": "lightning.pytorch.utilities lightning.fabric.utilities lightning.pytorch.callbacks",
    "mmengine": "mmengine.logging",
    "nltk": "nltk.probability nltk.classify nltk.tag nltk.tokenize nltk.stem",
    "numpy": "numpy.polynomial",
    "omegaconf": "omegaconf",
    "pandas": "pandas._libs.tslibs.offsets pandas.core pandas.arrays",
    "patsy": "patsy",
    "peft": "peft.tuners peft.config peft.utils peft.peft_model peft.mixed_model",
    "pytorch-lightning": "pytorch_lightning.utilities pytorch_lightning.callbacks",
    "scikit-learn": "sklearn",
    "scipy": "scipy.sparse scipy.stats scipy.interpolate scipy.spatial scipy.optimize scipy.signal",
    "sentence-transformers": "sentence_transformers.training_args sentence_transformers.models "
    "sentence_transformers.readers sentence_transformers.cross_encoder.training_args "
    "sentence_transformers.base.modules sentence_transformers.base.sampler "
    "sentence_transformers.sentence_transformer.modules sentence_transformers.sentence_transformer.training_args",
    "statsmodels": "statsmodels",
    "stable-baselines3": "stable_baselines3",
    "gymnasium": "gymnasium.spaces",
    "torch": "torch.nn torch.optim torch.distributed.checkpoint torch.distributed.tensor torch.distributed._shard "
    "torch.distributed.device_mesh torch.utils.data torch.ao.quantization torch.ao.nn torch.distributions",
    "torch-geometric": "torch_geometric.data torch_geometric.nn.conv torch_geometric.nn.dense torch_geometric.nn.aggr",
    "torchao": "torchao.quantization torchao.dtypes torchao.float8 torchao.prototype.mx_formats torchao.optim",
    "torchmetrics": "torchmetrics",
    "transformers": "transformers.training_args transformers.training_args_seq2seq transformers.trainer_utils "
    "transformers.trainer_callback transformers.trainer_pt_utils transformers.generation.configuration_utils "
    "transformers.configuration_utils transformers.debug_utils transformers.hyperparameter_search transformers.models "
    "transformers.activations transformers.pytorch_utils transformers.utils.quantization_config "
    "transformers.modeling_outputs transformers.data.data_collator transformers.optimization transformers.cache_utils "
    "transformers.tokenization_utils_base transformers.tokenization_utils_fast transformers.tokenization_utils "
    "transformers.feature_extraction_utils transformers.image_processing_base",
    "trl": "trl.trainer",
    # Other modules of its networks install packages when they are imported.
    "ultralytics": "ultralytics.nn.modules ultralytics.nn.tasks ultralytics.utils",
    "xgboost-cpu": "xgboost",
}
# The models of transformers of which whole objects are saved, not states alone.
MODELS = frozenset(
    [
        "albert",
        "bart",
        "bert",
        "clip",
        "deberta",
        "deberta_v2",
        "distilbert",
        "electra",
        "gpt2",
        "llama",
        "mistral",
        "qwen2",
        "roberta",
        "t5",
        "vit",
        "whisper",
        "xlm_roberta",
    ]
)
# Methods that loading a pickle runs, each reviewed: a pattern that bounds what they use of the state. All else becomes
# attributes.
SETTERS = {
    # It compares the version with its own, and warns.
    "sklearn.base.BaseEstimator.__setstate__": "{'_sklearn_version?': text, **held}",
    # It ignores the state.
    "sklearn.utils._bunch.Bunch.__setstate__": "object",
    # A formula is evaluated.
    "statsmodels.base.data.ModelData.__setstate__": "model_data",
    "statsmodels.base.wrapper.ResultsWrapper.__setstate__": "documented",
    # They take what an older release wrote by its new name.
    "gymnasium.spaces.space.Space.__setstate__": "object",
    "gymnasium.spaces.discrete.Discrete.__setstate__": "object",
    "gymnasium.spaces.multi_discrete.MultiDiscrete.__setstate__": "discretes",
    "gymnasium.spaces.box.Box.__setstate__": "box",
    "stable_baselines3.common.vec_env.vec_normalize.VecNormalize.__setstate__": "object",
    "statsmodels.discrete.discrete_model.NegativeBinomial.__setstate__": "{'_initialize?': nothing, **held}",
    "transformers.tokenization_utils_base.BatchEncoding.__setstate__": "object",
    "transformers.feature_extraction_utils.BatchFeature.__setstate__": "object",
    # Text of a template is compiled.
    "scipy.stats._distn_infrastructure.rv_generic.__setstate__": "rv",
    "numpy.polynomial._polybase.ABCPolyBase.__setstate__": "object",
    "torchmetrics.metric.Metric.__setstate__": "metric",
    "torch.nn.modules.module.Module.__setstate__": "object",
    "torch.nn.modules.activation.MultiheadAttention.__setstate__": "object",
    "torch.nn.modules.activation.GELU.__setstate__": "object",
    "torch.nn.modules.activation.Softmax.__setstate__": "object",
    "torch.nn.modules.activation.Softmin.__setstate__": "object",
    "torch.nn.modules.activation.LogSoftmax.__setstate__": "object",
    "torch.nn.modules.pooling.AvgPool3d.__setstate__": "object",
    "torch.nn.modules.transformer.TransformerEncoderLayer.__setstate__": "object",
    "torch.nn.modules.transformer.TransformerDecoderLayer.__setstate__": "object",
    "torch.nn.modules.conv._ConvNd.__setstate__": "object",
    "torch.nn.modules.batchnorm._NormBase.__setstate__": "object",
    # They walk over layers, weights and their names.
    "torch.nn.modules.upsampling.Upsample.__setstate__": "object",
    "torch.nn.modules.rnn.RNNBase.__setstate__": "rnn",
    "torch.nn.modules.container.ParameterDict.__setstate__": "object",
    "torch.nn.modules.padding._ConstantPadNd.__setstate__": "object",
    # They ask param_groups and defaults for what older releases lack, and convert steps to tensors.
    **{
        f"torch.optim.{module}.__setstate__": "optimizer"
        for module in [
            "adadelta.Adadelta",
            "adagrad.Adagrad",
            "adam.Adam",
            "adamax.Adamax",
            "adamw.AdamW",
            "asgd.ASGD",
            "nadam.NAdam",
            "optimizer.Optimizer",
            "radam.RAdam",
            "rmsprop.RMSprop",
            "rprop.Rprop",
            "sgd.SGD",
            "lbfgs.LBFGS",
            "_muon.Muon",
            "_adafactor.Adafactor",
        ]
    },
}
# Attributes by which loading, or dropping an object again, may run code of its class.
RUNNING = ("__reduce__", "__reduce_ex__", "__del__", "__getattribute__", "__getnewargs__", "__getnewargs_ex__")
_BUILT_IN = (object, dict, list, str, int, tuple)
_SKIPPED = re.compile(r"(^|\.)(tests?|testing|conftest|_examples|examples|benchmarks|__main__|setup|cli|onnx)(\.|$)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="*", metavar="LIBRARY")
    parser.add_argument("--check", action="store_true")
    parser.add_argument(
        "--older", action="store_true", help="write sections of older releases, beside those of the newest"
    )
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    sections = parsed(MADE.read_text()) if MADE.exists() else {}
    by_hand = [line for line in REVIEWED.read_text().splitlines() if line[:1] not in ("#", "=", "")]
    differing = []
    for library in asked.libraries or LIBRARIES:
        try:
            release = version(library)
        except Exception:
            continue
        if asked.check and (library, release) not in sections:
            print(f"{library} {release} has no section")
            continue
        newest = newest_of(library, sections)
        is_older = newest is not None and newest != release and asked.older
        listed = classes(LIBRARIES[library].split())
        lines = list(productions(library, listed))
        if is_older:
            others = [each for key, each in sections.items() if key != (library, release)]
            lines = without(lines, {name for each in [*others, by_hand] for name in names_in(each)})
        else:
            # What this release has and does not list, a `__setstate__` may make unsafe that an older one lacks.
            has = {(cls.__module__, cls.__qualname__) for cls in listed}
            for key in [key for key in sections if key[0] == library and key[1] not in (release, newest)]:
                sections[key] = without(sections[key], has)
        if not lines:
            continue
        if sections.get((library, release)) != lines:
            differing.append(f"{library} {release}")
            if newest is not None and not is_older:
                sections.pop((library, newest), None)
            sections[library, release] = lines
    if asked.check:
        print("\n".join(f"{each} writes other pickles than made.txt says" for each in differing))
        return bool(differing)
    text = "\n\n".join(
        "\n".join((f"# {library} {release}", *lines)) for (library, release), lines in sorted(sections.items()) if lines
    )
    MADE.write_text(f"# Made by scripts/scan/grammar.py. `table.py` describes the notation.\n\n{text}\n")
    return 0


Sections: TypeAlias = dict[tuple[str, str], list[str]]


def parsed(text: str) -> Sections:
    """The productions of the table by library and release."""
    sections = {}
    for part in text.strip().split("\n\n")[1:]:
        head, *lines = part.split("\n")
        _, library, release = head.split()
        sections[library, release] = lines
    return sections


def newest_of(library: str, sections: Sections) -> str | None:
    """The newest release of a library in the table: that of its main section."""
    releases = [release for each, release in sections if each == library]
    return max(releases, key=lambda release: [int(part) for part in re.findall(r"\d+", release)], default=None)


def names_in(lines: list[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        modules, *names = line.partition(": ")[0].split()
        yield from ((module, name) for module in modules.split(",") for name in names)


def without(lines: list[str], known: set[tuple[str, str]]) -> list[str]:
    """The lines without the names that are `known`."""
    left = []
    for line in lines:
        head, _, production = line.partition(": ")
        module, *names = head.split()
        names = [name for name in names if (module, name) not in known]
        if names:
            left.append(f"{module} {' '.join(names)}: {production}")
    return left


def productions(library: str, listed: list[type] | None = None) -> Iterator[str]:
    """The lines of a library: for each module, the classes of one production each."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for cls in listed if listed is not None else classes(LIBRARIES[library].split()):
        production = production_of(cls)
        if production:
            found[cls.__module__, production].add(cls.__qualname__)
    yield from sorted(
        f"{module} {' '.join(sorted(names))}: {production}" for (module, production), names in found.items()
    )


def classes(packages: list[str]) -> list[type]:
    """The classes that the modules of these packages define, and that a pickle may name."""
    found: dict[tuple[str, str], type] = {}
    for package in packages:
        for name in modules(package):
            try:
                with open(os.devnull, "w") as nowhere:
                    sys.stdout, kept = nowhere, sys.stdout
                    try:
                        module = importlib.import_module(name)
                    finally:
                        sys.stdout = kept
            except BaseException:
                continue
            for value in list(vars(module).values()):
                if isinstance(value, type) and value.__module__ == name:
                    found[name, value.__qualname__] = value
    return [found[key] for key in sorted(found) if resolves(found[key])]


def modules(package: str) -> Iterator[str]:
    yield package
    try:
        root = importlib.import_module(package)
    except BaseException:
        return
    for info in pkgutil.walk_packages(getattr(root, "__path__", ()), f"{package}.", onerror=lambda name: None):
        if not _SKIPPED.search(info.name) and (package != "transformers.models" or _of_models(info.name)):
            yield info.name


def _of_models(name: str) -> bool:
    """Whether a module of transformers' models is listed: those of all configurations, and a few models whole."""
    _, _, family, module = (*name.split("."), "", "")[:4]
    kind = module.partition("_")[0]
    return (
        name.count(".") < 3
        or kind in ("configuration", "feature", "generation")
        or (kind == "modeling" and family in MODELS)
    )


def resolves(cls: type) -> bool:
    value: Any = sys.modules[cls.__module__]
    for step in cls.__qualname__.split("."):
        value = getattr(value, step, None)
    return value is cls


def owner_of(cls: type, attribute: str) -> type:
    return next(base for base in cls.__mro__ if attribute in vars(base))


def production_of(cls: type) -> str:
    """The production of a class; "" if more than its attributes comes from the pickle."""
    if issubclass(cls, enum.Enum):
        return enumeration(cls)
    if issubclass(cls, BaseException):
        return ""
    if library_of(cls) == "transformers" and any(base.__name__ == "ModelOutput" for base in cls.__mro__):
        return "call(*output, state=object, items=(key, output)) | new(state=object, items=(key, output))"
    if is_bunch(cls):
        return "new(*data, state=object)"
    if any(owner_of(cls, name) not in (object, dict, list) for name in RUNNING if runs(cls, name)):
        return ""
    if is_named_tuple(cls):
        return f"new({', '.join(['any'] * len(cls._fields))})"  # type: ignore[attr-defined]
    added = ""
    if issubclass(cls, dict):
        if owner_of(cls, "__setitem__") not in (dict,) or owner_of(cls, "__new__") is not dict:
            return ""
        added = ", items=(any, any)"
    elif issubclass(cls, list):
        if owner_of(cls, "append") is not list or owner_of(cls, "extend") is not list:
            return ""
        added = ", append=any"
    makes = owner_of(cls, "__new__")
    if makes not in (object, dict, list) and makes.__name__ not in ("Generic", "Protocol"):
        return ""
    state = state_of(cls)
    if not state:
        return ""
    if state in ("object", "slots") and not pickles_so(cls, state):
        return ""
    state = guarded(state, called_methods(cls))
    # Metrics write the letters of their names as arguments that nothing reads.
    args = "*text, " if library_of(cls) == "torchmetrics" else ""
    return f"new({args}state={state}{added})"


def runs(cls: type, name: str) -> bool:
    """Whether a method of a class counts that loading an object may run; of these libraries some were reviewed."""
    if name == "__getattribute__" and library_of(cls) in ("transformers", "statsmodels"):
        return False
    if name == "__getnewargs__" and (is_named_tuple(cls) or library_of(cls) == "torchmetrics"):
        return False
    return hasattr(cls, name)


def called_methods(cls: type) -> list[str]:
    """The methods of a class that hashing and comparing call, as a dict does with its keys: an attribute of that name
    would be called instead."""
    if getattr(cls, "__hash__", None) is None:
        return []
    todo = [
        vars(owner_of(cls, name)).get(name) for name in ("__hash__", "__eq__") if owner_of(cls, name) not in _BUILT_IN
    ]
    methods: set[str] = set()
    while todo:
        code = getattr(inspect.unwrap(todo.pop() or int), "__code__", None)
        for name in code.co_names if code else ():
            method = inspect.getattr_static(cls, name, None)
            if name not in methods and not name.startswith("__") and inspect.isfunction(method):
                methods.add(name)
                todo.append(method)
    return sorted(methods)


def guarded(state: str, methods: list[str]) -> str:
    """The pattern of a state that has no attribute of these names."""
    if not methods or state != "object":
        return state
    return "{" + ", ".join(f"'{name}?': nothing" for name in methods) + ", **held}"


def bare(cls: Any) -> Any:
    """An object of a class without attributes, as NEWOBJ makes it."""
    return cls.__new__(cls)


def library_of(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def is_named_tuple(cls: type) -> bool:
    return (
        issubclass(cls, tuple)
        and hasattr(cls, "_fields")
        and cls.__new__.__qualname__ in ("__new__", f"{cls.__name__}.__new__")
        and "_make" in dir(cls)
        and owner_of(cls, "__new__").__new__.__code__.co_filename.startswith("<")
    )


def is_bunch(cls: type) -> bool:
    """Whether scipy made a class of results: a named tuple with further attributes, which it pickles as keywords."""
    return issubclass(cls, tuple) and hasattr(cls, "_extra_fields") and library_of(cls) == "scipy"


def state_of(cls: type) -> str:
    """The pattern of an object's state."""
    if any(base.__name__ == "BaseMaskedArray" for base in cls.__mro__):
        # Blocks ask it for its dtype, which its other attributes decide.
        return "masked"
    if hasattr(cls, "__setstate__"):
        setter = inspect.unwrap(cls.__setstate__)
        name = f"{getattr(setter, '__module__', '')}.{getattr(setter, '__qualname__', '')}"
        return SETTERS.get(name, "")
    if hasattr(cls, "__getattr__"):
        # Unpicklers ask for `__setstate__`.
        try:
            if getattr(bare(cls), "__setstate__", None) is not None:
                return ""
        except Exception:
            return ""
    told: list[Any] = [vars(base).get("__slots__", ()) for base in cls.__mro__]
    names = {name for each in told for name in ([each] if isinstance(each, str) else each)}
    slots = sorted(names - {"__dict__", "__weakref__"})
    if not slots:
        return "object"
    if owner_of(cls, "__setattr__") is not object or any(name.startswith("__") for name in slots):
        return ""
    own = "{" + ", ".join(f"'{name}?': any" for name in slots) + "}"
    return f"(object | None, {own})"


def enumeration(cls: type[enum.Enum]) -> str:
    """The production of an enumeration: a call with the value of a member."""
    if cls.__new__ is not enum.Enum.__new__:
        return ""
    values = []
    for member in cls:
        written = member.__reduce_ex__(2)
        if written[:2] == (cls, (member.value,)) and type(member.value) in (str, int, bool):
            values.append(repr(member.value))
    if not values or len(values) > 200 or not resolves(cls):
        return ""
    kinds = " | ".join(dict.fromkeys(values))
    return f"call({kinds}) | value | data"


def pickles_so(cls: type, state: str) -> bool:
    """Whether pickling an object of a class writes what the production says."""
    try:
        made = bare(cls)
        if hasattr(made, "__dict__"):
            vars(made)["attribute"] = 1
    except Exception:
        return False
    try:
        data = pickle.dumps(made, 2)
    except Exception:
        return True
    names = [opcode.name for opcode, _, _ in pickletools.genops(io.BytesIO(data))]
    return "REDUCE" not in names[:6] and names[1:4] == ["GLOBAL", "BINPUT", "EMPTY_TUPLE"] and names[4] == "NEWOBJ"


if __name__ == "__main__":
    sys.exit(main())
