"""What a file or a directory is that is no checkpoint, or one that is not read: by its beginning, by what an archive
holds, or by the names in it. Each row says what program makes something of it that is read. Pure.

Source: onnx/onnx.proto; flax/serialization.py; mindspore/train/serialization.py and its checkpoint.proto; tensorizer's
serialization.py; of ExecuTorch extension/flat_tensor/serialize, where flat_tensor.fbs has the identifier FT01, which
flatbuffers put at byte 4, and flat_tensor_header.h the FH01 that follows it, and schema/program.fbs;
huggingface_hub/serialization/_dduf.py; paddle/distributed/flex_checkpoint; tensorflow/core/util/tensor_bundle, and
cc/saved_model/constants.h, of whose saved_model.pb or .pbtxt proto_splitter makes a .cpb.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ckptconv.errors import CorruptError, UnsupportedError, damaged

_CORRUPT, _UNSUPPORTED = CorruptError, UnsupportedError
_AGAIN = "Download it again, and look at what the server says."
_UNPACK = "Unpack it first."
_OTHERS = "Files of PyTorch, DeepSpeed and safetensors are read."
_ARRAYS = "Load it with numpy.load, and write its arrays with safetensors.numpy.save_file."
_KERAS = "Load it in Keras, and write the arrays of get_weights, by name, with safetensors.numpy.save_file."
_TF = "Read it with tf.train.load_checkpoint, and write its arrays with safetensors.numpy.save_file."
_FLAX = "Load it with flax.serialization.msgpack_restore, and write the flat dict with safetensors.flax.save_file."
_PADDLE = "Load it with paddle.distributed.load_state_dict, and save it as safetensors, as PaddleFormers does."
_OF_RANKS = 'They load it, with load_format="sharded_state": convert the model that it was made of.'
_FOR_DEVICES = "It is made of a model, for devices: convert that."
_BESIDE = "Name the other file: this one's name without the ._ it begins with."
_REPICKLE = "If it holds a state dict that you trust: load it with pickle, and write it with torch.save."
_EXPORTED = "Load it with torch.export.load, and save its state_dict with torch.save."
# First bytes of other files: the error, what the file is, what to do.
_BEGINNINGS: tuple[tuple[bytes, type[CorruptError] | type[UnsupportedError], str, str], ...] = (
    (
        b"version https://git-lfs",
        _CORRUPT,
        "is a git-lfs pointer, not the file itself.",
        "Fetch the file: git lfs pull.",
    ),
    (b"<!doctype html", _CORRUPT, "is a web page, not a checkpoint.", _AGAIN),
    (b"<html", _CORRUPT, "is a web page, not a checkpoint.", _AGAIN),
    (b"<?xml", _CORRUPT, "is an XML document, not a checkpoint.", _AGAIN),
    (b"\x1f\x8b", _UNSUPPORTED, "is compressed with gzip.", _UNPACK),
    (b"\x28\xb5\x2f\xfd", _UNSUPPORTED, "is compressed with zstandard.", _UNPACK),
    (b"BZh", _UNSUPPORTED, "is compressed with bzip2.", _UNPACK),
    (b"\xfd7zXZ\0", _UNSUPPORTED, "is compressed with xz.", _UNPACK),
    (b"7z\xbc\xaf\x27\x1c", _UNSUPPORTED, "is a 7z archive.", _UNPACK),
    (b"\x89HDF\r\n\x1a\n", _UNSUPPORTED, "is an HDF5 file, such as Keras writes.", _KERAS),
    (b"PYTORCH1", _UNSUPPORTED, "is a TorchScript archive of torch 1.0, which was no zip archive yet.", _OTHERS),
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
    (b"\x00\x05\x16\x07", _UNSUPPORTED, "is an AppleDouble file: what macOS keeps of another file beside it.", _BESIDE),
    (b"\x00\x05\x16\x00", _UNSUPPORTED, "is an AppleSingle file.", _UNPACK),
    (
        b"# This file tracks properties of this Flutter project",
        _UNSUPPORTED,
        "is a description of a Flutter project, not of a checkpoint.",
        _OTHERS,
    ),
)
# What the beginnings of others match, of formats without bytes of their own: a first field of protocol buffers, a
# first key of msgpack.
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
        "mindspore.ckpt_to_safetensors makes safetensors of it.",
    ),
    (
        re.compile(
            rb"(?:[\x81-\x8f]|\xde..|\xdf....)(?:[\xa1-\xbf]|\xd9[\x20-\xff])[\w./-]+[\x81-\x8f\xc7-\xc9\xde\xdf]",
            re.DOTALL,
        ),
        "is a msgpack file, such as Flax writes.",
        _FLAX,
    ),
    (re.compile(rb"....FT01FH01", re.DOTALL), "is a file of data of ExecuTorch (.ptd).", _FOR_DEVICES),
    (re.compile(rb"....ET\d\d", re.DOTALL), "is a program of ExecuTorch (.pte).", _FOR_DEVICES),
    (re.compile(rb"....TFL3", re.DOTALL), "is a model of TensorFlow Lite.", _FOR_DEVICES),
)
# The beginning of pickles of protocols 0 and 1, which have no header: a container put into the memo, or a name.
_PICKLE_BEGINS = rb"[(\]})]+[dlt]?(?:q[\0\1]|p[01]\n)|\(*c[\w.]+\n[\w.]+\n(?:[q(}\])]|p\d)"
# Members of other zip archives: the last part of a name, what the archive is, what to do.
_ARCHIVES = (
    ("archive_format", "an archive of torch.export (.pt2)", _EXPORTED),
    ("serialized_exported_program.json", "an archive of torch.export (.pt2)", _EXPORTED),
    ("extern_modules", "a package of torch.package", "Load what it holds, and save that with torch.save."),
    ("model.weights.h5", "an archive of Keras (.keras)", _KERAS),
    (
        "model_index.json",
        "an archive of diffusers (DDUF)",
        "Unpack it, and convert the directory; or DiffusionPipeline.from_pretrained(dduf_file=…).save_pretrained(DIR).",
    ),
    (".npy", "an archive of numpy's arrays (.npz), as MLX also writes", _ARRAYS),
)
# Directories that are not read: what a name in one matches from beginning to end, what it is, what to do.
_DIRECTORIES: tuple[tuple[str, str, str], ...] = (
    (r"\d+\.metadata", "a checkpoint of Paddle (FlexCheckpoint)", _PADDLE),
    (r"saved_model\.(?:pb|pbtxt|cpb)", "a SavedModel of TensorFlow", _TF),
    (r".+\.data-\d{5}-of-\d{5}", "a checkpoint of TensorFlow", _TF),
    (r"flax_model(?:-\d{5}-of-\d{5})?\.msgpack(?:\.index\.json)?", "a model of Flax", _FLAX),
    (r".+\.mlmodel", "a package of Core ML", _FOR_DEVICES),
    # A first file alone may be the model.
    (r"model-rank-(?!0-part-0\.)\d+-part-\d+\.safetensors", "what each rank of vLLM or SGLang holds", _OF_RANKS),
)


def plain_pickle() -> UnsupportedError:
    """Return the error for a pickle without torch's container; its message lacks the name."""
    return UnsupportedError("is a plain pickle, not a file of torch.save.", _REPICKLE)


def what_it_is(head: bytes, size: int) -> CorruptError | UnsupportedError | None:
    """Return what a file that is no zip archive is, by its first 512 bytes, as an error whose message lacks the name.

    Return None if it is nothing known.
    """
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for beginning, kind, what, hint in _BEGINNINGS:
        if head.startswith(beginning) or (beginning[:1] == b"<" and text.startswith(beginning)):
            return kind(what, hint)
    if not size:
        return CorruptError("is empty (0 bytes).", "It was probably never written: look for another copy.")
    if not head.strip(b"\0"):
        return damaged("begins with zeros only: space was reserved for it, and not filled.")
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size - 8:
        return UnsupportedError("is a safetensors file already.", "It needs no conversion.")
    if head[257:262] == b"ustar":
        return UnsupportedError("is a tar archive, not a zip archive.")
    if (head[:1] == b"\x80" and head[1:2] <= b"\x05") or begins_as_pickle(head):
        return plain_pickle()
    for sign, what, hint in _SIGNS:
        if sign.match(head):
            return UnsupportedError(what, hint)
    return None


def what_archive_it_is(members: Iterable[str]) -> tuple[str, str] | None:
    """Return what a zip archive with these members is, and what to do; None if it is nothing known."""
    names = {name.rpartition("/")[2] for name in members}
    for end, what, hint in _ARCHIVES:
        if end in names or (end[0] == "." and names and all(name.endswith(end) for name in names)):
            return what, hint
    return None


def what_directory_it_is(names: Iterable[str]) -> UnsupportedError | None:
    """Return what a directory with these names is, as an error whose message lacks its own; None if nothing known."""
    every = list(names)
    for pattern, what, hint in _DIRECTORIES:
        if any(re.fullmatch(pattern, name) for name in every):
            return UnsupportedError(f"is {what}, which is not read.", hint)
    return None


def begins_as_pickle(head: bytes) -> bool:
    """Whether a file that begins with `head` is a pickle of protocol 0 or 1."""
    return re.match(_PICKLE_BEGINS, head) is not None
