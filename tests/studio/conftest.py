from __future__ import annotations

from collections.abc import Iterator

import pytest

from studio.page import Page
from studio.page import page as running_page


@pytest.fixture(scope="session")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The page's code."""
    with running_page(tmp_path_factory.mktemp("page")) as found:
        yield found
