"""The launcher is built once for all of these tests, into the user's cache, with the table that lies in the lab."""

from collections.abc import Iterator

import pytest

from lab.dry_run import kernel_table, why_not_built
from lab.dry_run.build import library


@pytest.fixture(scope="session")
def _launcher() -> Iterator[None]:
    """Build the launcher; skip with the reason where that cannot be. A newer table that is installed is left aside."""
    reason = why_not_built()
    if reason is not None:
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_table, "newest", kernel_table.recorded)
        library()
        yield
