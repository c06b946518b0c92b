"""Which files are those of ranks, by their names."""

from __future__ import annotations

from effort import every

from ckptconv.features.joining.sets import parsed, sets_of


@every(
    "name, stem, rank, world",
    [
        ("model_world_size_16_rank_3.pt", "model_world_size_16_rank_{}.pt", 3, 16),
        ("pytorch_model_fsdp_rank0.bin", "pytorch_model_fsdp_rank{}.bin", 0, None),
        ("pytorch_model_fsdp_0.bin", "pytorch_model_fsdp_{}.bin", 0, None),
        ("pytorch_model_fsdp_0_rank1.bin", "pytorch_model_fsdp_0_rank{}.bin", 1, None),
        ("model_rank0.pt", "model_rank{}.pt", 0, None),
        ("rank_12.pt", "rank_{}.pt", 12, None),
        ("rank00003.pth", "rank{}.pth", 3, None),
        ("model-rank-00003.bin", "model-rank-{}.bin", 3, None),
        ("fsdp_model_rank_0.pt", "fsdp_model_rank_{}.pt", 0, None),
        ("ep0-ba100-rank1.pt", "ep0-ba100-rank{}.pt", 1, None),
        ("checkpoint_last-shard2.pt", "checkpoint_last-shard{}.pt", 2, None),
        ("shard_00004.pt", "shard_{}.pt", 4, None),
        ("state_dp_rank_2.pt", "state_dp_rank_{}.pt", 2, None),
        ("ckpt_dp2.ckpt", "ckpt_dp{}.ckpt", 2, None),
        ("model_rank-00001-of-00004.pth", "model_rank-{}-of-00004.pth", 1, 4),
    ],
)
def test_a_number_after_a_word_for_a_rank_is_one(name: str, stem: str, rank: int, world: int | None) -> None:
    assert parsed(name) == (stem, rank, world)


@every(
    "name",
    [
        "model.pt", "franks_2.pt", "epoch_3.pt", "model_rank.pt", "model_rank0.safetensors", "rank_0.json",
        "pytorch_model-00001-of-00002.bin", "consolidated.00.pth", "rng_state_0.pth",
        "mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt",
    ],
)  # fmt: skip
def test_other_names_are_none(name: str) -> None:
    assert parsed(name) is None


def test_the_words_tell_what_a_set_holds() -> None:
    names = [f"{word}_rank_{rank}.pt" for word in ("extra_state", "model", "optim", "rng", "actor") for rank in (0, 1)]
    found = {each.stem.split("_rank")[0]: each.kind for each in sets_of(names)}
    assert found == {"extra_state": "other", "model": "model", "optim": "optimizer", "rng": "other", "actor": "model"}
