"""Tests that every tier must pass. Run them with your own tier by one fixture in a test module:

    import pytest
    from kvferry.testing.tier_conformance import *
    from kvferry.testing.tier_conformance import TierSetup

    @pytest.fixture
    def tier_setup(tmp_path):
        return TierSetup("my.module", {"path": str(tmp_path), "size": 4 << 20}, capacity=4 << 20)

The module may also be in the current directory, or beside the test module. The tests call
`open_tier(options, memory)` in the process of a tier, and use the tier as the daemon does. If it
cannot be opened, each test fails at once with the reason. Each test opens a new tier, which must be
empty. They check the bytes of all fetched blocks. A tier whose blocks outlive its process, and a
SharedTier, have more tests, if the TierSetup says so: `keeps` and `shared`. `kvferry.daemon.tiers`
documents the interface and its rules.
"""

import pytest

# So that a failed test shows the values that differ. It must precede the import.
pytest.register_assert_rewrite("kvferry.testing.tier_conformance_tests")

from kvferry.testing.tier_conformance_tests import *  # noqa: E402, F403
from kvferry.testing.tier_conformance_tests import __all__ as __all__  # noqa: E402
from kvferry.testing.tier_subjects import TierSetup as TierSetup  # noqa: E402
