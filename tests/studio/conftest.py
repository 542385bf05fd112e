from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from penstock.studio.server import application
from studio.page import Page
from studio.page import page as running_page


@pytest.fixture(scope="session")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The page's code."""
    with running_page(tmp_path_factory.mktemp("page")) as found:
        yield found


@pytest.fixture(scope="session")
def client() -> Iterator[TestClient]:
    """A client of the server, like a browser on this machine; errors of the server are raised here."""
    with TestClient(application(), base_url="http://127.0.0.1:8765") as found:
        found.app.state.studio.worker.seconds = 300.0  # type: ignore[attr-defined] - a loaded machine is no reason to fail
        yield found
