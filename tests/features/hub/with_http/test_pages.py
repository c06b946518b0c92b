"""The hub and HTTP together: the address of a page about a repository."""

from __future__ import annotations

from cells import looking
from checkpoints import ckptconv_here
from effort import every


@every(
    "page, meant",
    [
        ("https://huggingface.co/org/model", "hf://org/model."),
        ("https://huggingface.co/org/model/tree/main?not-for-all-audiences=true", "hf://org/model."),
        ("https://hf.co/org/model/blob/v2/sub/model.bin#L1", "hf://org/model@v2/sub/model.bin."),
        ("https://huggingface.co/datasets/org/data/", "hf://datasets/org/data."),
        ("hf.co/org/model/tree/main", "hf://org/model"),
        ("huggingface.co/org/model/blob/v2/x.bin", "hf://org/model"),
    ],
)
def test_a_page_of_a_repository_is_told_how_it_is_written(page: str, meant: str) -> None:
    for command in (("convert", page, "x.safetensors"), *((name, page) for name in looking())):
        ckptconv_here(*command).refused(2, page.partition("?")[0], "Hugging Face hub", meant)
