"""zero-to-fp32 on every layout that a release of DeepSpeed writes: bit for bit, or refused with the true reason.

The checkpoints are written here, from parameters with known values; see zero_writer. Those that the real DeepSpeed
wrote are in test_zero.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import VERIFIED
from checkpoints import ZERO, assert_same, bits, ckptconv_here, done, load_with_aliases
from effort import every, examples
from features.deepspeed.zero_writer import (
    NEWEST,
    RELEASES,
    TAG,
    Model,
    Save,
    Tensors,
    change_states,
    expected,
    expected_states,
    stand_ins,
    states_of,
    values,
    write,
    write_layers,
    write_rank,
)
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from processes import counted
from safetensors.torch import load_file

from ckptconv.cli.registered import COMMANDS
from ckptconv.conversion import convert
from ckptconv.errors import CkptconvError, CorruptError, UnsafeError, UnsupportedError, UsageError
from ckptconv.features.regexes import regexes
from ckptconv.formats.detect import OtherFamilyError, open_source
from ckptconv.outputs.kinds import FURTHER


def dense() -> Model:
    """Two groups with shapes that no number of ranks divides, a scalar, a tie, buffers of several dtypes."""
    return Model(
        groups=[
            {"emb.weight": values(13, 6, seed=1), "l1.weight": values(7, 6, seed=2), "scale": values(seed=3)},
            {"l1.bias": values(7, seed=4), "norm.weight": values(1, seed=5)},
        ],
        buffers={"steps": torch.tensor(2**40), "mask": torch.tensor([True, False]), "mean": values(3, seed=6)},
        tied={"head.weight": "emb.weight"},
    )


def frozen() -> Tensors:
    return {"ice.weight": values(5, 3, seed=7), "ice.bias": values(5, seed=8)}


def check(
    tmp_path: Path, checkpoint: Path, weights: Tensors, states: Tensors | None = None, **options: Any
) -> list[str]:
    """Convert, and compare the weights and, where they are given, the optimizer states bit for bit. Its warnings."""
    output, optimizer = tmp_path / "model.safetensors", tmp_path / "optimizer.safetensors"
    asked = {"optimizer": str(optimizer)} if states is not None else {}
    report = convert(checkpoint, output, family="deepspeed", fsync=False, **asked, **options)
    assert_same(load_with_aliases(output), weights)
    if states is not None:
        got = {name: tensor for name, tensor in load_file(optimizer).items() if not name.endswith(".step")}
        assert_same(got, states)
    return report.warnings


def check_model(tmp_path: Path, model: Model, save: Save) -> list[str]:
    checkpoint = write(tmp_path / "checkpoint", model, save)
    states = expected_states(model) if save.states else None
    return check(tmp_path, checkpoint, expected(model, save.dtype), states)


def refused(checkpoint: Path, kind: type[CkptconvError], *words: str, **options: Any) -> str:
    """The checkpoint is refused in one paragraph that has all `words`, and nothing is written."""
    output = checkpoint.parent / "refused.safetensors"
    with pytest.raises(CkptconvError) as caught:
        convert(checkpoint, output, family="deepspeed", fsync=False, **options)
    assert type(caught.value) is kind, str(caught.value)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
    assert not output.exists()
    return message


# ------------------------------------------------------------------------------------------- stages, ranks, releases


@every("world", [1, 2, 3, 5])
@every("stage", [None, 1, 2, 3])
def test_weights_and_states_are_exact_at_every_stage_for_any_number_of_ranks(
    stage: int | None, world: int, tmp_path: Path
) -> None:
    assert check_model(tmp_path, dense(), Save(stage=stage, world=world)) == []


@every("stage", [2, 3])
@every("release", RELEASES)
def test_every_release_is_read(release: str, stage: int, tmp_path: Path) -> None:
    """One group: before 0.5.0 nothing told which parameters were in which."""
    one_group = dense()
    one_group.groups = [one_group.trained]
    if not RELEASES[release].buffer_names:
        del one_group.buffers["mean"]  # as good as a parameter: read all the same, and counted as one
    check_model(tmp_path, one_group, Save(stage=stage, release=RELEASES[release]))


@every("stage", [1, 2, 3])
@every("release", [name for name in RELEASES if name >= "0.5.0" or name.startswith("0.1")])
def test_several_groups_of_every_release_since_0_5_0_are_read(release: str, stage: int, tmp_path: Path) -> None:
    check_model(tmp_path, dense(), Save(stage=stage, world=3, release=RELEASES[release]))


def test_sub_groups_of_the_first_release_are_told_by_their_sizes(tmp_path: Path) -> None:
    one_group = dense()
    one_group.groups = [one_group.trained]
    check_model(tmp_path, one_group, Save(stage=3, release=RELEASES["0.3.14"], sub_group=25))


def test_groups_that_nothing_tells_apart_are_refused(tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "checkpoint", dense(), Save(release=RELEASES["0.4.2"]))
    refused(checkpoint, UnsupportedError, "2 groups of partitions", "older than 0.5.0")
    # Since 0.5.0 parameters were listed in the order of the groups; here two may end after one parameter, or two.
    few = Model([{"a": values(1)}, {"b": values(1), "c": values(1)}])
    checkpoint = write(tmp_path / "few", few, Save(world=3, release=RELEASES["0.5.0"]))
    refused(checkpoint, CorruptError, "3 parameters with 3 elements", "groups of 2, 2 elements")


@every("release", ["0.5.4", "0.8.2", "0.13.0", "0.19.8"])
def test_more_padding_than_a_partition_holds_is_told_from_weights(release: str, tmp_path: Path) -> None:
    """Three elements on four ranks, padded to eight: releases noted that in different ways."""
    model = Model([{"w": values(3, seed=1)}, {"v": values(1, seed=2)}, {"u": values(seed=3)}])
    for world in (2, 4, 5):
        check_model(tmp_path / str(world), model, Save(stage=2, world=world, release=RELEASES[release]))


@every("dtype", [torch.float16, torch.float32])
@every("stage", [0, 1, 2, 3])
def test_other_precisions_are_read(stage: int, dtype: torch.dtype, tmp_path: Path) -> None:
    model = dense()
    if stage == 0:
        # Its states are numbered, and named by others.
        model.groups = [{name: tensor.to(dtype).float() for name, tensor in model.trained.items()}]
        check(tmp_path, write(tmp_path / "checkpoint", model, Save(stage=0, dtype=dtype)), expected(model, dtype))
    else:
        check_model(tmp_path, model, Save(stage=stage, dtype=dtype))


def test_half_precision_masters_are_widened(tmp_path: Path) -> None:
    for stage in (1, 2, 3):
        model = dense()
        model.groups = [{name: tensor.bfloat16() for name, tensor in group.items()} for group in model.groups]
        checkpoint = write(tmp_path / str(stage) / "checkpoint", model, Save(stage=stage))
        states = {name: state.float() for name, state in expected_states(model).items()}
        check(tmp_path / str(stage), checkpoint, expected(model), states)


@every("step", [3, torch.tensor(3.0), torch.tensor(3)])
@every("stage", [1, 3])
def test_steps_are_kept_as_numbers_or_tensors(stage: int, step: Any, tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "checkpoint", dense(), Save(stage=stage, step=step))
    source = open_source(checkpoint)
    for state in source.optimizer["state"].values():
        assert state["step"] == 3 if isinstance(step, int) else state["step"].shape == ()
    assert [group["lr"] for group in source.optimizer["param_groups"]] == [0.1, 0.05]
    assert [group["params"] for group in source.optimizer["param_groups"]] == [list(g) for g in dense().groups]


def test_a_checkpoint_without_optimizer_states_is_weights_alone(tmp_path: Path) -> None:
    for stage in (1, 2, 3):
        save = Save(stage=stage, states=False)
        check_model(tmp_path / str(stage), dense(), save)
        refused(tmp_path / str(stage) / "checkpoint", UsageError, "no optimizer states", optimizer=str(tmp_path / "o"))


# ----------------------------------------------------------------------------------------------------------- variants


@every("align", [2, 4, 8])
def test_aligned_parameters_do_not_shift_those_behind_them(align: int, tmp_path: Path) -> None:
    for world in (1, 2, 3):
        check_model(tmp_path / str(world), dense(), Save(world=world, align=align, dtype=torch.float32))


def test_alignment_paddings_that_contradict_are_refused(tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "checkpoint", dense(), Save(align=8))
    other = write(tmp_path / "other", dense(), Save(align=4))
    name = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(other / TAG / name, checkpoint / TAG / name)
    refused(checkpoint, CorruptError, name, "alignment paddings", "come from different saves.")
    wrong = write(tmp_path / "wrong", dense(), Save(optim={"param_alignment_paddings": [[0, 0], [0, 0]]}))
    refused(wrong, CorruptError, "param_alignment_paddings", "2 values", "3 parameters")
    larger = write(tmp_path / "larger", dense(), Save(optim={"param_alignment_paddings": [[40, 2, 0], [1, 0]]}))
    refused(larger, CorruptError, "group 0", "121", "163")


@every("align", [1, 4])
def test_round_robin_changes_no_weight(align: int, tmp_path: Path) -> None:
    for world in (2, 3):
        check_model(tmp_path / str(world), dense(), Save(world=world, round_robin=True, align=align))


def test_elastic_checkpoints_hold_lean_states(tmp_path: Path) -> None:
    for world in (1, 2, 5):
        check_model(tmp_path / str(world), dense(), Save(world=world, elastic=True))


@every("size", [1, 10, 30])
def test_sub_groups_are_read_in_order(size: int, tmp_path: Path) -> None:
    check_model(tmp_path, dense(), Save(stage=3, world=3, sub_group=size))


@every("noted", [True, False])
def test_mics_shards_are_those_of_the_first_ranks(noted: bool, tmp_path: Path) -> None:
    """What ranks beyond a shard group saved, if anything, are copies; the configuration says so."""
    checkpoint = write(tmp_path / "checkpoint", dense(), Save(stage=3, zero={"mics_shard_size": 2} if noted else {}))
    for kind, prefix in (("optim", "bf16_"), ("model", "")):
        name = f"{prefix}zero_pp_rank_{{}}_mp_rank_00_{kind}_states.pt"
        for rank in (2, 3):
            shutil.copy(checkpoint / TAG / name.format(rank - 2), checkpoint / TAG / name.format(rank))
    if noted:
        check(tmp_path, checkpoint, expected(dense()), expected_states(dense()))
    else:
        refused(checkpoint, CorruptError, "2 ranks share the weights", "files of 4", "ranks 2, 3", "another save", "kB")


@every("stage", [None, 1, 2, 3])
def test_frozen_parameters_are_found_where_each_stage_keeps_them(stage: int | None, tmp_path: Path) -> None:
    model = replace(dense(), frozen=frozen(), tied={"head.weight": "emb.weight", "ice.copy": "ice.weight"})
    check_model(tmp_path, model, Save(stage=stage, world=3))
    kept = {name: tensor for name, tensor in expected(model).items() if not name.startswith("ice")}
    options = {"exclude_frozen_parameters": True}
    check(tmp_path, tmp_path / "checkpoint", kept, expected_states(model), **options)


@every("stage", [1, 2, 3])
def test_frozen_parameters_that_were_left_out_when_saving_are_not_missed(stage: int, tmp_path: Path) -> None:
    model = replace(dense(), frozen=frozen())
    checkpoint = write(tmp_path / "checkpoint", model, Save(stage=stage, exclude_frozen=True))
    check(tmp_path, checkpoint, expected(dense()), expected_states(dense()))


@every("release", ["0.5.0", "0.6.0", "0.9.0"])
def test_frozen_parameters_of_zero_3_that_old_releases_lost_are_named(release: str, tmp_path: Path) -> None:
    before = [name for name in RELEASES if [*map(int, name.split("."))] <= [*map(int, release.split("."))]]
    save = Save(stage=3, release=replace(RELEASES[before[-1]], version=release))
    checkpoint = write(tmp_path / "checkpoint", replace(dense(), frozen=frozen()), save)
    message = refused(checkpoint, CorruptError, "2 parameters", "ice.weight", "ice.bias", "--exclude")
    assert "head.weight" not in message  # a tie, which its placeholder tells
    check(tmp_path, checkpoint, expected(dense()), exclude=["ice.*"])


@every("stage", [1, 2, 3])
def test_parameters_without_elements_keep_their_shapes(stage: int, tmp_path: Path) -> None:
    """No optimizer has them, and having no address they look tied to each other."""
    empty = {"void": torch.zeros(0, 3), "nothing": torch.zeros(0), "gap": torch.zeros(2, 0)}
    model = replace(dense(), frozen=empty, tied={"head.weight": "emb.weight", "nothing": "void", "gap": "void"})
    checkpoint = write(tmp_path / "checkpoint", model, Save(stage=stage))
    check(tmp_path, checkpoint, {**expected(dense()), **empty}, expected_states(dense()))


@every("stage", [1, 2, 3])
def test_parameters_without_elements_of_older_releases_lie_in_the_groups(stage: int, tmp_path: Path) -> None:
    model = dense()
    model.groups[0] = {"void": torch.zeros(0), **model.groups[0], "nothing": torch.zeros(0)}
    check_model(tmp_path, model, Save(stage=stage, release=RELEASES["0.13.0"]))


@every("stage", [1, 2, 3])
def test_what_a_client_adds_changes_nothing(stage: int, tmp_path: Path) -> None:
    """It is merged into the model file, and may take the place of what DeepSpeed has put there."""
    client = {
        "ds_config": "config.json",
        "ds_version": 7,
        "lr_scheduler": [],
        "optimizer": {"state": {}},
        "global_steps": "three",
        "dp_world_size": 99,
        "mp_world_size": 99,
        "epoch": 1,
        "emb.weight": torch.zeros(2),
    }
    check_model(tmp_path, dense(), Save(stage=stage, client=client))


def test_states_that_belong_to_no_parameter_are_left_out_and_named(tmp_path: Path) -> None:
    state = {"exp_avg": torch.arange(4.0), "absmax": torch.ones(2), "step": 3}
    optimizer = {"state": {0: state}, "param_groups": [{"lr": 1.0, "params": [0]}]}
    model = Model([{"w": values(4, seed=1)}])
    checkpoint = write(tmp_path / "checkpoint", model, Save(world=1, optim={"base_optimizer_state": optimizer}))
    (warning,) = check(tmp_path, checkpoint, expected(model), {"w.exp_avg": torch.arange(4.0)})
    assert "absmax" in warning
    assert "left out" in warning


# ------------------------------------------------------------------------------------------------- any shapes and ranks


@st.composite
def checkpoints(draw: st.DrawFn) -> tuple[Model, Save]:
    sizes = st.lists(st.sampled_from([0, 1, 1, 2, 3, 4, 5, 7]), max_size=3).map(tuple)
    shapes = draw(st.lists(st.lists(sizes, min_size=1, max_size=5), min_size=1, max_size=3))
    stage = draw(st.sampled_from([None, 1, 2, 3]))
    releases = ["0.8.2", "0.19.8"] if stage is None else ["0.5.0", "0.5.4", "0.9.2", "0.13.0", "0.19.8"]
    release = RELEASES[draw(st.sampled_from(releases))]
    groups = [
        {f"{number}.{index}": values(*shape, seed=10 * number + index) for index, shape in enumerate(group)}
        for number, group in enumerate(shapes)
    ]
    if stage != 3:
        # An optimizer of ZeRO-1 or 2 makes no group of nothing.
        groups = [group for group in groups if any(t.numel() for t in group.values())]
    groups = groups or [{"w": values(2)}]
    if not release.shapes_by_group and stage != 3:
        # Groups of so few elements cannot be told apart where one list names the parameters of all.
        groups = [{name: tensor for group in groups for name, tensor in group.items()}]
    align = draw(st.sampled_from([1, 1, 4, 8])) if release is NEWEST and stage in (1, 2) else 1
    save = Save(
        stage=stage,
        world=draw(st.integers(1, 5)),
        release=release,
        align=align,
        sub_group=draw(st.sampled_from([1, 5, 10**9])),
        round_robin=draw(st.booleans()) if stage in (1, 2) else False,
        elastic=draw(st.booleans()) if stage in (1, 2) else False,
    )
    return Model(groups, frozen=frozen() if release.frozen and draw(st.booleans()) else {}), save


@given(checkpoints())
@examples(60, HealthCheck.function_scoped_fixture)
def test_any_shapes_on_any_ranks_are_exact(tmp_path: Path, drawn: tuple[Model, Save]) -> None:
    model, save = drawn
    shutil.rmtree(tmp_path / "checkpoint", ignore_errors=True)
    check_model(tmp_path, model, save)


# ---------------------------------------------------------------------------------------------------------------- Muon


def matrices() -> Model:
    """Matrices for Muon, which the ends of partitions cut, and vectors for Adam."""
    return Model(
        [
            {f"{n}.weight": values(*shape, seed=n) for n, shape in enumerate([(7, 5), (5, 3), (3, 7), (2, 5)])},
            {"0.bias": values(7, seed=8), "norm.weight": values(2, seed=9)},
        ]
    )


MUON = frozenset({0})


# Each two of a stage, a number of ranks and an alignment.
@every(
    "stage, world, align",
    [
        *((stage, 2, align) for stage in (1, 2) for align in (1, 8)),
        *((1 + at % 2, world, 8 if at in (0, 3) else 1) for at, world in enumerate((1, 3, 5, 50))),
        *((2 - at % 2, world, 1 if at in (0, 3) else 8) for at, world in enumerate((1, 3, 5, 50))),
    ],
)
def test_muon_s_momentum_is_that_of_whole_parameters(stage: int, world: int, align: int, tmp_path: Path) -> None:
    model = matrices()
    checkpoint = write(tmp_path / "checkpoint", model, Save(stage=stage, world=world, align=align, muon=MUON))
    assert check(tmp_path, checkpoint, expected(model), expected_states(model, MUON)) == []


@every("muon", [frozenset({1}), frozenset({0, 1})])
def test_any_group_may_be_muon_s(muon: frozenset[int], tmp_path: Path) -> None:
    model = matrices()
    checkpoint = write(tmp_path / "checkpoint", model, Save(world=3, muon=muon))
    check(tmp_path, checkpoint, expected(model), expected_states(model, muon))


def test_muon_s_momentum_of_experts_gets_their_numbers(tmp_path: Path) -> None:
    model = mixture(2)
    checkpoint = write(tmp_path / "checkpoint", model, Save(world=6, muon=frozenset({2})))
    check(tmp_path, checkpoint, expected(model), expected_states(model, {2}))


@every("name", [name for name in FURTHER if name != "optimizer"])
def test_muon_s_momentum_goes_into_what_trainings_go_on_from(name: str, tmp_path: Path) -> None:
    model, output = matrices(), tmp_path / name
    checkpoint = write(tmp_path / "checkpoint", model, Save(muon=MUON))
    convert(checkpoint, family="deepspeed", fsync=False, **VERIFIED, **{name: str(output)})
    check(tmp_path, output, expected(model), expected_states(model, MUON))


@every("world", [2, 3])
def test_muon_s_momentum_is_cut_like_the_weights_where_it_is_offloaded(world: int, tmp_path: Path) -> None:
    model = matrices()
    save = Save(world=world, muon=MUON, zero={"offload_optimizer": {"device": "cpu"}})
    checkpoint = write(tmp_path / "checkpoint", model, save)
    check(tmp_path, checkpoint, expected(model), expected_states(model, MUON))


def test_copies_of_muon_s_momentum_must_be_equal_where_it_is_asked_for(tmp_path: Path) -> None:
    model = matrices()
    checkpoint = write(tmp_path / "checkpoint", model, Save(muon=MUON))
    (path,) = (checkpoint / TAG).glob("*zero_pp_rank_1_mp_rank_00_optim_states.pt")
    with stand_ins():
        saved = torch.load(path, weights_only=False)
        saved["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["momentum_buffer"][0] += 1
        torch.save(saved, path)
    states = str(tmp_path / "states.safetensors")
    refused(checkpoint, CorruptError, "'1.weight.momentum_buffer'", "stored twice", optimizer=states)
    check(tmp_path, checkpoint, expected(model))


def in_doubt() -> Model:
    """A group in which, aligned to 4 elements on two ranks, momentum of whole parameters is as long as partitions."""
    return Model([{"a": values(6, 1, seed=1), "b": values(4, 1, seed=2), "c": values(6, 1, seed=3)}])


def test_muon_s_momentum_that_may_be_either_is_refused_without_the_weights(tmp_path: Path) -> None:
    model = in_doubt()
    checkpoint = write(tmp_path / "checkpoint", model, Save(align=4, muon=MUON))
    states = str(tmp_path / "states.safetensors")
    refused(checkpoint, UnsupportedError, "'momentum_buffer' of group 0", "does not record which", optimizer=states)
    check(tmp_path, checkpoint, expected(model))
    # That they are left out is said, without an option that would not convert them.
    assert open_source(checkpoint, family="deepspeed").notes[-1] == "Not converted: the optimizer."


@every("said", [["momentum_buffer"], [["momentum_buffer"]], {0: ["momentum_buffer"]}])
def test_what_is_said_of_whole_states_counts(said: Any, tmp_path: Path) -> None:
    model = in_doubt()
    save = Save(align=4, muon=MUON, optim={"whole_param_optimizer_states": said})
    check(tmp_path, write(tmp_path / "checkpoint", model, save), expected(model), expected_states(model, MUON))


def test_states_that_are_said_not_to_be_whole_are_cut(tmp_path: Path) -> None:
    model = in_doubt()
    offloaded = {"offload_optimizer": {"device": "cpu"}}
    save = Save(align=4, muon=MUON, zero=offloaded, optim={"whole_param_optimizer_states": []})
    check(tmp_path, write(tmp_path / "checkpoint", model, save), expected(model), expected_states(model, MUON))


def test_elastic_checkpoints_lose_the_end_of_muon_s_momentum(tmp_path: Path) -> None:
    model = matrices()
    checkpoint = write(tmp_path / "checkpoint", model, Save(muon=MUON, elastic=True))
    states = str(tmp_path / "states.safetensors")
    refused(checkpoint, CorruptError, "43 elements", "39 elements of the weights", "46", "Elastic", optimizer=states)
    check(tmp_path, checkpoint, expected(model))


@every("more", [-1, 1, 2])
def test_a_state_is_as_long_as_its_partition_or_with_the_padding_that_is_noted(more: int, tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "checkpoint", matrices(), Save(stage=1))
    (path,) = (checkpoint / TAG).glob("*zero_pp_rank_1_mp_rank_00_optim_states.pt")
    with stand_ins():
        saved = torch.load(path, weights_only=False)
        state = saved["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
        state["exp_avg"] = torch.zeros(39 + more)
        torch.save(saved, path)
    refused(checkpoint, CorruptError, "'exp_avg' of group 0", f"[{39 + more}]", "39 elements")


# ------------------------------------------------------------------------------------------------------------- experts


def expert(layer: int, number: int, part: str) -> str:
    return f"block.{layer}.moe.deepspeed_moe.experts.deepspeed_experts.{number}.{part}"


def mixture(ep: int, experts: int = 4, layers: int = 2) -> Model:
    """Dense parameters in one group, the experts of all layers in another: weights of one shape, and vectors."""
    model = dense()
    model.groups.append(
        {
            expert(layer, number, part): values(*shape, seed=100 + 10 * layer + number)
            for layer in range(layers)
            for number in range(experts)
            for part, shape in (("w.weight", (3, 5)), ("w.bias", (3,)))
        }
    )
    return replace(model, ep={2: ep})


# BF16_Optimizer came with 0.7.0.
EXPERTS = [
    (stage, release)
    for release in ("0.5.0", "0.5.4", "0.8.2", "0.13.0", "0.19.3", "0.19.8")
    for stage in ((1, 2) if release.startswith("0.5") else (None, 1, 2))
]


RANKS = [(1, 2), (2, 2), (2, 4), (4, 4), (4, 8)]


# Of all ranks with all releases the pairs: each with two of the others, and the newest with all.
@every(
    "stage, release, ep, world",
    [
        (*each, *ranks)
        for number, each in enumerate(EXPERTS)
        for index, ranks in enumerate(RANKS)
        if (number + index) % 5 in (0, 2) or each == EXPERTS[-1]
    ],
)
def test_experts_get_their_global_numbers(stage: int | None, ep: int, world: int, release: str, tmp_path: Path) -> None:
    check_model(tmp_path, mixture(ep), Save(stage=stage, world=world, release=RELEASES[release]))


@every("release, round_robin", [("0.6.0", False), ("0.8.0", False), ("0.13.0", True)])
def test_experts_that_nothing_tells_apart_are_refused(release: str, round_robin: bool, tmp_path: Path) -> None:
    """From 0.6.0 to 0.19.2 no shapes were listed, and from 0.8.2 fragments were, wrong under round robin."""
    save = Save(release=RELEASES[release], round_robin=round_robin)
    refused(write(tmp_path / "checkpoint", mixture(2), save), UnsupportedError, "param_shapes is missing", "0.8.1")


def test_shapes_that_are_told_by_fragments_must_fit(tmp_path: Path) -> None:
    tag = write(tmp_path / "checkpoint", mixture(2), Save(release=RELEASES["0.13.0"])) / TAG
    model = dense()
    model.groups[0]["emb.weight"] = values(12, 6, seed=1)
    larger = replace(mixture(2), groups=[*model.groups, mixture(2).groups[2]])
    other = write(tmp_path / "other", larger, Save(release=RELEASES["0.13.0"])) / TAG
    shutil.copy(other / "mp_rank_00_model_states.pt", tag / "mp_rank_00_model_states.pt")
    refused(tag, CorruptError, "78 elements of 'emb.weight'", "[12, 6]")


def test_groups_of_data_parallel_ranks_may_be_neighbours(tmp_path: Path) -> None:
    check_model(tmp_path, mixture(2), Save(world=4, data_before_experts=True))


def test_layers_may_be_spread_over_different_numbers_of_ranks(tmp_path: Path) -> None:
    model = mixture(2)
    wide = {
        name.replace("block", "wide"): values(*tensor.shape, seed=300 + index)
        for index, (name, tensor) in enumerate(model.groups[2].items())
    }
    check_model(tmp_path, replace(model, groups=[*model.groups, wide], ep={2: 2, 3: 4}), Save(world=4))


def test_experts_of_a_layer_may_be_spread_over_several_groups(tmp_path: Path) -> None:
    """As where weights decay and biases do not, or where a group of experts would be too large."""
    model = mixture(2)
    experts = model.groups[2]
    by_kind = [{n: t for n, t in experts.items() if n.endswith(kind)} for kind in ("weight", "bias")]
    check_model(tmp_path / "kind", replace(model, groups=[*model.groups[:2], *by_kind], ep={2: 2, 3: 2}), Save(world=2))
    # Local experts 0 in one group and 1 in the next: global 0 and 2, 1 and 3.
    by_number = [{n: t for n, t in experts.items() if int(n.split(".")[6]) % 2 == half} for half in (0, 1)]
    check_model(tmp_path / "nr", replace(model, groups=[*model.groups[:2], *by_number], ep={2: 2, 3: 2}), Save(world=2))


@every("stage", [1, 2])
def test_frozen_experts_and_buffers_of_experts_come_from_the_expert_files(stage: int, tmp_path: Path) -> None:
    model = mixture(2)
    model.frozen = {expert(layer, n, "ice"): values(2, 2, seed=500 + n) for layer in range(2) for n in range(4)}
    model.buffers = {expert(0, number, "seen"): torch.tensor(number + 7) for number in range(4)}
    check_model(tmp_path, model, Save(stage=stage, world=4))
    for file in (tmp_path / "checkpoint" / TAG).glob("*expert_3*"):
        file.unlink()
    refused(tmp_path / "checkpoint", CorruptError, "expert 3", "expert files")


def test_experts_of_zero_0_are_in_expert_files_alone(tmp_path: Path) -> None:
    model = mixture(2)
    model.groups = [{name: tensor.bfloat16().float() for name, tensor in model.trained.items()}]
    checkpoint = write(tmp_path / "checkpoint", replace(model, ep={0: 2}), Save(stage=0))
    check(tmp_path, checkpoint, expected(model))


def test_expert_files_are_compared_with_the_partitions(tmp_path: Path) -> None:
    tag = write(tmp_path / "checkpoint", mixture(2), Save()) / TAG
    (tag / "layer_1_expert_3_mp_rank_00_model_states.pt").unlink()
    refused(tag, CorruptError, "block.1", "the expert files lack the numbers 3")
    # Without any of them the partitions say it all.
    for file in tag.glob("*expert*"):
        file.unlink()
    check(tmp_path, tag, expected(mixture(2)), expected_states(mixture(2)))


def test_a_group_of_few_ranks_without_experts_is_refused(tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "checkpoint", dense(), Save(world=4, optim={"partition_count": [4, 2]}))
    refused(checkpoint, CorruptError, "group 1", "2 of 4 ranks", "l1.bias")


FUSED = {"block.0.experts": [[0, 1], [2, 3]], "block.1.experts": [[3, 0], [2, 1]]}


def fused(ep: int = 2) -> Model:
    model = dense()
    names = [f"{prefix}.{part}" for prefix in FUSED for part in ("w1", "w2", "w3")]
    model.groups.append({name: values(4, 3, 2, seed=600 + n) for n, name in enumerate(names)})
    return replace(model, ep={2: ep}, fused=FUSED)


@every("world", [2, 4])
def test_fused_experts_are_joined_in_the_order_of_their_numbers(world: int, tmp_path: Path) -> None:
    check_model(tmp_path, fused(), Save(world=world))


@every("stage", [1, 2])
def test_frozen_fused_experts_come_from_the_expert_files(stage: int, tmp_path: Path) -> None:
    model = fused()
    ice = {name: model.groups[2].pop(name) for name in list(model.groups[2]) if name.endswith("w2")}
    check_model(tmp_path, replace(model, frozen=ice), Save(stage=stage))
    for file in (tmp_path / "checkpoint" / TAG).glob("*expert*"):
        file.unlink()
    refused(tmp_path / "checkpoint", CorruptError, "w2", "4 experts", "expert files")


def test_experts_that_zero_3_cut_for_fewer_ranks_are_refused_with_that_reason(tmp_path: Path) -> None:
    layer = {"expert_key_prefix": "experts", "num_experts": 4, "ep_size": 2, "num_local_experts": 2}
    native = {"ds_autoep_layers": [{**layer, "checkpoint_format": "zero3_partitioned"}]}
    checkpoint = write(tmp_path / "checkpoint", dense(), Save(stage=3, client=native))
    refused(checkpoint, UnsupportedError, "AutoEP", "ZeRO-3", "partition-native", "ds_to_universal")
    groups = {"ds_zero_partition_groups": [{"partition_count": 1}]}
    refused(write(tmp_path / "2", dense(), Save(stage=3, optim=groups)), UnsupportedError, "AutoEP", "partition-native")


# ------------------------------------------------------------------------------------------------------------ pipelines


def stages(count: int) -> tuple[list[Model], dict[int, Tensors], Model]:
    """The stages of a pipeline, its layers, and the whole: an embedding tied to the last layer, in every stage that
    has either; a layer with a buffer and a frozen parameter in each stage."""
    embedding = values(11, 6, seed=50)
    whole = Model([{"tied_modules.embed.weight": embedding}, {}])
    layers: dict[int, Tensors] = {0: {"weight": embedding}}
    parts = []
    for stage in range(count):
        layer = stage + 1
        own = {"lin.weight": values(6, 6, seed=60 + stage), "norm.weight": values(6, seed=70 + stage)}
        ice, seen = values(6, 2, seed=80 + stage), torch.tensor(stage + 3)
        layers[layer] = {**own, "ice": ice, "seen": seen}
        names = {f"{layer}.{name}": tensor for name, tensor in own.items()}
        ends = {"tied_modules.embed.weight": embedding} if stage in (0, count - 1) else {}
        parts.append(
            Model(
                [{**ends, f"{layer}.lin.weight": own["lin.weight"]}, {f"{layer}.norm.weight": own["norm.weight"]}],
                buffers={f"{layer}.seen": seen},
            )
        )
        whole.groups[0] |= {n: t for n, t in names.items() if "lin" in n}
        whole.groups[1] |= {n: t for n, t in names.items() if "norm" in n}
        whole.frozen[f"{layer}.ice"] = ice
        whole.buffers[f"{layer}.seen"] = seen
    layers[count + 1] = {"weight": embedding}
    return parts, layers, whole


def write_pipeline(directory: Path, parts: list[Model], layers: dict[int, Tensors], save: Save) -> Path:
    save = replace(save, ranks=(len(parts), 1))
    for number, part in enumerate(parts):
        write_rank(directory / TAG, part, save, number, pipeline=True)
    write_layers(directory / TAG, layers, save.dtype)
    (directory / "latest").write_text(TAG)
    return directory


@every("release", ["0.7.0", "0.13.0", "0.19.8"])
@every("count, world", [(2, 1), (2, 2), (3, 2)])
@every("stage", [None, 1])
def test_stages_of_a_pipeline_are_one_model(
    stage: int | None, count: int, world: int, release: str, tmp_path: Path
) -> None:
    parts, layers, whole = stages(count)
    save = Save(stage=stage, world=world, release=RELEASES[release])
    checkpoint = write_pipeline(tmp_path / "checkpoint", parts, layers, save)
    check(tmp_path, checkpoint, expected(whole), expected_states(whole))
    groups = open_source(checkpoint).optimizer["param_groups"]
    assert [set(group["params"]) for group in groups] == [set(group) for group in whole.groups]


def test_tied_masters_of_two_stages_must_be_equal(tmp_path: Path) -> None:
    parts, layers, _ = stages(2)
    parts[1].groups[0] = {**parts[1].groups[0], "tied_modules.embed.weight": values(11, 6, seed=51)}
    checkpoint = write_pipeline(tmp_path / "checkpoint", parts, layers, Save(stage=1))
    refused(checkpoint, CorruptError, "tied_modules.embed.weight", "stored twice", "differ")


@every("asked", FURTHER)
def test_states_of_tied_masters_must_be_equal_where_they_are_asked_for(asked: str, tmp_path: Path) -> None:
    parts, layers, whole = stages(2)
    save = Save(stage=1, world=1)
    checkpoint = write_pipeline(tmp_path / "checkpoint", parts, layers, save)
    path = str(tmp_path / ("states.safetensors" if asked == "optimizer" else "universal"))
    convert(checkpoint, family="deepspeed", fsync=False, **{asked: path})
    change_states(next((checkpoint / TAG).glob("*zero_pp_rank_0_mp_rank_01_optim_states.pt")), "exp_avg_sq")
    refused(checkpoint, CorruptError, "tied_modules.embed.weight.exp_avg_sq", "stored twice", "differ", **{asked: path})
    check(tmp_path, checkpoint, expected(whole))


def test_a_frozen_layer_that_only_looks_like_a_tied_one_is_not_lost(tmp_path: Path) -> None:
    parts, layers, whole = stages(2)
    layers[7] = {"weight": values(11, 6, seed=52)}
    whole.frozen["7.weight"] = layers[7]["weight"]
    checkpoint = write_pipeline(tmp_path / "checkpoint", parts, layers, Save(stage=1))
    check(tmp_path, checkpoint, expected(whole), expected_states(whole))


def test_what_else_a_tied_module_has_goes_by_its_name(tmp_path: Path) -> None:
    parts, layers, whole = stages(2)
    seen, ice = torch.tensor([5, 6]), values(3, seed=53)
    for layer in (0, 3):
        layers[layer] = {**layers[layer], "seen": seen, "ice": ice}
    for part in (*parts, whole):
        part.buffers["tied_modules.embed.seen"] = seen
    whole.frozen["tied_modules.embed.ice"] = ice
    checkpoint = write_pipeline(tmp_path / "checkpoint", parts, layers, Save(stage=1))
    check(tmp_path, checkpoint, expected(whole), expected_states(whole))


def test_a_stage_whose_files_are_missing_is_named(tmp_path: Path) -> None:
    parts, layers, _ = stages(3)
    for release in ("0.13.0", "0.19.8"):
        save = Save(stage=1, release=RELEASES[release])
        tag = write_pipeline(tmp_path / release / "checkpoint", parts, layers, save) / TAG
        for file in tag.glob("*mp_rank_02*"):
            file.unlink()
        refused(tag, CorruptError, "model-parallel rank 2", "ranks 0, 1")
        (tag / "layer_02-model_states.pt").unlink()


def test_a_missing_layer_file_is_missed_by_its_buffers(tmp_path: Path) -> None:
    parts, layers, _ = stages(2)
    tag = write_pipeline(tmp_path / "checkpoint", parts, layers, Save(stage=1)) / TAG
    (tag / "layer_02-model_states.pt").unlink()
    refused(tag, CorruptError, "2.seen", "no layer file contains")


def test_layers_are_all_there_is_of_a_pipeline_without_zero(tmp_path: Path) -> None:
    parts, layers, whole = stages(2)
    checkpoint = write_pipeline(tmp_path / "checkpoint", parts, layers, Save(stage=0))
    weights = expected(whole)
    for name, tensor in weights.items():
        weights[name] = tensor.bfloat16().float() if tensor.is_floating_point() else tensor
    tied = weights.pop("tied_modules.embed.weight")
    check(tmp_path, checkpoint, {**weights, "0.weight": tied, "3.weight": tied})


@every("count, world", [(2, 1), (3, 2)])
def test_a_pipeline_without_zero_in_bf16_lists_no_shapes(count: int, world: int, tmp_path: Path) -> None:
    """BF16_Optimizer has the masters then, and their shapes are those in the layer files."""
    parts, layers, whole = stages(count)
    save = Save(stage=None, world=world, zero={"stage": 0}, client={"param_shapes": None})
    checkpoint = write_pipeline(tmp_path / "checkpoint", parts, layers, save)
    check(tmp_path, checkpoint, expected(whole), expected_states(whole))


def test_layers_of_other_shapes_do_not_tell_that_of_a_tied_module(tmp_path: Path) -> None:
    parts, layers, _ = stages(2)
    layers[7] = {"weight": layers[0]["weight"].T.contiguous()}
    save = Save(stage=None, zero={"stage": 0}, client={"param_shapes": None})
    checkpoint = write_pipeline(tmp_path / "checkpoint", parts, layers, save)
    refused(checkpoint, CorruptError, "66 elements of 'tied_modules.embed.weight'", "layer")


def test_a_pipeline_whose_save_wrote_no_masters_is_told_what_there_is(tmp_path: Path) -> None:
    parts, layers, _ = stages(2)
    checkpoint = write_pipeline(tmp_path / "checkpoint", parts, layers, Save(stage=1, zero={"stage": 0}))
    for file in (checkpoint / TAG).glob("*optim_states.pt"):
        file.unlink()
    refused(checkpoint, CorruptError, "If the save wrote any", "layer_*-model_states.pt")


# ------------------------------------------------------------------------------------------------------ tensor parallel


def whole_and_slices(ranks: int) -> tuple[Model, list[Model]]:
    """A model, and what each of its tensor-parallel ranks holds: every way of cutting a parameter that
    universal_checkpoint_info can tell."""
    query, key, value = values(8, 3, seed=1), values(4, 3, seed=2), values(4, 3, seed=3)
    gate, up = values(6, 5, seed=4), values(6, 5, seed=5)
    words = values(7, 4, seed=6)
    padded = torch.cat([words, torch.full((1, 4), 9.0)])
    trained = {
        "words.weight": words,
        "0.qkv.weight": torch.cat([query, key, value]),
        "0.mlp.weight": torch.cat([gate, up]),
        "0.up.weight": values(8, 3, seed=7),
        "0.down.weight": values(3, 8, seed=8),
        "0.experts.weight": values(2, 12, 3, seed=9),
        "0.norm.weight": values(4, seed=10),
        "0.scale": values(seed=11),
    }
    parts = []
    for rank in range(ranks):

        def of(tensor: torch.Tensor, dim: int = 0, rank: int = rank) -> torch.Tensor:
            return tensor.chunk(ranks, dim)[rank]

        first, second = trained["0.experts.weight"].split(6, 1)
        own = {
            **trained,
            "words.weight": of(padded),
            "0.qkv.weight": torch.cat([of(query), of(key), of(value)]),
            "0.mlp.weight": torch.cat([of(gate), of(up)]),
            "0.up.weight": of(trained["0.up.weight"]),
            "0.down.weight": of(trained["0.down.weight"], 1),
            "0.experts.weight": torch.cat([of(first, 1), of(second, 1)], 1),
        }
        parts.append(
            Model([own], frozen={"0.ice.weight": of(values(4, 2, seed=12))}, buffers={"0.seen": torch.tensor([3, 4])})
        )
    whole = Model([trained], frozen={"0.ice.weight": values(4, 2, seed=12)}, buffers={"0.seen": torch.tensor([3, 4])})
    return whole, parts


PATTERNS = {
    "tp_replicated_parameter_patterns": [r"\d+.norm.weight", r"\d+.scale"],
    "parameter_to_average_patterns": [],
    "parameter_with_row_parallelism_patterns": [r"\d+\.down\.weight"],
    "vocabulary_parameter_patterns": ["words.weight"],
    "parameter_with_2_sub_params_cat_dim_0": [r"\d+.mlp.weight"],
    "parameter_with_sub_params": [
        {"patterns": [r"\d+.qkv.weight"], "shape": ((8, 4, 4), 3), "partition_dim": 0},
        {"patterns": [r"\d+.experts.weight"], "shape": (2, (6, 6), 3), "partition_dim": 1},
    ],
    "original_vocab_size": 7,
    "universal_checkpoint_version": 0.2,
}


def write_slices(directory: Path, parts: list[Model], save: Save) -> Path:
    save = replace(save, ranks=(1, len(parts)))
    for number, part in enumerate(parts):
        write_rank(directory / TAG, part, save, number)
    (directory / "latest").write_text(TAG)
    return directory


@every("where", ["model", "optim"])
@every("ranks", [1, 2])
@every("stage", [None, 1, 2, 3])
def test_slices_are_merged_as_universal_checkpoint_info_says(
    stage: int | None, ranks: int, where: str, tmp_path: Path
) -> None:
    whole, parts = whole_and_slices(ranks)
    info = {"universal_checkpoint_info": PATTERNS}
    save = Save(stage=stage, **{"client" if where == "model" else "optim": info})
    if ranks == 1:
        # Nothing was cut, and so nothing is joined: the padded vocabulary stays as the model has it.
        whole = parts[0]
    checkpoint = write_slices(tmp_path / "checkpoint", parts, save)
    check(tmp_path, checkpoint, expected(whole), expected_states(whole) if ranks == 1 else None)
    if ranks > 1:
        source = open_source(checkpoint)
        moments = {name: states_of(tensor) for name, tensor in whole.trained.items() if name != "words.weight"}
        for name, states in moments.items():
            for key, state in states.items():
                assert source.optimizer["state"][name][key].shape == state.shape
        optimizer = tmp_path / "states.safetensors"
        convert(checkpoint, optimizer=str(optimizer), family="deepspeed", fsync=False)
        got = load_file(optimizer)
        for name, states in moments.items():
            for key, state in states.items():
                assert torch.equal(bits(got[f"{name}.{key}"]), bits(state)), (name, key)


def test_states_of_a_replicated_parameter_are_those_of_the_first_rank_and_said_to_differ(tmp_path: Path) -> None:
    """Each rank adds up the gradients for itself: the states may differ where the parameter does not."""
    replicated = values(4, 2, seed=1)
    checkpoint = write_slices(
        tmp_path / "checkpoint",
        [Model([{"w": replicated}]) for _ in range(2)],
        Save(stage=1, world=1, client={"universal_checkpoint_info": {"tp_replicated_parameter_patterns": ["w"]}}),
    )
    change_states(next((checkpoint / TAG).glob("*zero_pp_rank_0_mp_rank_01_optim_states.pt")), "exp_avg")
    optimizer = tmp_path / "states.safetensors"
    report = convert(checkpoint, optimizer=str(optimizer), family="deepspeed", fsync=False)
    (warning,) = report.warnings
    assert "states of the first rank" in warning
    assert warning.endswith(": w.exp_avg.")
    got = load_file(optimizer)
    for key, state in states_of(replicated).items():
        assert torch.equal(bits(got[f"w.{key}"]), bits(state)), key


def merge_one(tmp_path: Path, slices: list[torch.Tensor], info: dict[str, Any]) -> torch.Tensor:
    """The slices of a parameter "w" merged, and its states with it."""
    checkpoint = write_slices(
        tmp_path / "checkpoint",
        [Model([{"w": part}]) for part in slices],
        Save(world=1, client={"universal_checkpoint_info": info}),
    )
    output, optimizer = tmp_path / "w.safetensors", tmp_path / "o.safetensors"
    convert(checkpoint, output, optimizer=str(optimizer), family="deepspeed", fsync=False)
    merged = load_file(output)["w"]
    states = load_file(optimizer)
    for key, state in states_of(merged).items():
        assert torch.equal(states[f"w.{key}"], state)
    return merged


def test_sub_parameters_may_be_counted_or_be_one(tmp_path: Path) -> None:
    fused_qkv = [values(4, 3, seed=n) for n in range(3)]
    slices = [torch.cat([part.chunk(2)[rank] for part in fused_qkv]) for rank in range(2)]
    for index, shape in enumerate([(3, -1), (12, -1)]):
        sub = [{"patterns": ["^w$"], "shape": shape, "partition_dim": 0}]
        merged = merge_one(tmp_path / str(index), slices, {"parameter_with_sub_params": sub})
        assert torch.equal(merged, torch.cat(fused_qkv if index == 0 else slices))


def test_sub_parameters_may_be_cut_unevenly(tmp_path: Path) -> None:
    query, key = values(5, 2, seed=1), values(3, 2, seed=2)
    slices = [torch.cat([query[:3], key[:1]]), torch.cat([query[3:], key[1:]])]
    info = {
        "universal_checkpoint_version": 0.4,
        "parameter_with_sub_params": [{"patterns": ["^w$"], "shape": [(5, 3), -1], "partition_dim": 0}],
        "sub_param_shard_widths": {"^w$": [[3, 2], [1, 2]]},
    }
    assert torch.equal(merge_one(tmp_path, slices, info), torch.cat([query, key]))


def block(shape: list[int], source: Any, dest: Any, ranks: list[int], **more: Any) -> dict[str, Any]:
    return {"shape": shape, "source": source, "dest": dest, "locations": ranks, **more}


def test_affine_maps_place_every_block(tmp_path: Path) -> None:
    """Rank 0 has columns 0 and 3, rank 1 columns 1 and 2, both have column 4."""
    tensor = values(2, 5, seed=1)
    slices = [tensor[:, [0, 3, 4]].contiguous(), tensor[:, [1, 2, 4]].contiguous()]
    shared = block([2, 1], [4, [5, 1]], [2, [3, 1]], [0, 1])
    ranks = {
        0: [block([2, 1], [0, [5, 1]], [0, [3, 1]], [0]), block([2, 1], [3, [5, 1]], [1, [3, 1]], [0]), shared],
        1: [block([2, 2], [1, [5, 1]], [0, [3, 1]], [1]), shared],
    }
    described = {n: {"shard_shape": [2, 3], "pieces": pieces} for n, pieces in ranks.items()}
    info = {"affine_map": {"version": 1, "params": {"^w$": {"logical_shape": [2, 5], "ranks": described}}}}
    assert torch.equal(merge_one(tmp_path, slices, info), tensor)

    scaled = {"logical_shape": [3], "ranks": {n: {"shard_shape": [3], "pieces": []} for n in (0, 1)}}
    for each in scaled["ranks"].values():
        each["pieces"] = [block([3], [0, [1]], [0, [1]], [0, 1], scale=0.5)]
    with pytest.raises(UnsupportedError, match="--per-rank"):
        merge_one(tmp_path / "2", [values(3)] * 2, {"affine_map": {"version": 1, "params": {"^w$": scaled}}})
    hole = {"logical_shape": [2, 5], "ranks": {**described, 1: {"shard_shape": [2, 3], "pieces": [shared]}}}
    with pytest.raises(CorruptError, match="cannot be joined"):
        merge_one(tmp_path / "3", slices, {"affine_map": {"version": 1, "params": {"^w$": hole}}})


@every(
    "info, kind, words",
    [
        (
            {"autotp_unsupported_parameter_patterns": {"^w$": "interleaved heads"}},
            UnsupportedError,
            "interleaved heads",
        ),
        ({"parameter_to_average_patterns": ["w"]}, UnsupportedError, "average"),
        ({"tp_replicated_parameter_patterns": ["w"]}, CorruptError, "stored twice"),
        ({"tp_replicated_parameter_patterns": "w"}, CorruptError, "not a list of patterns"),
        ({"tp_replicated_parameter_patterns": ["("]}, CorruptError, "not a valid pattern"),
        ({"tp_replicated_parameter_patterns": ["(?:|){40}x"]}, UnsupportedError, "takes too long"),
        ({"parameter_with_sub_params": [{"patterns": ["w"]}]}, CorruptError, "not a valid entry"),
        (
            {"parameter_with_sub_params": [{"patterns": ["w"], "shape": ((3, 1), 2), "partition_dim": 0}]},
            CorruptError,
            "cannot be joined",
        ),
        (
            {"parameter_with_sub_params": [{"patterns": ["w"], "shape": (3, 2), "partition_dim": 0}]},
            CorruptError,
            "size 4 is not divisible into 3 equal sub-parameters",
        ),
        (
            {"parameter_with_sub_params": [{"patterns": ["w"], "shape": (4, 2), "partition_dim": 2}]},
            CorruptError,
            "not a valid entry",
        ),
        (
            {"parameter_with_sub_params": 1},
            CorruptError,
            "parameter_with_sub_params in universal_checkpoint_info is not",
        ),
        ({"sub_param_shard_widths": [1]}, CorruptError, "sub_param_shard_widths in universal_checkpoint_info is not"),
        (
            {"affine_map": {1: 2}},
            CorruptError,
            "affine_map in universal_checkpoint_info is not a dict with string keys",
        ),
        (
            {"original_vocab_size": "7"},
            CorruptError,
            "original_vocab_size in universal_checkpoint_info is '7', not a size",
        ),
        (
            {"original_vocab_size": -1},
            CorruptError,
            "original_vocab_size in universal_checkpoint_info is -1, not a size",
        ),
        (
            {"affine_map": {"version": 1, "params": {"w": {"logical_shape": [-4], "ranks": {}}}}},
            CorruptError,
            "malformed",
        ),
        ({"affine_map": {"version": 2}}, UnsupportedError, "version"),
        ({"affine_map": {"version": 1, "params": {"w": {"logical_shape": [4, 2]}}}}, CorruptError, "malformed"),
    ],
)
def test_patterns_that_do_not_help_are_explained(
    info: dict[str, Any], kind: type[CkptconvError], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regexes, "MOST_SECONDS", 1)
    with pytest.raises(kind, match=re.escape(words)):
        merge_one(tmp_path, [values(2, 2, seed=1), values(2, 2, seed=2)], {"x": 1, **info})


def test_ranks_without_patterns_are_converted_one_by_one_when_asked(tmp_path: Path) -> None:
    for stage in (1, 3):
        parts = whole_and_slices(2)[1]
        for part in parts:
            part.tied["head.weight"] = "words.weight"
        checkpoint = write_slices(tmp_path / str(stage) / "checkpoint", parts, Save(stage=stage))
        refused(
            checkpoint, UnsupportedError, "tensor-parallel", "2 tensor-parallel ranks × 2 data-parallel", "--per-rank"
        )
        convert(checkpoint, tmp_path / str(stage), family="deepspeed", per_rank=True, fsync=False)
        for number, part in enumerate(parts):
            assert_same(load_with_aliases(tmp_path / str(stage) / f"mp_rank_{number:02d}"), expected(part))


def test_ties_are_known_to_every_tensor_parallel_rank(tmp_path: Path) -> None:
    """The first rank's file alone names them; under ZeRO-3 the others hold placeholders."""
    parts = whole_and_slices(2)[1]
    parts[0].tied["head.weight"] = "words.weight"
    for part in parts:
        part.tied["head.weight"] = "words.weight"
    save = Save(stage=3, client={"universal_checkpoint_info": PATTERNS})
    checkpoint = write_slices(tmp_path / "checkpoint", parts, save)
    rank_one = Save(stage=3, ranks=(1, 2), client={"universal_checkpoint_info": PATTERNS, "shared_params": {}})
    write_rank(checkpoint / TAG, parts[1], rank_one, 1)
    whole = whole_and_slices(2)[0]
    whole.tied["head.weight"] = "words.weight"
    check(tmp_path, checkpoint, expected(whole))


def test_ranks_that_hold_different_names_are_refused(tmp_path: Path) -> None:
    _, parts = whole_and_slices(2)
    parts[1].groups[0]["extra"] = values(2)
    save = Save(client={"universal_checkpoint_info": PATTERNS})
    checkpoint = write_slices(tmp_path / "checkpoint", parts, save)
    refused(checkpoint, CorruptError, "ranks 0 and 1", "extra", "--per-rank")


def test_pipelines_of_tensor_parallel_ranks_are_merged_and_united(tmp_path: Path) -> None:
    """Two stages of two ranks: model-parallel rank = stage × 2 + rank, and layer files of each rank."""
    whole, slices = whole_and_slices(2)
    tag = tmp_path / "checkpoint" / TAG
    save = Save(stage=1, ranks=(2, 2), client={"universal_checkpoint_info": PATTERNS})
    united = Model([{}], frozen={}, buffers={})
    for stage in range(2):

        def named(tensors: Tensors, stage: int = stage) -> Tensors:
            return {name.replace("0.", f"{stage}.", 1): t for name, t in tensors.items() if stage == 0 or "." in name}

        united.groups[0] |= named(whole.groups[0])
        united.frozen |= named(whole.frozen)
        united.buffers |= named(whole.buffers)
        for rank, part in enumerate(slices):
            own = Model([named(part.groups[0])], buffers=named(part.buffers))
            write_rank(tag, own, save, stage * 2 + rank, pipeline=True)
            tensors = {**part.groups[0], **part.frozen, **part.buffers}
            layer = {name[2:]: tensor for name, tensor in tensors.items() if name.startswith("0.")}
            write_layers(tag, {stage: layer}, save.dtype, rank)
    check(tmp_path, tag, expected(united))

    for file in tag.glob("*mp_rank*"):
        file.unlink()
    for stage in range(2):
        for rank in range(2):
            part = slices[rank]
            names = {name.replace("0.", f"{stage}.", 1): t for name, t in part.groups[0].items() if "0." in name}
            own = Model([names], buffers={f"{stage}.seen": part.buffers["0.seen"]})
            write_rank(tag, own, replace(save, client={}), stage * 2 + rank, pipeline=True)
    refused(tag, UnsupportedError, "2 pipeline stages × 2 tensor-parallel ranks", "--per-rank")
    convert(tag, tmp_path / "ranks", family="deepspeed", per_rank=True, fsync=False)
    got = load_with_aliases(tmp_path / "ranks/mp_rank_01")
    assert torch.equal(got["1.up.weight"], slices[1].groups[0]["0.up.weight"])
    assert {name[0] for name in got} == {"0", "1"}


@every("release", ["0.13.0", "0.19.8"])
def test_missing_and_stale_model_parallel_ranks_are_named(release: str, tmp_path: Path) -> None:
    save = Save(release=RELEASES[release])
    for number, (left, words) in enumerate(
        [(1, ["lacks", "rank 1"]), (3, ["2 model-parallel", "files of 3", "rank 2"])]
    ):
        parts = whole_and_slices(2)[1]
        checkpoint = tmp_path / str(number) / "checkpoint"
        for rank in range(left):
            write_rank(checkpoint / TAG, parts[min(rank, 1)], replace(save, ranks=(1, 2)), rank)
        refused(checkpoint / TAG, CorruptError, *words)


# -------------------------------------------------------------------------------------------------- what is incomplete


@every("stage", [1, 2, 3])
def test_weights_on_nvme_are_refused_with_that_reason(stage: int, tmp_path: Path) -> None:
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    zero = {"offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}
    empty = [torch.zeros(0), torch.zeros(0)]
    checkpoint = write(tmp_path / "checkpoint", dense(), Save(stage=stage, zero=zero, optim={key: empty}))
    refused(checkpoint, UnsupportedError, "2 of 2 flat groups are empty", "NVMe")


def test_one_sub_group_on_nvme_is_enough_to_refuse(tmp_path: Path) -> None:
    """Small sub-groups stay in memory."""
    kept = torch.arange(4.0)
    checkpoint = write(
        tmp_path / "checkpoint", dense(), Save(stage=3, optim={"fp32_flat_groups": [torch.zeros(0), kept]})
    )
    refused(checkpoint, UnsupportedError, "1 of 2 flat groups", "NVMe")


def test_optimizer_files_that_are_all_missing_are_not_taken_for_a_checkpoint_without_zero(tmp_path: Path) -> None:
    for release, stage in (("0.19.8", 1), ("0.19.8", 3), ("0.5.0", 2), ("0.3.14", 2)):
        save = Save(stage=stage, release=RELEASES[release])
        tag = write(tmp_path / f"{release}-{stage}", Model([dense().trained]), save) / TAG
        for file in tag.glob("*optim_states.pt"):
            file.unlink()
        refused(tag, CorruptError, "*_optim_states.pt", "pt2safetensors --key module")


def test_missing_model_files_are_named(tmp_path: Path) -> None:
    tag = write(tmp_path / "checkpoint", replace(dense(), frozen=frozen()), Save(stage=3, world=3)) / TAG
    (tag / "zero_pp_rank_2_mp_rank_00_model_states.pt").unlink()
    refused(tag, CorruptError, "model file of rank 2", "frozen", "--exclude-frozen-parameters")
    for file in tag.glob("*model_states.pt"):
        file.unlink()
    refused(tag, CorruptError, "no *_model_states.pt")


def test_files_of_two_steps_are_not_mixed(tmp_path: Path) -> None:
    """Everything in them fits; the optimizers had taken different numbers of steps."""
    for stage in (1, 3):
        for step in (3, torch.tensor(3.0)):
            directory = tmp_path / f"{stage}-{type(step).__name__}"
            checkpoint = write(directory / "checkpoint", dense(), Save(stage=stage, step=step))
            other = write(directory / "other", dense(), Save(stage=stage, step=step + 2))
            name = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
            shutil.copy(other / TAG / name, checkpoint / TAG / name)
            refused(checkpoint, CorruptError, name, "5 steps", "after 3", "come from different saves.")


def test_frozen_parts_of_another_save_are_not_mixed(tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "checkpoint", replace(dense(), frozen=frozen()), Save(stage=3))
    other = write(tmp_path / "other", replace(dense(), frozen={"ice.weight": values(5, 3)}), Save(stage=3))
    name = "zero_pp_rank_1_mp_rank_00_model_states.pt"
    shutil.copy(other / TAG / name, checkpoint / TAG / name)
    refused(checkpoint, CorruptError, name, "shapes of frozen parameters", "come from different saves.")


@every(
    "optim, words",
    [
        ({"base_optimizer_state": {"state": [], "param_groups": []}}, "base_optimizer_state.state is not a dict"),
        ({"base_optimizer_state": {"state": {0: 1}, "param_groups": []}}, "base_optimizer_state.state is not a dict"),
        ({"base_optimizer_state": {"state": {}, "param_groups": [1]}}, "base_optimizer_state.param_groups is not"),
        ({"base_optimizer_state": {"state": {}, "param_groups": {}}}, "base_optimizer_state.param_groups is not"),
        ({"base_optimizer_state": 1}, "dict or list was expected"),
        ({"partition_count": [-2]}, "but a list of sizes was expected"),
        ({"partition_count": ["2"]}, "but a list of sizes was expected"),
        ({"zero_stage": 4}, "but a number from 0 to 3 was expected"),
        ({"single_partition_of_fp32_groups": [1, 2]}, "but a 1-D tensor was expected"),
    ],
)
def test_entries_that_no_optimizer_has_are_named(optim: dict[str, Any], words: str, tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "checkpoint", dense(), Save(stage=2, optim=optim))
    refused(checkpoint, CorruptError, "optim_states.pt", words)


@every(
    "client, words",
    [
        ({"buffer_names": [1]}, "buffer_names contains values other than names"),
        ({"shared_params": {"a": 1}}, "shared_params contains values other than pairs of names"),
        ({"shared_params": ["abc"]}, "shared_params contains values other than pairs of names"),
        ({"shared_params": "ab"}, "dict or list was expected"),
        ({"shared_params": {"x": "y"}}, "'x' is tied to 'y', which the checkpoint does not contain."),
        ({"buffer_names": ["nothing"]}, "buffer_names lists 'nothing', but module does not contain it"),
        ({"param_shapes": [1]}, "but a dict of names and shapes was expected"),
        ({"param_shapes": [{"w": "x"}]}, "gives 'w' the invalid shape"),
        ({"module": 1}, "dict was expected"),
    ],
)
def test_entries_that_no_model_file_has_are_named(client: dict[str, Any], words: str, tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "checkpoint", dense(), Save(stage=2, release=RELEASES["0.13.0"], client=client))
    refused(checkpoint, CorruptError, "model_states.pt", words)


def test_a_parameter_is_in_one_group(tmp_path: Path) -> None:
    shapes = [{name: tensor.shape for name, tensor in group.items()} for group in dense().groups]
    twice, other = next(iter(shapes[0])), next(iter(shapes[1]))
    shapes[1] = {twice if name == other else name: shape for name, shape in shapes[1].items()}
    save = Save(stage=2, release=RELEASES["0.8.0"], client={"param_shapes": shapes})
    checkpoint = write(tmp_path / "checkpoint", dense(), save)
    refused(checkpoint, CorruptError, "model_states.pt", f"{twice!r} occurs in two parameter groups")


def test_an_empty_latest_is_an_interrupted_save(tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "checkpoint", dense(), Save(stage=2))
    (checkpoint / "latest").write_text("\n")
    refused(checkpoint, CorruptError, "latest is empty", "the save was interrupted", TAG)


def test_stages_of_a_pipeline_are_not_ranks_to_be_converted_one_by_one(tmp_path: Path) -> None:
    parts, layers, _ = stages(2)
    checkpoint = write_pipeline(tmp_path / "checkpoint", parts, layers, Save(stage=1))
    refused(checkpoint, UsageError, "pipeline-parallel checkpoint: its stages form one model", per_rank=True)


@every("stage", [1, 2, 3])
def test_a_partition_of_the_wrong_length_is_named(stage: int, tmp_path: Path) -> None:
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    checkpoint = write(tmp_path / "checkpoint", dense(), Save(stage=stage, world=3))
    short = [torch.zeros(30), torch.zeros(4)]
    other = write(tmp_path / "other", dense(), Save(stage=stage, world=3, optim={key: short}))
    name = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(other / TAG / name, checkpoint / TAG / name)
    refused(checkpoint, CorruptError, "30" if stage == 3 else "group 0")


@every("stage", [1, 2, 3])
def test_shapes_that_name_more_than_there_is_are_refused_with_both_numbers(stage: int, tmp_path: Path) -> None:
    larger = dense()
    larger.groups[0]["more"] = values(50)
    save = Save(stage=stage, release=RELEASES["0.13.0"])
    checkpoint = write(tmp_path / "checkpoint", dense(), save)
    other = write(tmp_path / "other", larger, save)
    name = "zero_pp_rank_0_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
    shutil.copy(other / TAG / name, checkpoint / TAG / name)
    refused(checkpoint, CorruptError, "group 0", *(["61", "86"] if stage == 3 else ["121", "171"]))


def moved(tag: Path, source: str, target: str) -> None:
    """Put a file in the place of another's."""
    shutil.copy(tag / source, tag / target)


@every("stage", [2, 3])
def test_files_in_each_others_places_are_named_by_what_they_were_written_as(stage: int, tmp_path: Path) -> None:
    """Everything in them fits; an archive tells its first name."""
    tag = write(tmp_path / "checkpoint", dense(), Save(stage=stage, world=3)) / TAG
    one, two = (tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (1, 2))
    data = one.read_bytes(), two.read_bytes()
    two.write_bytes(data[0])
    one.write_bytes(data[1])
    refused(tag, CorruptError, f"{one} was written as {two.name}", "data-parallel rank 2", "data-parallel rank 1")
    # Other names say nothing of ranks.
    two.write_bytes(data[1])
    one.write_bytes(data[0].replace(one.stem.encode(), b"x" * len(one.stem)))
    check(tmp_path, tag, expected(dense()), expected_states(dense()))


def test_model_and_expert_files_of_other_ranks_are_named(tmp_path: Path) -> None:
    tag = write(tmp_path / "zero", replace(dense(), frozen=frozen()), Save(stage=3, world=3)) / TAG
    name = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
    moved(tag, name.format(2), name.format(1))
    refused(tag, CorruptError, f"{name.format(1)} was written as {name.format(2)}")
    moved(tag, name.format(2), name.format(0))
    refused(tag, CorruptError, f"{name.format(0)} was written as {name.format(2)}")
    tag = write(tmp_path / "moe", mixture(2), Save()) / TAG
    name = "layer_1_expert_{}_mp_rank_00_model_states.pt"
    moved(tag, name.format(2), name.format(3))
    refused(tag, CorruptError, f"{name.format(3)} was written as {name.format(2)}", "expert 3 of layer 1")


def test_model_files_of_zero_3_that_no_weight_depends_on_are_missed_and_must_be_whole(tmp_path: Path) -> None:
    tag = write(tmp_path / "checkpoint", dense(), Save(stage=3, world=3)) / TAG
    one, two = (tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in (1, 2))
    two.unlink()
    (warning,) = check(tmp_path, tag, expected(dense()), expected_states(dense()))
    assert "lacks the model file of rank 2" in warning
    one.write_bytes(one.read_bytes()[:-30])
    refused(tag, CorruptError, one.name, "truncated", "the files of the other ranks")
    one.write_bytes(b"")
    refused(tag, CorruptError, one.name, "empty")


@every("stage", [2, 3])
def test_a_model_file_of_another_step_is_named(stage: int, tmp_path: Path) -> None:
    """The tag says which of the two is right, unless it says neither."""
    checkpoint = write(tmp_path / "checkpoint", dense(), Save(stage=stage, client={"global_steps": 2}))
    refused(checkpoint, CorruptError, "after 2 steps", "after 3", "come from different saves.")
    (checkpoint / TAG).rename(checkpoint / "global_step2")  # steps may have been skipped
    check(tmp_path, checkpoint / "global_step2", expected(dense()))


def test_a_copy_is_known_though_no_archive_tells_its_name(tmp_path: Path) -> None:
    tag = write(tmp_path / "checkpoint", Model([{"w": values(40)}]), Save(stage=3)) / TAG
    one, two = (tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1))
    for path in (one, two):
        path.write_bytes(one.read_bytes().replace(one.stem.encode(), b"x" * len(one.stem)))
    refused(tag, CorruptError, one.name, two.name, "copy of the other")


def test_many_parameters_on_many_ranks_are_planned_at_once(tmp_path: Path) -> None:
    model = Model([{f"layer.{number}.weight": values(3, 5, seed=number) for number in range(100)}])
    checkpoint = write(tmp_path / "checkpoint", model, Save(stage=3, world=24, sub_group=10))
    taken, report = counted(
        lambda: convert(checkpoint, tmp_path / "model.safetensors", family="deepspeed", dry_run=True)
    )
    assert report.tensors == 100
    assert taken < 100 * 100 * 24


@every("stage", [None, 2])
def test_shapes_that_fit_into_the_padding_are_told_by_what_the_ranks_note(stage: int | None, tmp_path: Path) -> None:
    """Seven elements on four ranks are padded to eight."""
    model, more = Model([{"w": values(7)}]), Model([{"w": values(7), "more": values(1)}])
    save = Save(stage=stage, world=4, release=RELEASES["0.13.0"])
    tag = write(tmp_path / "checkpoint", model, save) / TAG
    other = write(tmp_path / "other", more, save) / TAG
    shutil.copy(other / "mp_rank_00_model_states.pt", tag / "mp_rank_00_model_states.pt")
    refused(tag, CorruptError, "8")


def test_paddings_that_contradict_the_partitions_are_refused_with_both_numbers(tmp_path: Path) -> None:
    wrong = Save(stage=None, world=2, optim={"group_paddings": [3]})
    refused(
        write(tmp_path / "1", Model([{"w": values(7)}]), wrong),
        CorruptError,
        "6 elements of padding",
        "With 7 elements",
    )
    fewer = Save(stage=2, optim={"param_alignment_paddings": [[0, 0, 0]]})
    refused(write(tmp_path / "2", dense(), fewer), CorruptError, "of 1 group,", "partitions of 2")


def test_partitions_of_a_length_that_padding_does_not_make_are_refused(tmp_path: Path) -> None:
    """Nine elements are padded to twice six: twice five are enough of them, and not what any rank had."""
    key = "single_partition_of_fp32_groups"
    save = Save(stage=2, world=2, round_robin=True, optim={key: [torch.ones(5)]})
    refused(
        write(tmp_path / "checkpoint", Model([{"w": values(9)}]), save), CorruptError, "has 5 elements", "but 6 were"
    )


def test_fragments_of_names_that_the_shapes_lack_are_refused(tmp_path: Path) -> None:
    tag = write(tmp_path / "checkpoint", Model([{"w": values(4)}]), Save()) / TAG
    other = write(tmp_path / "other", Model([{"v": values(4)}]), Save()) / TAG
    shutil.copy(other / "mp_rank_00_model_states.pt", tag / "mp_rank_00_model_states.pt")
    refused(tag, CorruptError, "param_slice_mappings", "'v'", "nowhere")


def test_a_model_file_without_a_module_is_refused(tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "checkpoint", dense(), Save(client={"module": None}))
    refused(checkpoint, CorruptError, "no module", "layer files")


def test_a_rank_file_cut_short_is_named_with_the_sizes_of_its_like(tmp_path: Path) -> None:
    tag = write(tmp_path / "checkpoint", dense(), Save(stage=3, world=3)) / TAG
    file = tag / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    file.write_bytes(file.read_bytes()[:2000])
    refused(tag, CorruptError, file.name, "2.00 kB", "the files of the other ranks")


def test_numbers_no_training_ever_had_are_refused_at_once(tmp_path: Path) -> None:
    refused(write(tmp_path / "1", dense(), Save(optim={"partition_count": [10**15] * 2})), CorruptError, "1000000000")
    tag = write(tmp_path / "2", dense(), Save()) / TAG
    optim = tag / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    optim.rename(tag / "bf16_zero_pp_rank_99999999999999_mp_rank_00_optim_states.pt")
    refused(tag, CorruptError, "lacks the optimizer files of ranks 1, 2, 3")
    tag = write(tmp_path / "3", dense(), Save()) / TAG
    (tag / "mp_rank_00_model_states.pt").rename(tag / "mp_rank_99999999999999_model_states.pt")
    refused(tag, CorruptError, "model-parallel ranks 1, 2, 3")


# ------------------------------------------------------------------------------------------------------ the right place


def run_directory(tmp_path: Path, names: list[str], stage: int = 2) -> Path:
    for number, name in enumerate(names):
        model = Model([{"w": values(5, seed=number)}])
        write(tmp_path / "run" / name, model, Save(stage=stage))
    (tmp_path / "run" / "logs").mkdir(parents=True)
    return tmp_path / "run"


def test_the_only_checkpoint_of_a_run_is_taken_and_named(tmp_path: Path) -> None:
    run = run_directory(tmp_path, ["checkpoint-500"])
    check(tmp_path, run, {"w": values(5)})
    source = open_source(run, family="deepspeed")
    assert source.path == str(run / "checkpoint-500" / TAG)
    assert source.notes == [
        f"Took {run}/checkpoint-500/{TAG}: the tag in `latest`, in the only checkpoint in {run}.",
        "Not converted: the optimizer. Use convert --optimizer PATH for its states.",
    ]
    assert open_source(run, family="deepspeed", states=True).notes == source.notes[:1]
    assert (source.facts["steps"], source.facts["optimizer"]) == (3, "step, exp_avg, exp_avg_sq")


def test_of_several_checkpoints_of_a_run_one_is_to_be_given(tmp_path: Path) -> None:
    run = run_directory(tmp_path, ["checkpoint-1000", "checkpoint-500"])
    refused(run, UsageError, "contains 2 checkpoints", "checkpoint-500, checkpoint-1000")
    (run / "checkpoint-500" / TAG).rename(run / "checkpoint-500/global_step500")
    check(tmp_path, run, {"w": values(5, seed=1)}, tag="global_step500")
    refused(run, UsageError, "no", "global_step501", tag="global_step501")


def test_a_lightning_checkpoint_is_taken_as_it_is(tmp_path: Path) -> None:
    model = Model([{"_forward_module.model.w": values(5), "_forward_module.model.b": values(2)}])
    directory = tmp_path / "checkpoints" / "epoch=0-step=3.ckpt"
    write_rank(directory / "checkpoint", model, Save())
    (directory / "latest").write_text("checkpoint")
    for path in (directory, tmp_path / "checkpoints", directory / "checkpoint"):
        check(tmp_path, path, expected(model))
    check(tmp_path, directory, {"w": values(5), "b": values(2)}, strip_prefix="_forward_module.model.")
    (hint,) = open_source(directory / "checkpoint").hints
    assert "--strip-prefix _forward_module.model." in hint


@every(
    "names, prefix",
    [
        (["module.a", "module.b.c"], "module."),
        (["model.a", "model.b"], "model."),
        (["_orig_mod.a"], "_orig_mod."),
        (["module.module.a", "module.module.b"], "module.module."),
        (["model.a", "head.b"], None),
        (["transformer.a", "transformer.b"], None),
    ],
)
def test_a_hint_says_when_every_name_has_a_wrappers_prefix(
    names: list[str], prefix: str | None, tmp_path: Path
) -> None:
    model = Model([{name: values(2, seed=number) for number, name in enumerate(names)}])
    hints = open_source(write(tmp_path / "checkpoint", model, Save()) / TAG).hints
    assert [re.search(r"--strip-prefix (\S+)", hint)[1] for hint in hints] == ([prefix] if prefix else [])


def test_any_file_of_a_tag_means_the_tag(tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "checkpoint", dense(), Save(stage=3))
    (checkpoint / "zero_to_fp32.py").touch()
    for path in (*(checkpoint / TAG).iterdir(), checkpoint / "latest", checkpoint / "zero_to_fp32.py"):
        source = open_source(path, family="deepspeed")
        assert source.path == str(checkpoint / TAG)
        assert any(str(checkpoint / TAG) in note for note in source.notes)
    (checkpoint / "notes.txt").write_text("This run went well.")
    refused(checkpoint / "notes.txt", OtherFamilyError, "notes.txt is a single file")


def test_tags_are_listed_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "checkpoint", Model([{"w": values(2)}]), Save())
    for step in (20, 100):
        shutil.copytree(checkpoint / TAG, checkpoint / f"global_step{step}")
    (checkpoint / "latest").unlink()
    refused(checkpoint, UsageError, "`latest`", "global_step3, global_step20, global_step100", "--tag")
    refused(checkpoint, UsageError, "'global_step10'", "Did you mean 'global_step100'", tag="global_step10")
    refused(checkpoint / TAG, UsageError, "is the directory of a tag", "global_step20", tag="global_step20")
    (checkpoint / "latest").write_text("gone")
    refused(checkpoint, CorruptError, "'gone'", "global_step3, global_step20")
    (checkpoint / "latest").write_text("../checkpoint/global_step3")
    refused(checkpoint, UnsafeError, "../checkpoint")
    check(tmp_path, checkpoint, {"w": values(2)}, tag="global_step20")


def test_two_files_of_one_rank_are_named_with_their_sizes(tmp_path: Path) -> None:
    tag = write(tmp_path / "checkpoint", mixture(2), Save()) / TAG
    shutil.copy(tag / "mp_rank_00_model_states.pt", tag / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    refused(tag, CorruptError, "are both files of data-parallel rank 0 of model-parallel rank 0", "kB")
    (tag / "zero_pp_rank_0_mp_rank_00_model_states.pt").unlink()
    shutil.copy(
        tag / "layer_0_expert_1_mp_rank_00_model_states.pt", tag / "layer_00_expert_1_mp_rank_00_model_states.pt"
    )
    refused(tag, CorruptError, "are both files of expert 1 of layer 0")


def test_the_command_line_says_all_this_too(tmp_path: Path) -> None:
    run = run_directory(tmp_path, ["checkpoint-500"], stage=3)
    output = tmp_path / "model.safetensors"
    done = ckptconv_here("zero-to-fp32", run, output, "--json")
    assert done.code == 0, done.err
    assert_same(load_file(output), {"w": values(5)})
    (run / "checkpoint-500" / TAG / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    done = ckptconv_here("zero-to-fp32", run, output)
    assert done.code == 4
    assert "rank 0" in done.err
    assert len(done.err.strip().splitlines()) == 1


def test_the_file_that_names_the_tag_is_no_checkpoint_but_for_the_command_of_deepspeed(tmp_path: Path) -> None:
    run = ZERO / "z2_bf16_tags_w2" / "checkpoint"
    ckptconv_here("convert", run / "latest", tmp_path / "out").refused(
        2, "contains only the name of a step", f"directory of the run, {run}"
    )
    done(ckptconv_here("zero-to-fp32", run / "latest", tmp_path / "out"))
    if "average" in COMMANDS:
        steps = sorted(run.iterdir())
        ckptconv_here("average", *steps, tmp_path / "avg").refused(2, "latest contains only the name of a step")
    torch.save({"a": torch.ones(2)}, tmp_path / "latest")
    done(ckptconv_here("convert", tmp_path / "latest", tmp_path / "a.safetensors"))
