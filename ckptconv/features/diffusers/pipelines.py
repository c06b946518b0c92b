"""Pipelines of diffusers and of sentence-transformers: directories of several models, each in a folder of its own, and
files that belong to them.

Sources: diffusers' `pipelines/pipeline_utils.py`; sentence-transformers' `SentenceTransformer.py` and
`models/Router.py`. model_index.json is an object of components by name, such as
{"unet": ["diffusers", "UNet2DConditionModel"]}: a folder of that name has what the class's `from_pretrained` reads.
Names that begin with _ describe the pipeline, [null, null] is a component that it lacks, and other values are settings.

modules.json is a list of modules, such as {"path": "2_Dense", "type": "sentence_transformers.models.Dense"}: a folder
has the module's configuration and weights, and "" is the directory itself. The types that router_config.json in a
folder names are folders of modules in that.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from ckptconv.errors import CorruptError, UnsupportedError, UsageError
from ckptconv.features.configs import configs
from ckptconv.formats import model_files
from ckptconv.formats.source import PIPELINE, FileFacts, Source
from ckptconv.storage import strict_json
from ckptconv.storage.inside import check_inside
from ckptconv.storage.location import Location
from ckptconv.storage.paths import join
from ckptconv.structure import keymap
from ckptconv.tensors.moves import File
from ckptconv.text import some

_INDEX, MODULES, _ROUTER = "model_index.json", "modules.json", "router_config.json"
# The largest list of modules that is read, in bytes.
_LARGEST = 1 << 20
# The ends of the names of classes that are not models: they have only settings.
_OF_SETTINGS = ("Tokenizer", "Scheduler", "Processor", "FeatureExtractor")
# The end of the name of the class of modules without files, which may have no folder.
_WITHOUT_FILES = "Normalize"


class Pipeline(NamedTuple):
    """The parts of a pipeline: the folders of its models, "" for the pipeline's own, and the sources of other files, in
    folders or of the pipeline's own."""

    models: Sequence[str]
    others: Sequence[Source]


def is_one(place: Location, family: str = "", *, copies: bool = True) -> bool:
    """Return whether `place` is the directory of a pipeline, and a pipeline fits the expected `family`. A directory
    with a single model is a pipeline only if its other files are copied too."""
    if place.kind != "directory":
        return False
    if _INDEX in place.names:
        return family in ("", PIPELINE)
    # Here the pipeline's own manifest names the family of a model.
    return MODULES in place.names and (copies or len(_models(place, folders(place))) > 1)


def read(place: Location) -> Pipeline:
    """Return the parts of the pipeline at `place`. Raise CorruptError if a component is missing."""
    if _INDEX in place.names:
        return _of_diffusers(place)
    module_folders = folders(place)
    models = _models(place, module_folders)
    others_names = [name for name in dict.fromkeys(("", *module_folders)) if name not in models]
    others = [
        _files(place.join(name) if name else place, name, "a model of sentence-transformers") for name in others_names
    ]
    return Pipeline(models, others)


def together(place: Location, sources: Sequence[Source]) -> Source:
    """Return the parts of the pipeline at `place` as one source, to be inspected: the name of each tensor begins with
    that of its folder."""
    weights: dict[str, Any] = {}
    inputs: dict[str, Hashable] = {}
    for source in sources:
        before = f"{source.component}/" if source.component else ""
        tensors = keymap.flatten(source.weights)[0] if source.structured else source.weights
        weights.update((before + name, tensor) for name, tensor in tensors.items())
        inputs.update((before + name, file) for name, file in source.inputs.items())
    formats = dict.fromkeys(source.format for source in sources if source.is_model)
    return Source(
        f"a pipeline of {some(formats, form=str)}",
        PIPELINE,
        place.path,
        weights,
        structured=False,
        facts={"models": len([source for source in sources if source.is_model])},
        inputs=inputs,
        files=FileFacts.of_all(source.files for source in sources),
        notes=[f"{source.path}: {note}" for source in sources for note in source.notes],
        warnings=[f"{source.path}: {text}" for source in sources for text in source.warnings],
        bytes_read=sum(source.bytes_read for source in sources),
    )


def hint(place: Location) -> str:
    """Return a sentence on what to do with the pipeline at `place` if one model is needed."""
    models = [str(place.join(name)) for name in read(place).models]
    sentence = "It is a diffusers pipeline of several models, which only convert and verify accept as a whole"
    return f"{sentence}. Specify one of them: {some(models, form=str)}"


def check_copied(source: Source, files: Mapping[str, File], options: Mapping[str, object]) -> None:
    """Raise UsageError if the file that names the modules of sentence-transformers is copied without them."""
    if MODULES not in files:
        return
    place = Location(files[MODULES].path, dict(options)).parent
    if inner := [name for name in folders(place) if name]:
        raise UsageError(
            f"{source.path} is one module of a sentence-transformers model, whose modules.json lists other modules, "
            f"in {some(inner, form=str)}. A copy without them would be incomplete.",
            "Convert the whole directory. Or use --no-copy-config, and replace the weights in a copy of the "
            "directory with the output.",
        )


def folders(place: Location) -> list[str]:
    """Return the folders of the modules of sentence-transformers. Raise CorruptError if one is missing."""
    modules = _modules_in(place.join(MODULES))
    names = []
    for module in modules:
        folder = module["path"]
        if folder:
            check_inside(folder, place.join(MODULES).path, place.path)
        inner = place.join(folder) if folder else place
        if inner.kind != "directory":
            if module["type"].endswith(_WITHOUT_FILES):
                continue
            raise CorruptError(
                f"{place.join(MODULES)} lists a module in {folder!r}, but that folder does not exist.",
                "Download or copy the folder again.",
            )
        names.append(folder)
        if _ROUTER in inner.names:
            types = configs.read(inner.join(_ROUTER)).get("types")
            for name in types if isinstance(types, Mapping) else ():
                check_inside(name, inner.join(_ROUTER).path, inner.path)
                names += [join(folder, name) if folder else name] if inner.join(name).kind == "directory" else []
    return list(dict.fromkeys(names))


def _modules_in(place: Location) -> list[dict[str, Any]]:
    """Return the modules that the file at `place` lists. Raise CorruptError if it is no such list."""
    try:
        modules = strict_json.list_of(strict_json.parse(place.read_text(_LARGEST), constants=True), "it")
        for number, module in enumerate(modules):
            for key in ("path", "type"):
                strict_json.check(strict_json.object_of(module, str(number)).get(key), str, f"{number}.{key}")
    except ValueError as error:
        raise CorruptError(f"{place.path} is not a valid configuration: {error}.") from error
    return modules


def cast_warnings(source: Source, dtype: str, options: Mapping[str, object]) -> list[str]:
    """Return a warning if a module of a Router that is not a Transformer is cast to `dtype`. sentence-transformers
    gives several modules the dtype of the first one, but not within a Router."""
    is_transformer = source.config is None or "model_type" in source.config
    if source.component is None or not source.is_model or is_transformer or dtype in ("", "float32"):
        return []
    place = Location(source.path, dict(options))
    types = (configs.known(place.parent.join(_ROUTER)) or {}).get("types")
    if not isinstance(types, Mapping) or place.name not in types:
        return []
    warning = (
        f"sentence-transformers loads {source.component} in float32, whatever its stored dtype, but the Transformer "
        f"in {dtype}, because both belong to a Router. After loading, cast the model to one dtype: "
        f"model.to(torch.{dtype})."
    )
    return [warning]


def _models(place: Location, names: Sequence[str]) -> list[str]:
    return [name for name in names if model_files.holds_whole((place.join(name) if name else place).names)]


def _of_diffusers(place: Location) -> Pipeline:
    classes = _classes(configs.read(place.join(_INDEX)))
    lacking = [name for name in classes if name not in place.names or place.names[name].kind != "directory"]
    if lacking:
        raise CorruptError(
            f"{place.join(_INDEX)} lists {some(classes)}, but the folders {some(lacking)} do not exist.",
            "Download or copy the folders again.",
        )
    models = [name for name in classes if model_files.holds_whole(place.join(name).names)]
    for name, of in classes.items():
        if name not in models and not of.removesuffix("Fast").endswith(_OF_SETTINGS):
            raise UnsupportedError(
                f"{place.join(name)} is a folder for a {of}, but contains no weights with a known name. It contains "
                f"{some(sorted(place.join(name).names), form=str)}.",
                "Copy the weights there: .bin files or safetensors.",
            )
    others = [_files(place.join(name), name) for name in classes if name not in models]
    return Pipeline(models, [_files(place, ""), *others])


def _classes(index: Mapping[str, Any]) -> dict[str, str]:
    """Return the class of each component."""
    return {
        name: str(value[1])
        for name, value in index.items()
        if not name.startswith("_") and isinstance(value, list) and len(value) == 2 and value[1] is not None
    }


def _files(place: Location, component: str, called: str = "a diffusers pipeline") -> Source:
    """Return a source without a model, whose companions are copied."""
    return Source(called, PIPELINE, place.path, {}, structured=False, part=component)
