from collections.abc import Iterator

import pytest

from tests.models.table import Results, write


@pytest.fixture(scope="session")
def models_table(request: pytest.FixtureRequest) -> Iterator[Results]:
    results: Results = {}
    yield results
    if request.config.getoption("--models-table"):
        write(results)
