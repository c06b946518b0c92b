"""Checkpoints on Azure's blob storage, which Azurite stands for: `make test-azure` installs it, and runs these."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from features.az.server import AZURITE, Azure, OnAzure, azure_server
from stores import ServedSuite

from ckptconv import convert
from ckptconv.errors import FailedError

pytestmark = pytest.mark.skipif(not AZURITE.exists(), reason="Azurite is not installed: `make test-azure` does it")


@pytest.fixture(scope="module")
def azure() -> Iterator[Azure]:
    pytest.importorskip("adlfs")
    with azure_server() as server:
        yield server


class TestAzure(ServedSuite):
    @pytest.fixture
    def place(self, azure: Azure) -> OnAzure:
        return OnAzure(azure)

    def test_a_container_that_is_not_there_is_named(self, azure: Azure, model: Path) -> None:
        with pytest.raises(FailedError, match=r"no-such-container.*container"):
            convert(model, "az://no-such-container/out.safetensors", storage_options=azure.options)

    def test_another_of_its_schemes_leads_to_the_same(self, azure: Azure, plain: Path, place: OnAzure) -> None:
        url = place.put(plain / "plain.safetensors", "plain.safetensors").replace("az://", "abfs://")
        convert(url, f"abfs://models/{place.prefix}/back.pt", storage_options=azure.options)
        assert "back.pt" in place.contents()
