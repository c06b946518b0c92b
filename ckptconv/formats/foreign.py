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
from collections.abc import Collection, Iterable

from ckptconv.errors import CkptconvError, CorruptError, UnsupportedError, UsageError, damaged
from ckptconv.storage.handles import HIDDEN
from ckptconv.storage.paths import is_quoted
from ckptconv.text import some

_CORRUPT, _UNSUPPORTED = CorruptError, UnsupportedError
_AGAIN = "Download it again, and read the answer of the server."
_PAGE = "is a web page, not a checkpoint."
_AT_ADDRESS = f"The address of a directory ends in /. If this is that of a file: {_AGAIN[0].lower()}{_AGAIN[1:]}"
_UNPACK = "Unpack it first."
_NAME_ONE = f"{_UNPACK} One file in a tar archive called .tar.gz, .tar.bz2 or .tar.xz can be named: tar://NAME::FILE"
_OTHERS = "ckptconv reads files of PyTorch, DeepSpeed and safetensors."
_ARRAYS = "Load it with numpy.load, and write its arrays with safetensors.numpy.save_file."
_KERAS = "Load it in Keras, and write the arrays of get_weights, by name, with safetensors.numpy.save_file."
_TF = "Read it with tf.train.load_checkpoint, and write its arrays with safetensors.numpy.save_file."
_FLAX = "Load it with flax.serialization.msgpack_restore, and write the flat dict with safetensors.flax.save_file."
_PADDLE = "Load it with paddle.distributed.load_state_dict, and save it as safetensors, as PaddleFormers does."
_OF_RANKS = 'Only these programs load it, with load_format="sharded_state": convert the original model instead.'
_FOR_DEVICES = "It was exported from a model for devices: convert the original model instead."
_BESIDE = "Give the other file: its name lacks the leading ._ of this one."
_REPICKLE = "If it holds a state dict that you trust: load it with pickle, and write it with torch.save."
_EXPORTED = "Load it with torch.export.load, and save its state_dict with torch.save."
# First bytes of foreign files: the error, a description of the file, the hint.
_BEGINNINGS: tuple[tuple[bytes, type[CorruptError] | type[UnsupportedError], str, str], ...] = (
    (
        b"version https://git-lfs",
        _CORRUPT,
        "is a git-lfs pointer, not the file itself.",
        "Fetch the file: git lfs pull.",
    ),
    (b"<!doctype html", _CORRUPT, _PAGE, _AGAIN),
    (b"<html", _CORRUPT, _PAGE, _AGAIN),
    (b"<?xml", _CORRUPT, "is an XML document, not a checkpoint.", _AGAIN),
    (b"\x1f\x8b", _UNSUPPORTED, "is compressed with gzip.", _NAME_ONE),
    (b"\x28\xb5\x2f\xfd", _UNSUPPORTED, "is compressed with zstandard.", _UNPACK),
    (b"BZh", _UNSUPPORTED, "is compressed with bzip2.", _NAME_ONE),
    (b"\xfd7zXZ\0", _UNSUPPORTED, "is compressed with xz.", _NAME_ONE),
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
        "is a file of tensorizer.",
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
        "is a description of a Flutter project, not of a checkpoint.",
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
        "Write onnx.numpy_helper.to_array of its initializers, by name, with safetensors.numpy.save_file.",
    ),
    (
        # A value: its tag, and a tensor whose dtype follows its extents.
        re.compile(
            rb"\x0a[\x80-\xff]{0,4}[\x00-\x7f]\x0a[\x01-\x7f][ -~]+\x12[\x80-\xff]{0,4}[\x00-\x7f]"
            rb"(?:\x08[\x80-\xff]*[\x00-\x7f]|\x0a[\x00-\x7f][^\x12]*)*\x12[\x03-\x0a](?:B?[Ff]loat|U?[Ii]nt|Bool|Complex|str)"
        ),
        "is a checkpoint of MindSpore.",
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
    (re.compile(rb"....TFL3", re.DOTALL), "is a model of TensorFlow Lite.", _FOR_DEVICES),
)
# The beginning of pickles of protocols 0 and 1, which have no header: a container put into the memo, or a name.
_PICKLE_BEGINS = rb"[(\]})]+[dlt]?(?:q[\0\1]|p[01]\n)|\(*c[\w.]+\n[\w.]+\n(?:[q(}\])]|p\d)"
# Members of foreign zip archives: the last part of a name, a description of the archive, the hint.
_ARCHIVES = (
    ("archive_format", "an archive of torch.export (.pt2)", _EXPORTED),
    ("serialized_exported_program.json", "an archive of torch.export (.pt2)", _EXPORTED),
    ("extern_modules", "a package of torch.package", "Load its contents, and save them with torch.save."),
    ("model.weights.h5", "an archive of Keras (.keras)", _KERAS),
    (
        "model_index.json",
        "an archive of diffusers (DDUF)",
        "Unpack it, and convert the directory; or DiffusionPipeline.from_pretrained(dduf_file=…).save_pretrained(DIR).",
    ),
    (".npy", "an archive of numpy's arrays (.npz), as MLX also writes", _ARRAYS),
)
# Directories that are not read: a pattern for a whole name in one, a description of the directory, the hint.
_DIRECTORIES: tuple[tuple[str, str, str], ...] = (
    (r"\d+\.metadata", "a checkpoint of Paddle (FlexCheckpoint)", _PADDLE),
    (r"saved_model\.(?:pb|pbtxt|cpb)", "a SavedModel of TensorFlow", _TF),
    (r".+\.data-\d{5}-of-\d{5}", "a checkpoint of TensorFlow", _TF),
    (r"flax_model(?:-\d{5}-of-\d{5})?\.msgpack(?:\.index\.json)?", "a model of Flax", _FLAX),
    (r".+\.mlmodel", "a package of Core ML", _FOR_DEVICES),
    # The first of these files alone may be the model.
    (r"model-rank-(?!0-part-0\.)\d+-part-\d+\.safetensors", "the shards of the ranks of vLLM or SGLang", _OF_RANKS),
)


def plain_pickle() -> UnsupportedError:
    """Return the error for a pickle without torch's container; its message lacks the name."""
    return UnsupportedError("is a plain pickle, not a file of torch.save.", _REPICKLE)


def foreign_file(head: bytes, size: int) -> CorruptError | UnsupportedError | None:
    """Return the error, without the file's name, for a foreign file that is no zip archive, by its first 512 bytes.

    Return None if the file is not known.
    """
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for beginning, kind, description, hint in _BEGINNINGS:
        if head.startswith(beginning) or (beginning[:1] == b"<" and text.startswith(beginning)):
            return kind(description, hint)
    if not size:
        return CorruptError("is empty (0 bytes).", "It was probably never written: find another copy.")
    if not head.strip(b"\0"):
        return damaged("begins with zeros only: its space was allocated, but not written.")
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size - 8:
        return UnsupportedError("is a safetensors file already.", "It needs no conversion.")
    if head[257:262] == b"ustar":
        return UnsupportedError("is a tar archive, not a zip archive.")
    if (head[:1] == b"\x80" and head[1:2] <= b"\x05") or begins_as_pickle(head):
        return plain_pickle()
    for sign, description, hint in _SIGNS:
        if sign.match(head):
            return UnsupportedError(description, hint)
    return None


def of_file(path: str, error: CkptconvError) -> CkptconvError:
    """Return `error`, whose message lacks the name, for the file at `path`. A page that a server gives is mostly its
    answer to the address of a directory without a final slash: the request is wrong, and not the file."""
    is_answer = error.message == _PAGE and is_quoted(path)
    kind, hint = (UsageError, _AT_ADDRESS) if is_answer else (type(error), error.hint)
    return kind(f"{path} {error.message}", hint)


def foreign_archive(members: Iterable[str]) -> tuple[str, str] | None:
    """Return a description of a foreign zip archive with these members, and the hint; None if it is not known."""
    names = {name.rpartition("/")[2] for name in members}
    for end, description, hint in _ARCHIVES:
        if end in names or (end[0] == "." and names and all(name.endswith(end) for name in names)):
            return description, hint
    return None


def foreign_directory(names: Collection[str]) -> UnsupportedError | None:
    """Return the error for a foreign directory with these names; its message lacks the directory's name. Else None."""
    for pattern, description, hint in _DIRECTORIES:
        if any(re.fullmatch(pattern, name) for name in names):
            return UnsupportedError(f"is {description}, which is not read.", hint)
    return None


def without_checkpoint(names: Collection[str]) -> str:
    """Return the hint for a directory with these names, in which there is no checkpoint."""
    if all(name.startswith(HIDDEN) for name in names):
        return "It holds an unfinished conversion: run its command again to continue it, or delete the directory."
    return f"Give a file, or the directory of the checkpoint. It holds {some(sorted(names), form=str)}."


def begins_as_pickle(head: bytes) -> bool:
    """Whether a file that begins with `head` is a pickle of protocol 0 or 1."""
    return re.match(_PICKLE_BEGINS, head) is not None
