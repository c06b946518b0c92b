"""Options of other programs, and the advice to a user who gives one. In Python, they have underscores."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any

from ckptconv.errors import CkptconvError, UsageError
from ckptconv.options.registered import FEATURES, missing
from ckptconv.process import lacking, of_feature
from ckptconv.text import brief

# The table of the options of `convert`, which imports this module.
CONVERTING = "ckptconv.options.table"
_NO_WORDS: Mapping[str, str] = MappingProxyType({})
WORDS = {
    "-o --out --output --output-file --outfile --output-path --save-path --dst": "Name OUTPUT last.",
    "-i --input --input-dir --checkpoint --checkpoint-dir --checkpoint-path --ckpt --model --src": "Name INPUT first.",
    "-d": "Did you mean --dtype or --verbose? OUTPUT follows INPUT.",
    "--bf16 --bfloat16": "Use --dtype bf16.",
    "--fp16 --float16 --half": "Use --dtype fp16.",
    "--fp32 --float32 --float": "Use --dtype fp32.",
    "--force -f --replace --yes -y --exist-ok --overwrite-output-dir": (
        "Use --overwrite to replace files of other programs; ckptconv replaces its own outputs without it."
    ),
    "--device --gpu --cuda --cpu --device-map": "ckptconv uses no device: it copies tensors from file to file.",
    "--num-workers --workers --threads --num-threads --max-workers --num-proc --nproc --parallel -j": "Use --jobs N.",
    "--shard-size --export-size --shards --num-shards --split-max-size --max-file-size": "Use --max-shard-size SIZE.",
    "--progress --progressbar --progress-bar": "Progress is shown by default; --no-progress turns it off.",
    "--cast --precision --torch-dtype --outtype --output-dtype --data-type": "Use --dtype, such as --dtype bf16.",
    "--region --endpoint-url --endpoint --profile --anon --no-sign-request": (
        "Use --storage-options JSON, or environment variables such as AWS_ENDPOINT_URL and AWS_PROFILE."
    ),
    "--from --from-format --input-format --source-format --model-type --loader": "The format of the input is detected.",
    "--to-format --format --output-format --target-format --output-type --save-format --saver": "Use --to KIND.",
    "--format --output-format --output-type": "Use --json for output that programs read.",
    "--resume --continue": "The same command continues an interrupted conversion.",
    "--in-place --inplace --delete --remove-source": "Inputs are never changed or removed.",
    "--filter --pattern --allow-patterns --include-patterns --select --only": "Use --include GLOB.",
    "--skip-keys --skip --ignore --ignore-keys --ignore-patterns --exclude-patterns --drop": "Use --exclude GLOB.",
    "--no-metadata": "Use --no-structure.",
    "--log-level --debug --log --log-file --logfile": "Use --verbose; 2> FILE writes the messages to a file.",
    "--remove-prefix --prefix --strip": "Use --strip-prefix PREFIX.",
    "--add-prefix": "Use --rename '^=PREFIX'.",
}

# Words for conversions that ckptconv lacks, and the programs to use instead.
ELSEWHERE = {
    "gguf ggml llama.cpp": "GGUF is not written: use convert_hf_to_gguf.py of llama.cpp on a model directory.",
    "onnx tensorrt openvino coreml tflite": (
        "Formats of other runtimes, such as ONNX, are not written: load the weights in torch, and export the model."
    ),
    "mlx": "MLX is not written: use mlx_lm.convert of mlx-lm on the directory that --to safetensors writes.",
    "flax jax orbax keras h5 tensorflow tf npz": (
        "Formats of TensorFlow, JAX and numpy are not written: load safetensors with "
        "safetensors.tensorflow, .flax or .numpy. numpy has no bfloat16: for it, convert with --dtype fp32."
    ),
    "npy": 'ckptconv.open(INPUT, framework="np") reads tensors as arrays in Python; write them with numpy.save.',
    "upload push publish push-to-hub": "ckptconv convert INPUT DIR --for-hub writes a directory for `hf upload`.",
    "codes exit errors": "ckptconv --help lists the exit codes.",
    "nf4 bnb bitsandbytes": "NF4 is read with --dequantize, but not written; use int4-g32, mxfp4 or nvfp4 for 4 bits.",
    "gptq awq": "GPTQ and AWQ need sample data: use their own programs, or convert --quantize fp8-block.",
    "unmerge demerge extract-lora lora-extract": (
        "An adapter cannot be extracted from a merged model. Keep the base model. ckptconv diff BASE MODEL --delta DIR "
        "stores their exact difference."
    ),
}


def instead_of(word: str) -> str:
    """Return the program to use for `word`, such as gguf or hf-to-gguf, if ckptconv lacks that conversion; else ""."""
    word = word.lower().removesuffix(".py").replace("_", "-")
    meant = {word, re.split("2|-|^\\.", word)[-1]}
    return next((text for words, text in ELSEWHERE.items() if meant.intersection(words.split())), "")


def unknown(
    name: str, known: Iterable[str], called: str = "", instead: Mapping[str, Any] = _NO_WORDS, value: Any = None
) -> CkptconvError:
    """Return the error for an argument `name` not among `known`, those of the function `called`. `instead` has advice,
    as in `checked`, where VALUE stands for the given `value`, if that is text; or a function of it returns it."""
    if feature := missing(name):
        return lacking(f"The option {name!r}", feature)
    close = difflib.get_close_matches(name, known, cutoff=0.7)
    meant = f"Did you mean {' or '.join(close)}?" if close else ""
    word = f"--{name.replace('_', '-')}"
    tables = (getattr(of_feature(feature, "options"), "OTHER_OPTIONS", {}) for feature in FEATURES)
    every = (pair for table in (WORDS, *tables) for pair in table.items())
    for advice in (text for words, text in every if word in words.split() and words[0] == "-"):
        text = re.sub(r"--([\w-]+)", lambda flag: flag[1].replace("-", "_"), advice)
        named = re.findall(r"--([\w-]+)", advice)
        meant = text if {flag.replace("-", "_") for flag in named}.issubset(known) else meant
    meant = "Only the command line has this option." if name in ("json", "quiet", "verbose") else meant
    meant = next((text for names, text in instead.items() if name in names.split()), meant)
    meant = meant if isinstance(meant, str) else meant(value)
    meant = meant.replace("VALUE", repr(value)) if isinstance(value, str) else meant
    has = f"{called} has {', '.join(sorted({*known} - {'self'}))}."
    if called and name in import_module(CONVERTING).OPTIONS:
        return UsageError(f"{called} has no option {name}, unlike convert; {has}", meant)
    # The options of `convert` are too many to list.
    names = has if called and len(has) < 450 else "Use the option names of the command line, with underscores."
    return UsageError(f"There is no option {name[:100]!r}.", meant or names)


def miscounted(called: str, names: Sequence[str], count: int, lacks: Iterable[str], instead: Mapping[str, str]) -> Any:
    """Return the error for a call without the arguments that it `lacks`, or with more than the `names` in order:
    `count`. `instead` may have advice on that, for *."""
    shown = f"{called}({', '.join(name for name in names if name != 'self')})"
    if lacks:
        return UsageError(f"{shown} lacks {' and '.join(sorted(lacks, key=names.index))}.")
    given = f"{shown} was given {count - ('self' in names)} arguments without a name."
    return UsageError(given, instead.get("*", "Give the other arguments by name."))


def not_among(value: Any, called: str, choices: tuple[str, ...], words: Mapping[str, str]) -> UsageError:
    """Return the error for a `value` that is none of `choices`; `words` have other names of these."""
    if not choices:
        return UsageError(f"{called} is {brief(value)}, but no installed feature provides a value for it.")
    text = value.lower().replace("_", "-") if isinstance(value, str) else ""
    like = [name for name in difflib.get_close_matches(text, choices) if name[0] == text[0] and not instead_of(text)]
    exact = [name for name in (words.get(text, text),) if name in choices]
    meant = exact or [name for name in choices if text and name.startswith(text)] or like
    names = " For the names of Hugging Face, use --map NAME: `ckptconv maps` lists the maps."
    more = names if text in ("hf", "huggingface", "transformers") and not missing("map") else ""
    return UsageError(
        f"{called} is {brief(value)}; it may be {', '.join(choices[:-1])}{' or ' * (len(choices) > 1)}{choices[-1]}.",
        f"Did you mean {' or '.join(meant)}?{more}" if meant else instead_of(text),
    )
