"""Makes the files beside it, with the releases of peft and bitsandbytes that are installed (0.21.2 and 0.50.2).

`dora.bin` is the adapter of a model that peft trains with DoRA, `int8.pt` the state dict of a linear layer in 8 bits,
`nf4.pt` one in 4 bits, and `adam8bit.pt` the state dict of an optimizer with states in 8 bits.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import bitsandbytes as bnb
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

here = Path(__file__).parent
torch.manual_seed(0)
model = get_peft_model(
    nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)),
    LoraConfig(r=2, target_modules=["0", "2"], use_dora=True, modules_to_save=["2"], init_lora_weights=False),
)
with tempfile.TemporaryDirectory() as place:
    model.save_pretrained(place, safe_serialization=False)
    (here / "dora.bin").write_bytes((Path(place) / "adapter_model.bin").read_bytes())

linear = bnb.nn.Linear8bitLt(16, 8, has_fp16_weights=False)
linear.load_state_dict(nn.Linear(16, 8).state_dict())
torch.save(linear.to("cpu").state_dict(), here / "int8.pt")
nf4 = bnb.nn.Linear4bit(64, 4, quant_type="nf4", compress_statistics=True)
nf4.load_state_dict(nn.Linear(64, 4).state_dict())
torch.save(nf4.to("cpu").state_dict(), here / "nf4.pt")
weight = nn.Parameter(torch.rand(64, 80))
optimizer = bnb.optim.AdamW8bit([weight], min_8bit_size=1)
for _ in range(2):
    weight.grad = torch.rand(64, 80)
    optimizer.step()
torch.save(optimizer.state_dict(), here / "adam8bit.pt")
