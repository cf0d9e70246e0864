"""The pretended device for every test of this folder, skipped where there is no compiler."""

from __future__ import annotations

from collections.abc import Iterator

import pretended
import pytest


@pytest.fixture(scope="session", autouse=True)
def device() -> str:
    """ "pretend:0", built and registered."""
    try:
        pretended.install()
    except pretended.NoCompiler as error:
        pytest.skip(str(error))
    return f"{pretended.NAME}:0"


@pytest.fixture
def there(device: str) -> Iterator[str]:
    """The same where `torch.accelerator` finds it."""
    with pretended.there():
        yield device
