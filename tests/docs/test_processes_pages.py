"""Pages whose blocks start one process per rank."""

from __future__ import annotations

import pytest

from docs.blocks import starts_processes, text_of, written
from docs.pages import Page

SMALLEST = """```python
from penstock.runtime import launch, rank


def which():
    return rank()


if __name__ == "__main__":
    ranks = launch(which, ranks=2, backend="gloo")
```
```python
>>> ranks
[0, 1]

```
"""


@pytest.mark.slow
@pytest.mark.usefixtures("folder", "torch_as_it_was")
@pytest.mark.parametrize("page", ["smallest", *filter(starts_processes, written())])
def test_blocks_on_processes(page: str) -> None:
    assert Page(page).run(SMALLEST if page == "smallest" else text_of(page)) > 0
