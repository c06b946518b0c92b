"""Times ckptconv beside `cp` of its output and beside the other ways to convert, as whole processes.

    bench.py [--sizes 0.5,2,8] [--only KIND,KIND] [--rounds 5] [--cold] [--write] [--keep]

The inputs of a task are made under build/bench, and removed when the next task does not need them, so that 30 GB of
disk are enough; SIZES are gigabytes of output. Every round runs every case of a task once, in turn. A task has three
rounds where its output has more than 4 GB, or where three rounds took more than half a minute. The disk is idle when a
case begins, and no two ever run at the same time. Shown are medians of wall and processor time, the ratio of wall time
to `cp` of the same output in the same rounds, and peak memory. `--write` puts tables and pictures into docs/.

`states` loads and saves a state dict of 100,000 tensors in a program, and `start` does next to nothing, for what
imports take.

`fp8`, `int4` and `mxfp4` make weights of quantized models, beside the usual program in torch and compressed-tensors.

For `megatron` and `titan`, models of 2 GB get the names and layouts of Hugging Face by a map, beside a program in torch
that does the same, as the frameworks' own converters do. `delta` writes what changed in one of a hundred elements, and
`diff` compares files. `serve` downloads from a server here, beside nginx, and `stores` goes from S3 to S3, at a server
here: the processor time is then that of the server too.

DeepSpeed, huggingface_hub, mergekit, PEFT and compressed-tensors take part where they are installed: here, or in
environments of their own, build/deepspeed-latest (which `make test-deepspeed` makes), build/mergekit, build/peft and
build/compressed-tensors.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import functools
import getpass
import importlib.util
import json
import os
import platform
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import measured
import plots
from ports import free_port

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "scripts" / "make_example.py"
DOCS = ROOT / "docs"
REPORT = DOCS / "benchmarks.md"
PYTHON = sys.executable

# Runs a command and prints what it took. A process starts with the peak memory of the one that it was forked from:
# so that launcher has to be small.
LAUNCHER = """
import json, os, sys, time
start = time.monotonic()
pid = os.spawnvp(os.P_NOWAIT, sys.argv[1], sys.argv[1:])
os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
seconds = time.monotonic() - start
try:
    with open(f"/proc/{pid}/io") as file:
        read = int(file.readline().split()[1])
except OSError:
    read = None
_, status, usage = os.wait4(pid, 0)
used = usage.ru_utime + usage.ru_stime
print(json.dumps([os.waitstatus_to_exitcode(status), seconds, used, usage.ru_maxrss * 1024, read]), file=sys.stderr)
"""

# What others do with a .pt. Of tied tensors one is kept, as save_file wants it.
TORCH = """
import sys, torch
from safetensors.torch import save_file
state = torch.load(sys.argv[1], weights_only=True, mmap={mmap})
kept = {{tensor.untyped_storage().data_ptr(): name for name, tensor in reversed(state.items())}}
save_file({{name: state[name].contiguous() for name in reversed(kept.values())}}, sys.argv[2], {{"format": "pt"}})
"""
HUB = """
import os, sys, torch
from huggingface_hub import save_torch_state_dict
os.mkdir(sys.argv[2])
state = torch.load(sys.argv[1], weights_only=True, mmap=True)
save_torch_state_dict(state, sys.argv[2], max_shard_size="1TB")
"""
MERGEKIT = """
import sys
from mergekit.io import LazyTensorLoader, ShardedTensorIndex, TensorWriter
loader = LazyTensorLoader(ShardedTensorIndex.from_file(sys.argv[1]), lazy_unpickle=True)
with TensorWriter(sys.argv[2], max_shard_size=-1) as writer:
    for name in loader.index.tensor_paths:
        writer.save_tensor(name, loader.get_tensor(name))
"""
# Its own safetensors output fails on tied weights.
DEEPSPEED = """
import sys
from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as convert
convert(sys.argv[1], sys.argv[2], max_shard_size=None, safe_serialization=False)
"""
TO_DCP = """
import sys
from torch.distributed.checkpoint.format_utils import torch_save_to_dcp
torch_save_to_dcp(sys.argv[1], sys.argv[2])
"""
# Inputs of one kind that are not models.
TRANSPOSED = """
import sys, torch
torch.save({f"w{n}": torch.randn(4096, 4096).t() for n in range(8)}, sys.argv[1])
"""
SMALL = """
import sys, torch
torch.save({f"layer.{n // 10}.{n % 10}.weight": torch.full((256,), float(n)) for n in range(200_000)}, sys.argv[1])
"""
# Quantized models of 2 GB of bfloat16, as they are published, and the usual program in torch for them.
QUANTIZED = """
import json, pathlib, sys, torch
from safetensors.torch import save_file
kind, place = sys.argv[1], pathlib.Path(sys.argv[2])
place.mkdir()
M, K, state = 4096, 7168, {}
words = {"num_bits": 4, "type": "int" if kind == "int4" else "float", "strategy": "group", "group_size": 32}
method = {"quant_method": "compressed-tensors", "config_groups": {"all": {"targets": ["Linear"], "weights": words}}}
for n in range(34):
    name = f"layers.{n}.weight"
    codes = torch.randint(0, 126, (M, K if kind == "fp8" else K // 2), dtype=torch.uint8)
    if kind == "fp8":
        method = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        state[name] = codes.view(torch.float8_e4m3fn)
        state[name + "_scale_inv"] = torch.rand(M // 128, K // 128) + 0.5
    elif kind == "int4":
        method["format"] = "pack-quantized"
        state[name + "_packed"] = codes.view(torch.int32)
        state[name + "_scale"] = (torch.rand(M, K // 32) + 0.5).bfloat16()
        state[name + "_shape"] = torch.tensor([M, K])
    else:
        method["format"] = "mxfp4-pack-quantized"
        state[name + "_packed"] = codes
        state[name + "_scale"] = torch.randint(110, 130, (M, K // 32), dtype=torch.uint8)
save_file(state, place / "model.safetensors")
(place / "config.json").write_text(json.dumps({"quantization_config": method}))
"""
DEQUANTIZE = """
import sys, torch
from safetensors import safe_open
from safetensors.torch import save_file
kind, made = sys.argv[1], {}
table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
with safe_open(sys.argv[2] + "/model.safetensors", "pt") as file:
    for name in file.keys():
        if kind == "fp8" and not name.endswith("_scale_inv"):
            scale = file.get_tensor(name + "_scale_inv").repeat_interleave(128, 0).repeat_interleave(128, 1)
            made[name] = (file.get_tensor(name).float() * scale).bfloat16()
        elif name.endswith("_packed"):
            codes = file.get_tensor(name).view(torch.uint8)
            codes = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
            scale = file.get_tensor(name[:-7] + "_scale")
            values = codes.float() - 8 if kind == "int4" else table[codes.int()]
            factor = scale.float() if kind == "int4" else torch.exp2(scale.float() - 127)
            made[name[:-7]] = (values.unflatten(1, (-1, 32)) * factor[:, :, None]).flatten(1).bfloat16()
save_file(made, sys.argv[3])
"""
COMPRESSED = """
import sys
from compressed_tensors.entrypoints.convert import (
    CompressedTensorsDequantizer, FP8BlockDequantizer, convert_checkpoint
)
kind, source, place = sys.argv[1:]
found = FP8BlockDequantizer.from_pretrained(source) if kind == "fp8" else CompressedTensorsDequantizer(source)
convert_checkpoint(source, place, found, device="cpu")
"""
# A state dict in a program: what is there before, the library's import, and the call.
STATES = """
import sys, torch
state = {{f"layer.{{n // 10}}.{{n % 10}}.weight": torch.full((256,), float(n)) for n in range(100_000 * {made})}}
{work}
"""
LOADS = {
    "ckptconv.load_state_dict": "import ckptconv; state = ckptconv.load_state_dict(sys.argv[1])",
    "safetensors' load_file": "from safetensors.torch import load_file; state = load_file(sys.argv[1])",
}
SAVES = {
    "ckptconv.save_state_dict": "import ckptconv; ckptconv.save_state_dict(state, sys.argv[1], fsync=False)",
    "safetensors' save_file": "from safetensors.torch import save_file; save_file(state, sys.argv[1])",
}
ONE = """
import sys, torch
torch.save({"w": torch.ones(3)}, sys.argv[1])
"""
OPENED = {
    "`ckptconv.open`, as numpy's": "import ckptconv as library; open = library.open",
    "`safe_open`, as numpy's": "from safetensors import safe_open as open",
}
# Llama-like models under the names of two frameworks, and what a program in torch makes of them.
SIZES = "H, F, L, V, G, Q, D = 2048, 8192, 15, 32000, 8, 4, 64"
RANDOM = """
import sys, torch
{sizes}
def r(*shape): return torch.empty(*shape, dtype=torch.bfloat16).uniform_(-1, 1)
"""
MEGATRON_MODEL = (
    RANDOM
    + """
state = {{"embedding.word_embeddings.weight": r(V, H), "output_layer.weight": r(V, H)}}
state["decoder.final_layernorm.weight"] = r(H)
for l in range(L):
    at = f"decoder.layers.{{l}}."
    state[at + "self_attention.linear_qkv.weight"] = r(G * (Q + 2) * D, H)
    state[at + "self_attention.linear_qkv.layer_norm_weight"] = r(H)
    state[at + "self_attention.linear_proj.weight"] = r(H, G * Q * D)
    state[at + "mlp.linear_fc1.layer_norm_weight"] = r(H)
    state[at + "mlp.linear_fc1.weight"] = r(2 * F, H)
    state[at + "mlp.linear_fc2.weight"] = r(H, F)
torch.save(state, sys.argv[1])
"""
)
TITAN_MODEL = (
    RANDOM
    + """
state = {{"tok_embeddings.weight": r(V, H), "output.weight": r(V, H), "norm.weight": r(H)}}
for l in range(L):
    at = f"layers.{{l}}."
    for name, rows in (("wq", G * Q * D), ("wk", G * D), ("wv", G * D), ("wo", H)):
        state[f"{{at}}attention.{{name}}.weight"] = r(rows, H)
    for name, shape in (("w1", (F, H)), ("w2", (H, F)), ("w3", (F, H))):
        state[f"{{at}}feed_forward.{{name}}.weight"] = r(*shape)
    state[at + "attention_norm.weight"], state[at + "ffn_norm.weight"] = r(H), r(H)
torch.save(state, sys.argv[1])
"""
)
MEGATRON_TO_HF = """
import sys, torch
from safetensors.torch import save_file
{sizes}
state = torch.load(sys.argv[1], weights_only=True, mmap=True)
made = {{"model.embed_tokens.weight": state["embedding.word_embeddings.weight"]}}
made |= {{"lm_head.weight": state["output_layer.weight"], "model.norm.weight": state["decoder.final_layernorm.weight"]}}
for l in range(L):
    old, new = f"decoder.layers.{{l}}.", f"model.layers.{{l}}."
    groups = state[old + "self_attention.linear_qkv.weight"].reshape(G, Q + 2, D, H)
    for name, part in (("q", groups[:, :Q]), ("k", groups[:, Q]), ("v", groups[:, Q + 1])):
        made[f"{{new}}self_attn.{{name}}_proj.weight"] = part.reshape(-1, H).contiguous()
    made[new + "input_layernorm.weight"] = state[old + "self_attention.linear_qkv.layer_norm_weight"]
    made[new + "self_attn.o_proj.weight"] = state[old + "self_attention.linear_proj.weight"]
    made[new + "post_attention_layernorm.weight"] = state[old + "mlp.linear_fc1.layer_norm_weight"]
    gate, up = state[old + "mlp.linear_fc1.weight"].chunk(2)
    made[new + "mlp.gate_proj.weight"], made[new + "mlp.up_proj.weight"] = gate.clone(), up.clone()
    made[new + "mlp.down_proj.weight"] = state[old + "mlp.linear_fc2.weight"]
save_file(made, sys.argv[2], {{"format": "pt"}})
"""
TITAN_TO_HF = """
import sys, torch
from safetensors.torch import save_file
{sizes}
state = torch.load(sys.argv[1], weights_only=True, mmap=True)
made = {{"model.embed_tokens.weight": state["tok_embeddings.weight"], "lm_head.weight": state["output.weight"]}}
made["model.norm.weight"] = state["norm.weight"]
def halves(rows): return rows.reshape(-1, D // 2, 2, H).transpose(1, 2).reshape(-1, H).contiguous()
for l in range(L):
    old, new = f"layers.{{l}}.", f"model.layers.{{l}}."
    made[new + "self_attn.q_proj.weight"] = halves(state[old + "attention.wq.weight"])
    made[new + "self_attn.k_proj.weight"] = halves(state[old + "attention.wk.weight"])
    made[new + "self_attn.v_proj.weight"] = state[old + "attention.wv.weight"]
    made[new + "self_attn.o_proj.weight"] = state[old + "attention.wo.weight"]
    for ours, theirs in (("w1", "gate"), ("w2", "down"), ("w3", "up")):
        made[f"{{new}}mlp.{{theirs}}_proj.weight"] = state[f"{{old}}feed_forward.{{ours}}.weight"]
    made[new + "input_layernorm.weight"] = state[old + "attention_norm.weight"]
    made[new + "post_attention_layernorm.weight"] = state[old + "ffn_norm.weight"]
save_file(made, sys.argv[2], {{"format": "pt"}})
"""
# A step that changes one element in a hundred, of 1 GB of bfloat16, as reinforcement learning does.
STEPS = """
import os, sys, torch
from safetensors.torch import save_file
os.mkdir(sys.argv[1])
before = {f"layers.{n}.weight": torch.randn(4096, 4096).bfloat16() for n in range(30)}
save_file(before, sys.argv[1] + "/before.safetensors", {"format": "pt"})
for tensor in before.values():
    flat = tensor.view(-1)
    places = torch.randint(len(flat), (len(flat) // 100,))
    flat[places] += 0.01
save_file(before, sys.argv[1] + "/after.safetensors", {"format": "pt"})
"""
# Two safetensors files compared as one would by hand.
COMPARE = """
import sys, torch
from safetensors import safe_open
with safe_open(sys.argv[1], "pt") as one, safe_open(sys.argv[2], "pt") as other:
    for name in one.keys():
        a, b = one.get_tensor(name).float(), other.get_tensor(name).float()
        print(name, int((a != b).sum()), float((b - a).abs().max()), float((b - a).norm() / a.norm()))
"""
NUDGED = """
import sys, torch
from safetensors.torch import load_file, save_file
save_file({name: tensor * 1.01 for name, tensor in load_file(sys.argv[1]).items()}, sys.argv[2], {"format": "pt"})
"""
# Serves the directory of a file: the paths of its own files are where nobody else has to be able to write.
NGINX = """
daemon off; worker_processes 1; pid {place}/pid; error_log {place}/errors; user {user};
events {{ }}
http {{
    access_log off; sendfile on; tcp_nopush on;
    client_body_temp_path {place}/body; proxy_temp_path {place}/proxy; fastcgi_temp_path {place}/fastcgi;
    uwsgi_temp_path {place}/uwsgi; scgi_temp_path {place}/scgi;
    server {{ listen 127.0.0.1:{port}; root {root}; }}
}}
"""
# A store with one object, a file, that takes all that is sent. moto's server reads a whole object for each range.
STORE = """
import sys
from aiohttp import web
path, sizes = sys.argv[2], {}
def xml(kind, **fields):
    inside = "".join(f"<{name}>{value}</{name}>" for name, value in fields.items())
    return web.Response(text=f"<{kind}>{inside}</{kind}>", content_type="application/xml")
async def answer(request):
    key, asked, is_read = request.match_info["key"], request.query, request.method in ("GET", "HEAD")
    if is_read and key == "model.pt":
        return web.FileResponse(path, headers={"ETag": '"0"'})
    if is_read and key in sizes:
        return web.Response(headers={"Content-Length": str(sizes[key]), "ETag": '"1"'})
    if is_read:
        return web.Response(status=404) if key else xml("ListBucketResult", IsTruncated="false", KeyCount=0)
    size = 0
    async for data in request.content.iter_any():
        size += len(data)
    if request.method == "PUT":
        sizes[key] = size + sizes.get(key, 0) * ("partNumber" in asked)
        return web.Response(headers={"ETag": '"1"'})
    sizes.setdefault(key, 0)
    if "uploads" in asked:
        return xml("InitiateMultipartUploadResult", Bucket="bench", Key=key, UploadId="1")
    return xml("CompleteMultipartUploadResult", Bucket="bench", Key=key, ETag='"1"')
app = web.Application(client_max_size=1 << 40)
app.router.add_route("*", "/bench/{key:.*}", answer)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)
"""
STREAM = """
import s3fs
store = s3fs.S3FileSystem()
with store.open("bench/model.pt", "rb") as source, store.open("bench/copy", "wb", block_size=16 << 20) as target:
    while data := source.read(8 << 20):
        target.write(data)
"""
# There are few rounds where the output has more bytes than this, or where they took more seconds than this.
_LARGE, _LONG, _FEW_ROUNDS = 4 * 10**9, 30, 3
KINDS = (
    *("zero", "universal", "pt", "dcp", "floats", "transposed", "small", "megatron", "titan", "delta", "diff"),
    *("fp8", "int4", "mxfp4", "merge", "average", "states", "start", "serve", "stores"),
)
_DELTA_THEN_PATCH = """
before=$1 after=$2 delta=$3 result=$4 told=$5
shift 5
rm -rf "$delta"
"$@" diff "$before" "$after" --delta "$delta" "$told" && "$@" patch "$before" "$delta" "$result" --no-fsync --quiet
"""
# A model of 2 GB in bfloat16 as transformers reads it, and an adapter of rank 64 for all of its layers; PEFT's way.
MERGED = """
import json, pathlib, sys, torch
from safetensors.torch import save_file
place = pathlib.Path(sys.argv[1])
H, F, L, V, R = 2048, 8192, 15, 32000, 64
def r(rows, columns, by): return torch.empty(rows, columns, dtype=torch.bfloat16).normal_(0, by)
shapes = {"self_attn.q_proj": (H, H), "self_attn.k_proj": (512, H), "self_attn.v_proj": (512, H),
          "self_attn.o_proj": (H, H), "mlp.gate_proj": (F, H), "mlp.up_proj": (F, H), "mlp.down_proj": (H, F)}
state, factors = {"model.embed_tokens.weight": r(V, H, 0.02), "lm_head.weight": r(V, H, 0.02)}, {}
state["model.norm.weight"] = torch.ones(H, dtype=torch.bfloat16)
for l in range(L):
    at = f"model.layers.{l}."
    for name in ("input", "post_attention"):
        state[f"{at}{name}_layernorm.weight"] = torch.ones(H, dtype=torch.bfloat16)
    for name, (rows, columns) in shapes.items():
        state[f"{at}{name}.weight"] = r(rows, columns, 0.02)
        factors[f"base_model.model.{at}{name}.lora_A.weight"] = r(R, columns, 0.02)
        factors[f"base_model.model.{at}{name}.lora_B.weight"] = r(rows, R, 0.002)
config = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=H, intermediate_size=F, vocab_size=V,
              num_hidden_layers=L, num_attention_heads=32, num_key_value_heads=8, dtype="bfloat16")
targets = [name.split(".")[1] for name in shapes]
told = dict(peft_type="LORA", task_type="CAUSAL_LM", r=R, lora_alpha=2 * R, target_modules=targets)
for name, file, tensors, words in (("base", "model", state, config), ("adapter", "adapter_model", factors, told)):
    (place / name).mkdir(parents=True)
    save_file(tensors, place / name / f"{file}.safetensors", {"format": "pt"})
    (place / name / ("config.json" if name == "base" else "adapter_config.json")).write_text(json.dumps(words))
"""
PEFT = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
base = AutoModelForCausalLM.from_pretrained(f"{sys.argv[1]}/base", dtype=torch.bfloat16)
merged = PeftModel.from_pretrained(base, f"{sys.argv[1]}/adapter", autocast_adapter_dtype=False).merge_and_unload()
merged.save_pretrained(sys.argv[2], max_shard_size="1TB")
"""
# Three steps of 2 GB in float32, and their average in torch, a tensor at a time.
AVERAGED = """
import pathlib, sys, torch
from safetensors.torch import save_file
pathlib.Path(sys.argv[1]).mkdir()
for step in range(3):
    state = {f"w{n}": torch.randn(4096, 4096) for n in range(30)}
    save_file(state, f"{sys.argv[1]}/{step}.safetensors", {"format": "pt"})
"""
AVERAGE = """
import sys, torch
from safetensors import safe_open
from safetensors.torch import save_file
steps = [safe_open(f"{sys.argv[1]}/{step}.safetensors", "pt") for step in range(3)]
made = {name: (sum(step.get_tensor(name).double() for step in steps) / 3).float() for name in steps[0].keys()}
save_file(made, sys.argv[2], {"format": "pt"})
"""
_PAGES = bytes(1 << 20)
# DeepSpeed needs so many times the size of the output in memory, and a part of the machine's is in use.
_DEEPSPEED_NEEDS, _USABLE = 2.5, 0.8


@dataclass
class Run:
    """What one run of a case took: wall and processor time (user and system), and peak memory and what was read in
    bytes; `read` is None where it cannot be known (memory-mapped files)."""

    seconds: float
    processor: float
    peak: int
    read: int | None


@dataclass
class Server:
    """A server that is started before each run of a case, and ended after it: it listens at `port`, and `prepare` is a
    command that is run once it does. Its processor time counts."""

    command: list[str]
    port: int
    prepare: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def running(self) -> Iterator[Callable[[], float]]:
        """Start it, and yield what tells the processor time that it took since then."""
        process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            for _ in range(600):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                    break
                time.sleep(0.1)
            if self.prepare:
                subprocess.run(self.prepare, check=True)
            before = _processor(process.pid)
            yield lambda: _processor(process.pid) - before
        finally:
            process.terminate()
            process.wait()


def _processor(pid: int) -> float:
    """The processor time of a process and those that it has started, in seconds."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK") + sum(map(_processor, map(int, children)))


@dataclass
class Case:
    """A way to make `output` out of `inputs`. `series` is what it is called in pictures, if it is to be in them.

    Only of others it is told when they fail, and how.
    """

    name: str
    command: list[str]
    inputs: list[Path]
    output: Path
    series: str = ""
    mapped: bool = False
    room: int = 0  # bytes of the output
    others: bool = False
    server: Server | None = None
    failure: str = ""
    runs: list[Run] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return statistics.median(run.seconds for run in self.runs)

    @property
    def processor(self) -> float:
        return statistics.median(run.processor for run in self.runs)

    @property
    def peak(self) -> int:
        return max(run.peak for run in self.runs)


@dataclass
class Task:
    """Cases that do the same. The first is `cp` of `result`, which is what the others are compared with.

    `check` sees whether what ckptconv made is right, and needs `theirs` for it. `made` are the inputs that were
    made, and `nbytes` is the size of the result, once there is one.
    """

    kind: str
    title: str
    result: Path
    cases: list[Case]
    check: Callable[[], object]
    theirs: Path | None = None
    made: list[Path] = field(default_factory=list)
    nbytes: int = 0


def measure(case: Case) -> Run:
    """Run `case` once. Raises RuntimeError, with what it printed, when it fails."""
    remove(case.output)
    make_room(case.room, case.output.parent)
    launcher = [PYTHON, "-I", "-S", "-c", LAUNCHER, *case.command]
    serving = case.server.running() if case.server else contextlib.nullcontext(lambda: 0.0)
    with serving as served, tempfile.TemporaryFile("w+") as stdout:
        os.sync()
        done = subprocess.run(launcher, stdout=stdout, stderr=subprocess.PIPE, text=True, check=True)
        beside = served()
        stdout.seek(0)
        printed = stdout.read()
    *errors, report = done.stderr.splitlines()
    code, seconds, processor, peak, read = json.loads(report)
    if code != 0:
        raise RuntimeError("\n".join([f"{case.name} failed with {code}:", printed, *errors]))
    if "--json" in case.command:
        own = json.loads(printed)
        peak, read = own["peak_rss_bytes"], own["bytes_read"]
    return Run(seconds, processor + beside, peak, None if case.mapped else read)


def make_room(size: int, directory: Path) -> None:
    """Have `size` bytes of memory free for a new file in `directory`, which may not exist yet: else whoever runs first
    after many pays for their pages."""
    place = next(above for above in (directory, *directory.parents) if above.exists())
    with tempfile.TemporaryFile(dir=place) as file:
        for _ in range(0, size, len(_PAGES)):
            file.write(_PAGES)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def files_in(path: Path) -> list[Path]:
    """A file, or the files of a directory."""
    return sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]


def prepare(paths: Iterable[Path], cold: bool) -> None:
    """Bring `paths` into the page cache, or have them leave it."""
    for path in (file for each in paths for file in files_in(each)):
        with path.open("rb", buffering=0) as file:
            if cold:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                continue
            while file.read(1 << 20):
                pass


# -------------------------------------------------------------------------------------------------------------- inputs

# The inputs of the task that is being prepared.
_MADE: list[Path] = []


def make(path: Path, command: Sequence[str]) -> None:
    """Have `command` make an example at `path`, its last argument, unless it is there; an interrupted one is not.

    It keeps its name meanwhile: torch writes that into the file, and mergekit expects it there.
    """
    _MADE.append(path)
    if path.exists():
        return
    print(f"making {path} ...", file=sys.stderr)
    unfinished = path.parent / "unfinished" / path.name
    remove(unfinished)
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([*command, str(unfinished)], check=True)
    unfinished.rename(path)
    unfinished.parent.rmdir()


def example(*options: str) -> list[str]:
    return [PYTHON, str(EXAMPLES), *options]


def python(program: str, *arguments: Path, interpreter: str = PYTHON) -> list[str]:
    return [interpreter, "-c", program, *map(str, arguments)]


def interpreter_with(package: str, environment: str) -> str | None:
    """An interpreter that has `package`: this one, or that of an environment of its own under build/."""
    if importlib.util.find_spec(package):
        return PYTHON
    own = ROOT / "build" / environment / "bin" / "python"
    return str(own) if own.exists() else None


def memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# --------------------------------------------------------------------------------------------------------------- tasks


def copies(result: Path, copy: Path) -> list[Case]:
    synced = ["sh", "-c", 'cp "$0" "$1" && sync "$1"', str(result), str(copy)]
    return [
        Case("`cp` of the result", ["cp", str(result), str(copy)], [result], copy, "cp of the output"),
        Case("`cp` of the result, then `sync`", synced, [result], copy),
    ]


def conversion(command: str, source: Path, inputs: list[Path], result: Path, *options: str, series: str = "") -> Case:
    """A conversion with `options`; with other options than how to end, it goes to a file of its own."""
    changes = any(option not in ("--no-fsync", "--checksum") for option in options)
    output = result.with_name(f"changed-{result.name}") if changes else result
    line = [PYTHON, "-m", "ckptconv", command, str(source), str(output), "--json", "--no-progress", *options]
    return Case(" ".join([f"`ckptconv {command}", *options]) + "`", line, inputs, output, series)


def conversions(command: str, source: Path, inputs: list[Path], result: Path, large: bool = False) -> list[Case]:
    convert = functools.partial(conversion, command, source, inputs, result)
    usual = [convert("--no-fsync", series="ckptconv"), convert()]
    if large:
        return usual
    return [*usual, convert("--no-fsync", "--checksum"), convert("--no-fsync", "--dtype", "bfloat16")]


def directories(inputs: list[Path], result: Path, *words: object) -> list[Case]:
    """Copies of the directory `result`, and the conversion of `words` that makes it."""
    copy = result.with_name("copy")
    synced = ["sh", "-c", 'cp -r "$0" "$1" && find "$1" -type f -exec sync {} +', str(result), str(copy)]
    line = [PYTHON, "-m", "ckptconv", *map(str, words), "--json", "--no-progress"]
    named = " ".join(["`ckptconv", *(str(word) for word in words if not isinstance(word, Path))])
    return [
        Case("`cp -r` of the result", ["cp", "-r", str(result), str(copy)], [result], copy),
        Case("`cp -r` of the result, then `sync` of each file", synced, [result], copy),
        Case(f"{named} --no-fsync`", [*line, "--no-fsync"], inputs, result),
        Case(f"{named}`", line, inputs, result),
    ]


def universal_task(directory: Path, gigabytes: float) -> Task:
    """A universal checkpoint of a training with its moments, beside DeepSpeed's own tool."""
    source, result = directory / f"moments-{gigabytes:g}", directory / f"universal-{gigabytes:g}"
    make(source, example("--params", str(int(gigabytes * 1e9 / 12)), "--ranks", "4"))
    inputs, made = sorted(source.glob("*/*.pt")), result / "step"
    cases = directories(inputs, result, "zero-to-fp32", source, "--universal", made)
    interpreter = interpreter_with("deepspeed", "deepspeed-latest")
    if interpreter:
        output = directory / "ds_to_universal"
        (step,) = source.glob("global_step*")
        line = [interpreter, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(step)]
        line += ["--output_folder", str(output)]
        cases.append(Case("DeepSpeed's `ds_to_universal`", line, inputs, output, others=True))
    check = [PYTHON, "-m", "ckptconv", "verify", str(source), "--universal", str(made), "--quiet"]
    title = f"ZeRO-3, 4 ranks, {gigabytes / 12:.2g} B parameters with their moments, to a universal checkpoint"
    return Task("universal", title, result, cases, lambda: subprocess.run(check, check=True))


def dcp_task(directory: Path, gigabytes: float) -> Task:
    """A model for torch.distributed.checkpoint, cut for eight ranks, beside torch's own tool."""
    source, result = directory / f"model-{gigabytes:g}.pt", directory / f"dcp-{gigabytes:g}"
    make(source, example("--size", f"{gigabytes}e9", "--pt"))
    cut = "--chunks", "8"
    cases = directories([source], result, "safetensors2dcp", source, result, *cut)
    output = directory / "format_utils"
    cases.append(Case("torch's `torch_save_to_dcp`", python(TO_DCP, source, output), [source], output, others=True))
    check = [PYTHON, "-m", "ckptconv", "verify", str(source), str(result), *cut, "--quiet"]
    title = f".pt of {gigabytes:g} GB, for torch.distributed.checkpoint"
    return Task("dcp", title, result, cases, lambda: subprocess.run(check, check=True))


def zero_task(directory: Path, gigabytes: float) -> Task:
    source, result = directory / f"zero-{gigabytes:g}", directory / f"zero-{gigabytes:g}.safetensors"
    # What is not read need not be there: of a large example, the moments are holes.
    sparse = ["--sparse"] if gigabytes > 2 else []
    make(source, example("--params", str(int(gigabytes * 1e9 / 4)), "--ranks", "4", *sparse))
    inputs = sorted(source.glob("*/*.pt"))
    cases = [*copies(result, directory / "copy"), *conversions("zero-to-fp32", source, inputs, result, gigabytes > 2)]
    interpreter = interpreter_with("deepspeed", "deepspeed-latest")
    if interpreter and gigabytes * 1e9 * _DEEPSPEED_NEEDS < memory() * _USABLE:
        output = directory / "deepspeed"
        command = python(DEEPSPEED, source, output, interpreter=interpreter)
        cases.append(Case("DeepSpeed's `zero_to_fp32`, to .bin", command, inputs, output, "DeepSpeed zero_to_fp32"))
    check = [*example("--check"), str(result), str(source)]
    title = f"ZeRO-3, 4 ranks, {gigabytes / 4:g} B parameters, {size(inputs)}{' of files with holes' if sparse else ''}"
    return Task("zero", title, result, cases, lambda: subprocess.run(check, check=True, stdout=sys.stderr))


def pt_task(directory: Path, gigabytes: float) -> Task:
    source = directory / f"model-{gigabytes:g}.pt"
    make(source, example("--size", f"{gigabytes}e9", "--pt"))
    task = loading_task("pt", f".pt of {gigabytes:g} GB", directory, source, gigabytes > 2)
    if importlib.util.find_spec("huggingface_hub") and gigabytes <= 2:
        output = directory / "hub"
        task.cases.append(
            Case("torch.load(mmap=True) + huggingface_hub", python(HUB, source, output), [source], output, mapped=True)
        )
    return task


def floats_task(directory: Path, gigabytes: float) -> Task:
    """A model of floating tensors alone: mergekit's lazy loader does not read bools."""
    # mergekit takes a name up to its first dot, and torch up to its last.
    source = (directory / f"floats-{gigabytes:g}".replace(".", "_")).with_suffix(".pt")
    make(source, example("--size", f"{gigabytes}e9", "--no-buffers", "--pt"))
    task = loading_task("floats", f".pt of {gigabytes:g} GB without buffers", directory, source, large=True)
    interpreter = interpreter_with("mergekit", "mergekit")
    if interpreter:
        output = directory / "mergekit"
        command = python(MERGEKIT, source, output, interpreter=interpreter)
        task.cases.append(Case("mergekit's lazy loader and writer", command, [source], output, others=True))
    return task


def loading_task(kind: str, title: str, directory: Path, source: Path, large: bool = False) -> Task:
    """A `.pt` that torch loads, and safetensors saves; where that takes more memory than there is, only mapped."""
    result = source.with_suffix(".safetensors")
    theirs = directory / "torch.safetensors"
    cases = [*copies(result, directory / "copy"), *conversions("pt2safetensors", source, [source], result, large)]
    if source.stat().st_size * 2 < memory() * _USABLE:
        load = python(TORCH.format(mmap=False), source, theirs)
        cases.append(Case("torch.load + save_file", load, [source], theirs, "torch.load + save_file"))
    load = python(TORCH.format(mmap=True), source, theirs)
    cases.append(Case("torch.load(mmap=True) + save_file", load, [source], theirs, "with mmap=True", mapped=True))
    return Task(kind, title, result, cases, lambda: check_same(result, theirs), theirs)


def transposed_task(directory: Path) -> Task:
    source = directory / "transposed.pt"
    make(source, python(TRANSPOSED))
    return loading_task("transposed", "every tensor transposed, float32 [4096, 4096]", directory, source)


def small_task(directory: Path) -> Task:
    source = directory / "small.pt"
    make(source, python(SMALL))
    return loading_task("small", "200,000 tensors of 1 KiB", directory, source)


def mapped_task(kind: str, title: str, named: str, model: str, program: str, directory: Path) -> Task:
    """A model of another framework, which a map or a program in torch gives the names and layouts of Hugging Face."""
    source, result, theirs = (
        directory / f"{kind}.pt",
        directory / f"{kind}.safetensors",
        directory / "torch.safetensors",
    )
    make(source, python(model.format(sizes=SIZES)))
    sizes = [word for size in ("d=64", "q=4", "e=32", "v=32000") if size[0] in _AXES[kind] for word in ("--size", size)]
    line = [
        PYTHON,
        "-m",
        "ckptconv",
        "pt2safetensors",
        str(source),
        str(result),
        "--no-progress",
        "--map",
        named,
        *sizes,
    ]
    name = f"`ckptconv pt2safetensors --map {named}"
    cases = [
        *copies(result, directory / "copy"),
        Case(f"{name} --no-fsync`", [*line, "--no-fsync"], [source], result, "ckptconv"),
        Case(f"{name}`", line, [source], result),
        Case(
            "torch.load(mmap=True), reshape, save_file",
            python(program.format(sizes=SIZES), source, theirs),
            [source],
            theirs,
        ),
    ]
    return Task(kind, title, result, cases, lambda: check_same(result, theirs), theirs)


# The axes whose sizes the maps cannot know of these models, which have no config.json.
_AXES = {"megatron": "dqv", "titan": "e"}


def megatron_task(directory: Path) -> Task:
    title = "Megatron-core's Llama of 2 GB, to Hugging Face"
    return mapped_task("megatron", title, "megatron-llama", MEGATRON_MODEL, MEGATRON_TO_HF, directory)


def titan_task(directory: Path) -> Task:
    title = "torchtitan's Llama 3 of 2 GB, to Hugging Face"
    return mapped_task("titan", title, "torchtitan-llama3", TITAN_MODEL, TITAN_TO_HF, directory)


def quantized_task(kind: str, directory: Path) -> Task:
    """A quantized model, of which weights are made, here and by the usual program."""
    source, result, theirs = directory / kind, directory / f"{kind}.safetensors", directory / "torch.safetensors"
    make(source, [*python(QUANTIZED), kind])
    line = [PYTHON, "-m", "ckptconv", "convert", str(source), str(result), "--dequantize", "--no-progress"]
    file = source / "model.safetensors"
    usual = [*python(DEQUANTIZE), kind, str(source), str(theirs)]
    cases = [
        *copies(result, directory / "copy"),
        Case("`ckptconv convert --dequantize --no-fsync`", [*line, "--no-fsync"], [file], result, "ckptconv"),
        Case("`ckptconv convert --dequantize`", line, [file], result),
        Case("safe_open, the products in torch, save_file", usual, [file], theirs, mapped=True),
    ]
    interpreter = interpreter_with("compressed_tensors", "compressed-tensors")
    if interpreter:
        place = directory / "compressed"
        command = [*python(COMPRESSED, interpreter=interpreter), kind, str(source), str(place)]
        name = "compressed-tensors' `convert_checkpoint`"
        cases.append(Case(name, command, [file], place / "model.safetensors", others=True))
    title = {"fp8": "FP8 in blocks of 128 × 128", "int4": "int4 in groups of 32", "mxfp4": "MXFP4"}[kind]
    return Task(kind, f"{title}, to bfloat16", result, cases, lambda: check_same(result, theirs), theirs)


def merged_task(directory: Path) -> Task:
    """An adapter of rank 64, merged here and by PEFT."""
    place, result, theirs = directory / "adapted", directory / "merged.safetensors", directory / "peft"
    make(place, python(MERGED))
    files = [place / "base" / "model.safetensors", place / "adapter" / "adapter_model.safetensors"]
    line = [
        PYTHON,
        "-m",
        "ckptconv",
        "merge",
        str(place / "base"),
        str(place / "adapter"),
        str(result),
        "--no-progress",
    ]
    cases = [
        *copies(result, directory / "copy"),
        Case("`ckptconv merge --no-fsync`", [*line, "--no-fsync"], files, result, "ckptconv"),
        Case("`ckptconv merge`", line, files, result),
    ]
    if interpreter := interpreter_with("peft", "peft"):
        usual = python(PEFT, place, theirs, interpreter=interpreter)
        cases.append(Case("PEFT's merge_and_unload", usual, files, theirs, mapped=True, others=True))
    return Task("merge", "an adapter of rank 64 into bfloat16", result, cases, lambda: None)


def averaged_task(directory: Path) -> Task:
    """Three steps, averaged here and in torch."""
    place, result, theirs = directory / "averaged", directory / "average.safetensors", directory / "torch.safetensors"
    make(place, python(AVERAGED))
    files = [place / f"{step}.safetensors" for step in range(3)]
    line = [PYTHON, "-m", "ckptconv", "average", *map(str, files), str(result), "--no-progress"]
    cases = [
        *copies(result, directory / "copy"),
        Case("`ckptconv average --no-fsync`", [*line, "--no-fsync"], files, result, "ckptconv"),
        Case("`ckptconv average`", line, files, result),
        Case(
            "safe_open, sums in torch's float64, save_file", python(AVERAGE, place, theirs), files, theirs, mapped=True
        ),
    ]
    return Task("average", "three steps in float32", result, cases, lambda: check_same(result, theirs), theirs)


def delta_task(directory: Path) -> Task:
    """What changed in a step, beside what others need to send the new file."""
    place = directory / "steps"
    make(place, python(STEPS))
    before, after, result = place / "before.safetensors", place / "after.safetensors", directory / "patched.safetensors"
    delta, packed = directory / "delta", directory / "after.packed"
    cases = [
        *copies(result, directory / "copy"),
        *(
            Case(
                f"`ckptconv diff --delta {told}`, then `patch --no-fsync`",
                [
                    *("sh", "-c", _DELTA_THEN_PATCH, "-"),
                    *(str(before), str(after), str(delta), str(result), told, PYTHON, "-m", "ckptconv"),
                ],
                [before, after],
                result,
            )
            for told in ("--quiet", "--no-progress")
        ),
    ]
    others = {
        "zstd": ["zstd", "-q", "-f", "-1", str(after), "-o", str(packed)],
        "xdelta3": ["xdelta3", "-e", "-f", "-s", str(before), str(after), str(packed)],
        "rsync": ["rsync", "--no-whole-file", "--only-write-batch", str(packed), str(after), str(before)],
    }
    for name, line in others.items():
        if shutil.which(name):
            cases.append(
                Case(
                    f"`{' '.join(word for word in line[:4] if '/' not in word)}`",
                    line,
                    [before, after],
                    packed,
                    others=True,
                )
            )
    return Task("delta", "a step that changes 1 % of 1 GB", result, cases, lambda: check_same(result, after))


def diff_task(directory: Path) -> Task:
    """What differs between two files: nothing, or every element."""
    place, changed = directory / "steps", directory / "changed.safetensors"
    make(place, python(STEPS))
    before, result, nothing = place / "before.safetensors", directory / "before.safetensors", directory / "nothing"
    make(changed, python(NUDGED, before))
    cases = [*copies(result, directory / "copy"), conversion("convert", before, [before], result, "--no-fsync")]
    for name, other in (("equal files", result), ("every element differs", changed)):
        # What is found is no failure.
        line = ["sh", "-c", '"$@" || test $? = 1', "-", PYTHON, "-m", "ckptconv", "diff", str(before), str(other)]
        by_hand = python(COMPARE, before, other)
        cases.append(Case(f"`ckptconv diff`: {name}", [*line, "--no-progress"], [before, other], nothing))
        cases.append(Case(f"safe_open, torch: {name}", by_hand, [before, other], nothing, mapped=True))
    return Task("diff", "two files of 1 GB compared", result, cases, lambda: None)


def serve_task(directory: Path) -> Task:
    """A download of what a conversion would write, beside one of what it wrote."""
    source, result, got = directory / "model-2.pt", directory / "model-2.safetensors", directory / "downloaded"
    make(source, example("--size", "2e9", "--pt"))
    ours, theirs = free_port(), free_port()
    line = [PYTHON, "-m", "ckptconv", "serve", str(source), "--quiet", "--port", str(ours)]

    def download(port: int, name: str) -> list[str]:
        return ["curl", "-sf", "-o", os.devnull, f"http://127.0.0.1:{port}/{name}"]

    cases = [
        *copies(result, directory / "copy"),
        conversion("pt2safetensors", source, [source], result, "--no-fsync"),
        Case("`ckptconv serve`", download(ours, "model.safetensors"), [source], got, server=Server(line, ours)),
    ]
    if nginx := shutil.which("nginx"):
        place = directory / "nginx"
        place.mkdir(exist_ok=True)
        told = {"place": place, "user": getpass.getuser(), "port": theirs, "root": directory}
        (place / "nginx.conf").write_text(NGINX.format(**told))
        server = Server([nginx, "-c", str(place / "nginx.conf")], theirs)
        cases.append(Case("nginx, of the converted file", download(theirs, result.name), [result], got, server=server))
    return Task("serve", "a download of 2 GB from this machine", result, cases, lambda: None)


def stores_task(directory: Path) -> Task:
    """From S3 to S3, at a server on this machine."""
    source, result = directory / "model-0.5.pt", directory / "model-0.5.safetensors"
    make(source, example("--size", "0.5e9", "--pt"))
    port = free_port()
    keys = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_DEFAULT_REGION": "us-east-1"}
    env = ["env", f"AWS_ENDPOINT_URL=http://127.0.0.1:{port}", *(f"{name}={value}" for name, value in keys.items())]
    server = Server([*python(STORE), str(port), str(source)], port)
    line = [*env, PYTHON, "-m", "ckptconv", "pt2safetensors", "s3://bench/model.pt", "s3://bench/model.safetensors"]
    nothing = directory / "nothing"
    cases = [
        *copies(result, directory / "copy"),
        conversion("pt2safetensors", source, [source], result, "--no-fsync"),
        Case("`ckptconv pt2safetensors s3://… s3://…`", [*line, "--no-progress"], [], nothing, server=server),
        Case("s3fs, read and written in pieces", [*env, *python(STREAM)], [], nothing, server=server, mapped=True),
    ]
    return Task("stores", "S3 to S3, at a server on this machine", result, cases, lambda: None)


def states_task(directory: Path) -> Task:
    """A state dict of many tensors, loaded and saved within a program; what else the program does is a case too."""
    result, theirs = directory / "states.safetensors", directory / "torch.safetensors"
    nothing = directory / "nothing"
    given = directory / "states-given.safetensors"
    make(given, python(STATES.format(made=1, work=SAVES["safetensors' save_file"])))
    cases = [*copies(result, directory / "copy")]
    cases.append(Case("`import torch`", python(STATES.format(made=0, work=""), given), [given], nothing))
    for name, work in LOADS.items():
        cases.append(Case(name, python(STATES.format(made=0, work=work), given), [given], nothing, mapped=True))
    cases.append(Case("`import torch`, a state dict made", python(STATES.format(made=1, work="")), [], nothing))
    for (name, work), output in zip(SAVES.items(), (result, theirs), strict=True):
        cases.append(Case(name, python(STATES.format(made=1, work=work), output), [], output))
    title = "a state dict of 100,000 tensors of 1 KiB"
    return Task("states", title, result, cases, lambda: check_same(result, theirs), theirs)


def start_task(directory: Path) -> Task:
    """What takes no longer than its imports."""
    source, result = directory / "one.pt", directory / "one.safetensors"
    make(source, python(ONE))
    nothing = directory / "nothing"
    cases = [*copies(result, directory / "copy"), conversion("pt2safetensors", source, [source], result, "--no-fsync")]
    cases.append(Case("`python -c pass`", python("pass"), [], nothing))
    cases += [
        Case(f"`ckptconv {option}`", [PYTHON, "-m", "ckptconv", option], [], nothing) for option in ("--version", "-h")
    ]
    complete = ["env", "_CKPTCONV_COMPLETE=complete_bash", "COMP_WORDS=ckptconv pt", "COMP_CWORD=1"]
    cases.append(Case("a completion", [*complete, PYTHON, "-m", "ckptconv"], [], nothing))
    cases.append(Case("`import numpy`", python("import numpy"), [], nothing))
    for name, begin in OPENED.items():
        program = f"import sys; {begin}; open(sys.argv[1], framework='np').__enter__().get_tensor('w')"
        cases.append(Case(name, python(program, result), [result], nothing, mapped=True))
    return Task("start", "imports", result, cases, lambda: None)


def check_same(ours: Path, theirs: Path) -> None:
    """Raise RuntimeError unless two safetensors files hold the same, byte for byte, whatever their metadata."""
    headers = []
    with ours.open("rb") as one, theirs.open("rb") as other:
        for file in (one, other):
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            header.pop("__metadata__", None)
            headers.append(header)
        same = headers[0] == headers[1]
        while same and (part := one.read(1 << 20)):
            same = part == other.read(1 << 20)
        if not same or other.read(1):
            raise RuntimeError(f"{ours} and {theirs} differ")


def size(paths: Iterable[Path]) -> str:
    return f"{sum(file.stat().st_size for path in paths for file in files_in(path)) / 1e9:.1f} GB"


# The tasks of one size of model, in the order in which they are run: those that share an input follow each other.
_SIZED: dict[str, Callable[[Path, float], Task]] = {
    "zero": zero_task,
    "universal": universal_task,
    "floats": floats_task,
    "pt": pt_task,
    "dcp": dcp_task,
}
# Those of one size, and after which task they are run.
_ALONE: dict[str, Callable[[Path], Task]] = {
    "stores": stores_task,
    "serve": serve_task,
    "transposed": transposed_task,
    "small": small_task,
    "megatron": megatron_task,
    "titan": titan_task,
    "delta": delta_task,
    "diff": diff_task,
    **{kind: functools.partial(quantized_task, kind) for kind in ("fp8", "int4", "mxfp4")},
    "merge": merged_task,
    "average": averaged_task,
    "states": states_task,
    "start": start_task,
}
# Tasks that take a model of one size which others made: they are run after these.
_WITH = {0.5: ("stores",), 2: ("serve",)}
# Kinds that are measured up to 2 GB.
_UP_TO_2 = ("floats", "universal", "dcp")


def tasks(directory: Path, kinds: Sequence[str], sizes: Sequence[float]) -> Iterator[Task]:
    """Yield the tasks asked for, each with its inputs made."""
    todo: list[tuple[str, float]] = []
    for gigabytes in sizes:
        todo += [(kind, gigabytes) for kind in _SIZED if gigabytes <= 2 or kind not in _UP_TO_2]
        todo += [(kind, 0) for kind in _WITH.get(gigabytes, ())]
    todo += [(kind, 0) for kind in _ALONE if (kind, 0) not in todo]
    for kind, gigabytes in todo:
        if kind not in kinds:
            continue
        # The input, what is made of it, a copy, and what another converter makes.
        room = shutil.disk_usage(directory).free
        if room < gigabytes * 1e9 * (6 if kind == "zero" and gigabytes <= 2 else 4):
            print(f"{kind} of {gigabytes:g} GB: left out, {room / 1e9:.0f} GB of disk are too few", file=sys.stderr)
            continue
        _MADE.clear()
        task = _SIZED[kind](directory, gigabytes) if gigabytes else _ALONE[kind](directory)
        task.made = [*_MADE]
        yield task


# --------------------------------------------------------------------------------------------------------- running


def run(task: Task, rounds: int, cold: bool) -> None:
    """Run every case of `task` in turn, `rounds` times.

    Before that, unmeasured, a conversion makes what `cp` copies, and a copy makes the machine find its memory.
    """
    converter = next(case for case in reversed(task.cases) if case.output == task.result)
    for case in (converter, task.cases[0]):
        measure(case)
    for case in task.cases:
        case.room = sum(file.stat().st_size for file in files_in(task.result))
    task.nbytes = task.cases[0].room
    for number in range(rounds):
        seconds = sum(taken.seconds for case in task.cases for taken in case.runs)
        if number >= _FEW_ROUNDS and (task.nbytes >= _LARGE or seconds > _LONG):
            break
        for case in (case for case in task.cases if not case.failure):
            prepare(case.inputs, cold)
            try:
                case.runs.append(measure(case))
            except RuntimeError as error:
                if not case.others:
                    raise
                case.failure = str(error).splitlines()[-1]
                remove(case.output)
                continue
            print(f"{task.title}: round {number + 1}: {case.name}: {case.runs[-1].seconds:.2f} s", file=sys.stderr)
            if case.output not in (task.result, task.theirs):
                remove(case.output)
        if number == 0:
            task.check()
        if task.theirs:
            remove(task.theirs)


def run_all(directory: Path, options: argparse.Namespace) -> list[Task]:
    """Run all tasks. Remove the outputs of each at its end, and its inputs when the next task does not need them. With
    --write, the page gets the table of each at its end: what ends a run loses no figures."""
    done: list[Task] = []
    for task in tasks(directory, options.kinds, options.sizes):
        if done and not options.keep:
            for path in {*done[-1].made} - {*task.made}:
                remove(path)
        run(task, options.rounds, options.cold)
        for path in {case.output for case in task.cases} - {*task.made}:
            remove(path)
        done.append(task)
        if options.write:
            write(done, options, is_whole=False)
    if done and not options.keep:
        for path in done[-1].made:
            remove(path)
    return sorted(done, key=lambda task: KINDS.index(task.kind))


def table(task: Task) -> list[str]:
    yardstick = task.cases[0].seconds
    lines = [
        f"## {task.title[:1].upper()}{task.title[1:]}: {task.nbytes / 1e9:.1f} GB of output",
        "",
        "| | seconds (median) | each round | ÷ `cp` | processor, seconds | peak RSS, MiB | read, GB |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for case in task.cases:
        if case.failure:
            lines.append(f"| {case.name} | fails | {case.failure} | – | – | – | – |")
            continue
        each = " ".join(f"{run.seconds:.2f}" for run in case.runs)
        reads = [run.read for run in case.runs if run.read is not None]
        read = f"{max(reads) / 1e9:.2f}" if reads else "–"
        times = f"{case.seconds:.2f} | {each} | {case.seconds / yardstick:.2f} | {case.processor:.2f}"
        lines.append(f"| {case.name} | {times} | {case.peak / 2**20:.0f} | {read} |")
    return [*lines, ""]


def heading(rounds: int, cold: bool) -> list[str]:
    """How the figures came about."""
    below = "What a disk or a host keeps by itself cannot be dropped: mostly what was written last, the result."
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "safetensors", "ckptconv"))
    return [
        f"By `make bench`: whole processes, {rounds} rounds in turn ({_FEW_ROUNDS} of what takes long),",
        f"{'cold' if cold else 'warm'} page cache,",
        f"{os.cpu_count()} CPUs ({platform.machine()}), {memory() / 1e9:.0f} GB of memory,",
        f"Python {platform.python_version()}, {libraries}.",
        "Processor time is that of user and system together, of all threads.",
        "Peak RSS of ckptconv is its own VmHWM; of the others ru_maxrss, from a launcher of about 9 MiB.",
        "Bytes read are those of read calls, libraries included; of memory-mapped files they cannot be known.",
        *([below] if cold else []),
        "",
    ]


def pictures(done: Sequence[Task]) -> dict[str, str]:
    """SVG pictures by file name: memory by the size of the output, and time beside `cp`."""
    made = {}
    for kind, title in (("zero", "DeepSpeed ZeRO-3"), ("pt", "PyTorch .pt")):
        of_kind = [task for task in done if task.kind == kind]
        if not of_kind:
            continue
        memory_of: dict[str, list[tuple[float, float]]] = {}
        bars: dict[str, list[tuple[str, float]]] = {}
        for task in of_kind:
            gigabytes = task.nbytes / 1e9
            for case in task.cases:
                if case.series and case is not task.cases[0]:
                    memory_of.setdefault(case.series, []).append((gigabytes, case.peak / 2**20))
                    ratio = case.seconds / task.cases[0].seconds
                    bars.setdefault(f"{gigabytes:.1f} GB", []).append((case.series, ratio))
        made[f"memory-{kind}.svg"] = plots.lines(
            f"{title}: peak memory", "size of the output, GB", "peak RSS, MiB", memory_of
        )
        made[f"time-{kind}.svg"] = plots.bars(f"{title}: time, as a multiple of cp of the output", bars)
    return made


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--sizes", default="0.5,2,8", metavar="GB", help="sizes of the output; default: 0.5,2,8")
    parser.add_argument("--only", default=",".join(KINDS), metavar="KINDS", help="some of the tasks")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: 5")
    parser.add_argument("--cold", action="store_true", help="drop the input from the page cache before every case")
    parser.add_argument("--write", action="store_true", help=f"write tables and pictures to {DOCS.relative_to(ROOT)}/")
    parser.add_argument("--keep", action="store_true", help="keep the inputs, for another run")
    parser.add_argument(
        "--directory", type=Path, default=ROOT / "build" / "bench", help="where inputs are made and kept"
    )
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds has to be at least 1")
    options.kinds = options.only.split(",")
    options.is_whole = all(getattr(options, name) == parser.get_default(name) for name in ("only", "sizes"))
    if unknown := set(options.kinds) - {*KINDS}:
        parser.error(f"--only: no such task: {', '.join(sorted(unknown))}")
    try:
        options.sizes = [float(each) for each in options.sizes.split(",")]
    except ValueError:
        parser.error(f"--sizes {options.sizes!r} is not a list of numbers")
    return options


def tables_of(page: str) -> dict[str, str]:
    """Return the tables of a page by their headings; under "" what is before the first."""
    first, *rest = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    return {"": first, **{part.partition("\n")[0]: part for part in rest}}


def write(done: Sequence[Task], options: argparse.Namespace, is_whole: bool) -> None:
    """Write the tables of the tasks that are done, in place of earlier ones. A run that `is_whole` leaves no other
    table, and draws the pictures."""
    DOCS.mkdir(exist_ok=True)
    cold = options.cold
    report = DOCS / "benchmarks-cold.md" if cold else REPORT
    tables = tables_of(report.read_text() if report.exists() else "")
    new = {table(task)[0]: "\n".join(table(task)) for task in done}
    made = pictures(done) if is_whole and not cold else {}
    for name, picture in made.items():
        (DOCS / name).write_text(picture)
    if is_whole:
        shown = [f"![{name.removesuffix('.svg')}]({name})" for name in made]
        title = "# Benchmarks, with nothing of the input in memory" if cold else "# Benchmarks"
        lines = [title, "", *shown, *([""] if shown else []), *heading(options.rounds, cold)]
        tables = {"": "\n".join(lines) + "\n"}
    report.write_text("\n\n".join(text.rstrip() for text in (tables | new).values() if text.strip()) + "\n")
    if not cold and is_whole:
        measured.write(REPORT.read_text())


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    directory = options.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    # As installers do: some environments forbid Python to keep what it has compiled.
    compileall.compile_dir(ROOT / "ckptconv", quiet=1)
    done = run_all(directory, options)
    lines = [*heading(options.rounds, options.cold), *(line for task in done for line in table(task))]
    print("\n".join(lines))
    if options.write:
        write(done, options, is_whole=options.is_whole)
    return 0


if __name__ == "__main__":
    sys.exit(main())
