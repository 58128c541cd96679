"""How tests are spread over the processes of `pytest -n`: by file."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]


class ByFile(LoadScopeScheduling):  # type: ignore[misc]
    """A file's tests go to one process, which makes its databases, workers and kernels once.

    Spread test by test, every process makes them, at the same time: each kernel was compiled twice.
    The four tests of `test_kill.py` share nothing and take the longest.
    """

    def __init__(self, config: pytest.Config, log: Any) -> None:
        """Keep the order of the collection, where xdist begins with the file of the most tests."""
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        return nodeid if file.endswith("test_kill.py") else file
