"""What stages hand to each other between processes: as on virtual ranks, equal or refused with the same words."""

from __future__ import annotations

import cloudpickle
import pytest

from penstock.runtime.workers import Workers
from runtime import boundaries
from runtime.boundaries import CASES, assert_case, step

pytestmark = pytest.mark.filterwarnings("ignore:.*prototype.*:UserWarning")


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("case", CASES)
def test_case_on_processes(workers: Workers, case: str, name: str) -> None:
    cloudpickle.register_pickle_by_value(boundaries)
    found = workers.run(lambda: step(CASES[case], name), ranks=len(CASES[case].bodies))
    assert_case(CASES[case], found)
