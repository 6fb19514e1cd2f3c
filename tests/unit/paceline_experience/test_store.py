"""What is said of a store that cannot be used."""

from __future__ import annotations

import pytest

from paceline.errors import StoreError
from paceline_experience.store import Store


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://user:hush@127.0.0.1:1/0", "store_url redis://127.0.0.1:1/0: "),
        ("redis://127.0.0.1:1/0?password=hush", "store_url redis://127.0.0.1:1/0: "),
        ("unix://:hush@/nowhere/s", "store_url unix:///nowhere/s: "),
        ("mysql://user:hush@db/0", "store_url mysql://db/0: Redis URL must specify one of"),
        ("redis://user:hush@db:many", "store_url redis://db:many: "),
    ],
)
async def test_a_store_that_cannot_be_used_is_named_without_its_password(
    url: str, says: str
) -> None:
    with pytest.raises(StoreError) as caught:
        await Store.connect(url)
    assert str(caught.value).startswith(says)
    assert "hush" not in str(caught.value)
