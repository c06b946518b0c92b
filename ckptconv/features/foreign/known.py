"""Files, archives and directories that are no checkpoint, or one that is not read. First bytes, members and names show
which they are. Each row of the tables has a hint at a program that turns the data into a checkpoint that is read. Pure.

Source: onnx/onnx.proto; flax/serialization.py; mindspore/train/serialization.py and its checkpoint.proto; tensorizer's
serialization.py; of ExecuTorch extension/flat_tensor/serialize, where flat_tensor.fbs has the identifier FT01, which
flatbuffers put at byte 4, and flat_tensor_header.h the FH01 that follows it, and schema/program.fbs;
huggingface_hub/serialization/_dduf.py; paddle/distributed/flex_checkpoint; tensorflow/core/util/tensor_bundle, and
cc/saved_model/constants.h, of whose saved_model.pb or .pbtxt proto_splitter makes a .cpb.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from itertools import islice

from ckptconv.errors import CkptconvError, CorruptError, UnsupportedError, UsageError, damaged
from ckptconv.formats.run_names import MAX_TAG, POINTERS
from ckptconv.formats.torch.container import begins_as_pickle, plain_pickle
from ckptconv.storage.location import Location
from ckptconv.storage.paths import basename, dirname, is_quoted

_CORRUPT, _UNSUPPORTED = CorruptError, UnsupportedError
_AGAIN = "Download it again, and check the server's response."
_PAGE = "is a web page, not a checkpoint."
_AT_ADDRESS = f"The address of a directory must end in /. If it is a file, {_AGAIN[0].lower()}{_AGAIN[1:]}"
_UNPACK = "Unpack it first."
_PIPED = "Unpack it first, or pipe it: {} FILE | ckptconv convert - OUTPUT."
_NAME_ONE = (
    f"{_PIPED} To convert one file of a tar archive called .tar.gz, .tar.bz2 or .tar.xz, specify it: tar://NAME::FILE"
)
# Compressed tar archives that are read where they are.
_TARS = (".tar.gz", ".tar.bz2", ".tar.xz")
_OTHERS = "ckptconv reads files of PyTorch, DeepSpeed and safetensors."
_ARRAYS = "Load it with numpy.load, and write its arrays with safetensors.numpy.save_file."
_KERAS = "Load it in Keras, and write the arrays of get_weights, with their names, with safetensors.numpy.save_file."
_TF = "Read it with tf.train.load_checkpoint, and write its arrays with safetensors.numpy.save_file."
_FLAX = "Load it with flax.serialization.msgpack_restore, flatten it with flax.traverse_util.flatten_dict(d, sep='.'), "
_FLAX += "and write it with safetensors.flax.save_file."
_PADDLE = "Load it with paddle.distributed.load_state_dict, and save it as safetensors, as PaddleFormers does."
_OF_RANKS = 'Only vLLM and SGLang load it, with load_format="sharded_state". Convert the original model instead.'
_FOR_DEVICES = "It was exported from a model for use on devices. Convert the original model instead."
_BESIDE = "Specify the other file, which has the same name without the leading ._"
_EXPORTED = "Load it with torch.export.load, and save its state_dict with torch.save."
# The most directories of a level that are searched.
_LOOKED_AT = 50
# First bytes of foreign files: the error, a description of the file, the hint.
_BEGINNINGS: tuple[tuple[bytes, type[CkptconvError], str, str], ...] = (
    (
        b"version https://git-lfs",
        _CORRUPT,
        "is a git-lfs pointer, not the file itself.",
        "Fetch the file: git lfs pull.",
    ),
    (b"<!doctype html", _CORRUPT, _PAGE, _AGAIN),
    (b"<html", _CORRUPT, _PAGE, _AGAIN),
    (b"<?xml", _CORRUPT, "is an XML document, not a checkpoint.", _AGAIN),
    (b"\x1f\x8b", _UNSUPPORTED, "is compressed with gzip.", _NAME_ONE.format("zcat")),
    (b"\x28\xb5\x2f\xfd", _UNSUPPORTED, "is compressed with zstandard.", _PIPED.format("zstdcat")),
    (b"BZh", _UNSUPPORTED, "is compressed with bzip2.", _NAME_ONE.format("bzcat")),
    (b"\xfd7zXZ\0", _UNSUPPORTED, "is compressed with xz.", _NAME_ONE.format("xzcat")),
    (b"7z\xbc\xaf\x27\x1c", _UNSUPPORTED, "is a 7z archive.", _UNPACK),
    (b"\x89HDF\r\n\x1a\n", _UNSUPPORTED, "is an HDF5 file, such as Keras writes.", _KERAS),
    (b"PYTORCH1", _UNSUPPORTED, "is a TorchScript archive of torch 1.0, which is not a zip archive.", _OTHERS),
    (
        b"GGUF",
        _UNSUPPORTED,
        "is a GGUF file.",
        "transformers reads many: AutoModelForCausalLM.from_pretrained(DIR, gguf_file=NAME).save_pretrained(OUTPUT).",
    ),
    (b"\x93NUMPY", _UNSUPPORTED, "is a numpy array (.npy).", _ARRAYS),
    (
        b"|TZR|",
        _UNSUPPORTED,
        "is a tensorizer file.",
        "Load it with tensorizer.TensorDeserializer, and write its tensors with safetensors.torch.save_file.",
    ),
    (
        b"\x00\x05\x16\x07",
        _UNSUPPORTED,
        "is an AppleDouble file: macOS metadata of another file in the same directory.",
        _BESIDE,
    ),
    (b"\x00\x05\x16\x00", _UNSUPPORTED, "is an AppleSingle file.", _UNPACK),
    (
        b"# This file tracks properties of this Flutter project",
        _UNSUPPORTED,
        "is a description of a Flutter project, not a checkpoint.",
        _OTHERS,
    ),
)
# Patterns of the first bytes of formats without a signature: a first field of protocol buffers, a first key of msgpack.
_SIGNS: tuple[tuple[re.Pattern[bytes], str, str], ...] = (
    (
        # The release, then the producer and its version, or the graph at once, which begins with a node.
        re.compile(
            rb"\x08[\x01-\x20](?:\x12[\x00-\x3f][ -~]*[\x1a\x22\x28\x32\x3a\x42]|\x3a[\x80-\xff]*[\x01-\x7f]\x0a)"
        ),
        "is an ONNX model.",
        "Save onnx.numpy_helper.to_array of each initializer, by name, with safetensors.numpy.save_file.",
    ),
    (
        # A value: its tag, and a tensor whose dtype follows its extents.
        re.compile(
            rb"\x0a[\x80-\xff]{0,4}[\x00-\x7f]\x0a[\x01-\x7f][ -~]+\x12[\x80-\xff]{0,4}[\x00-\x7f]"
            rb"(?:\x08[\x80-\xff]*[\x00-\x7f]|\x0a[\x00-\x7f][^\x12]*)*\x12[\x03-\x0a](?:B?[Ff]loat|U?[Ii]nt|Bool|Complex|str)"
        ),
        "is a MindSpore checkpoint.",
        "Convert it with mindspore.ckpt_to_safetensors.",
    ),
    (
        re.compile(
            rb"(?:[\x81-\x8f]|\xde..|\xdf....)(?:[\xa1-\xbf]|\xd9[\x20-\xff])[\w./-]+[\x81-\x8f\xc7-\xc9\xde\xdf]",
            re.DOTALL,
        ),
        "is a msgpack file, such as Flax writes.",
        _FLAX,
    ),
    (re.compile(rb"....FT01FH01", re.DOTALL), "is an ExecuTorch data file (.ptd).", _FOR_DEVICES),
    (re.compile(rb"....ET\d\d", re.DOTALL), "is an ExecuTorch program (.pte).", _FOR_DEVICES),
    (re.compile(rb"....TFL3", re.DOTALL), "is a TensorFlow Lite model.", _FOR_DEVICES),
)
# Members of foreign zip archives: the last part of a name, a description of the archive, the hint.
_ARCHIVES = (
    ("archive_format", "an archive of torch.export (.pt2)", _EXPORTED),
    ("serialized_exported_program.json", "an archive of torch.export (.pt2)", _EXPORTED),
    ("extern_modules", "a torch.package archive", "Load its contents, and save them with torch.save."),
    ("model.weights.h5", "a Keras archive (.keras)", _KERAS),
    (
        "model_index.json",
        "a diffusers archive (DDUF)",
        "Unpack and convert it, or use DiffusionPipeline.from_pretrained(dduf_file=…).save_pretrained(DIR).",
    ),
    (".npy", "an archive of numpy arrays (.npz), a format that MLX also writes", _ARRAYS),
)
# Directories that are not read: a pattern for a whole name in one, a description of the directory, the hint.
_DIRECTORIES: tuple[tuple[str, str, str], ...] = (
    (r"\d+\.metadata", "a Paddle checkpoint (FlexCheckpoint)", _PADDLE),
    (r"saved_model\.(?:pb|pbtxt|cpb)", "a TensorFlow SavedModel", _TF),
    (r".+\.data-\d{5}-of-\d{5}", "a TensorFlow checkpoint", _TF),
    (r"flax_model(?:-\d{5}-of-\d{5})?\.msgpack(?:\.index\.json)?", "a Flax model", _FLAX),
    (r".+\.mlmodel", "a Core ML package", _FOR_DEVICES),
    # The first of these files alone may be the model.
    (r"model-rank-(?!0-part-0\.)\d+-part-\d+\.safetensors", "a per-rank checkpoint of vLLM or SGLang", _OF_RANKS),
)


def check_file(path: str, head: bytes, size: int) -> None:
    """Raise the error for the file at `path`, of `size` bytes, if its first 512 bytes show that it is foreign."""
    if basename(path) in POINTERS and size <= MAX_TAG and head.isascii():
        raise UsageError(f"{path} contains only the name of the last step.", f"Give the directory: {dirname(path)}")
    if error := foreign_file(path, head, size):
        raise error


def foreign_file(path: str, head: bytes, size: int) -> CkptconvError | None:
    """Return the error for a foreign file at `path` that is no zip archive, by its first 512 bytes; None if it is not
    known. A page that a server gives is mostly its answer to the address of a directory without a final slash: the
    request is wrong, and not the file.
    """
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for beginning, kind, description, hint in _BEGINNINGS:
        if head.startswith(beginning) or (beginning[:1] == b"<" and text.startswith(beginning)):
            if description == _PAGE and is_quoted(path):
                return UsageError(f"{path} {description}", _AT_ADDRESS)
            if path.endswith(_TARS) and hint.endswith("tar://NAME::FILE"):
                from ckptconv.cells import way_into

                hint = f"Unpack it first, or specify {way_into('tar', (), path)}"
            return kind(f"{path} {description}", hint)
    if not size:
        return CorruptError(f"{path} is empty (0 bytes).", "The file was probably never written. Use another copy.")
    if not head.strip(b"\0"):
        return damaged(f"{path} begins with zeros only: its space was allocated, but its data was not written.")
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size - 8:
        return UnsupportedError(f"{path} is a safetensors file already.", "It needs no conversion.")
    if head[257:262] == b"ustar":
        return UnsupportedError(f"{path} is a tar archive, not a zip archive.")
    if (head[:1] == b"\x80" and head[1:2] <= b"\x05") or begins_as_pickle(head):
        return plain_pickle(path)
    for sign, description, hint in _SIGNS:
        if sign.match(head):
            return UnsupportedError(f"{path} {description}", hint)
    return None


def check_archive(path: str, members: Iterable[str]) -> None:
    """Raise the error for the zip archive at `path` if its members show that it is foreign."""
    names = {name.rpartition("/")[2] for name in members}
    for end, description, hint in _ARCHIVES:
        if end in names or (end[0] == "." and names and all(name.endswith(end) for name in names)):
            raise UnsupportedError(f"{path} is {description}, not a file of torch.save.", hint)


def check_directory(place: Location, names: Collection[str]) -> None:
    """Raise the error for the directory at `place` if `names` in it show that it is foreign."""
    for pattern, description, hint in _DIRECTORIES:
        if any(re.fullmatch(pattern, name) for name in names):
            raise UnsupportedError(f"{place} is {description}, which is not supported.", hint)


def check_below(place: Location) -> None:
    """Raise the error for a foreign directory. It may be up to two levels below `place`: a run has steps, and a step
    has items."""
    inner = [*islice(_directories(place), _LOOKED_AT)]
    items = islice((item for step in inner for item in _directories(step)), _LOOKED_AT)
    for directory in (place, *inner, *items):
        check_directory(directory, directory.names)


def _directories(place: Location) -> Iterator[Location]:
    """Yield the directories in a directory."""
    return (place.child(name) for name, entry in place.names.items() if entry.kind == "directory")


def is_sign(name: str) -> bool:
    """Return whether an entry of this name shows that its directory is foreign."""
    return any(re.fullmatch(pattern, name) for pattern, _, _ in _DIRECTORIES)
