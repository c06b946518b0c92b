"""Steps of Megatron-core for layers of Transformer Engine as an output: their entry in the table of kinds."""

from __future__ import annotations

from ckptconv.features.megatron_output.kind import KIND as LOCAL

KIND = LOCAL._replace(to="megatron-te")
