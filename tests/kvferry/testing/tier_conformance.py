"""What every tier must do. Run it against your own tier with one fixture, in a test module:

    import pytest
    from kvferry.testing.tier_conformance import *
    from kvferry.testing.tier_conformance import TierSetup

    @pytest.fixture
    def tier_setup(tmp_path):
        return TierSetup("my.module", {"path": str(tmp_path), "size": 4 << 20}, capacity=4 << 20)

The tests start `open_tier(options, memory)` of that module in the process of a tier, and talk to it
as the daemon does. Each gets a fresh tier, which must be empty. They check the bytes of everything
that they fetch. The interface, and the rules behind the tests: `kvferry.daemon.tiers`.
"""

import pytest

# So that a failed test shows the values that differ. It must precede the import.
pytest.register_assert_rewrite("kvferry.testing.tier_conformance_tests")

from kvferry.testing.tier_conformance_tests import *  # noqa: E402, F403
from kvferry.testing.tier_conformance_tests import __all__ as __all__  # noqa: E402
from kvferry.testing.tier_subjects import TierSetup as TierSetup  # noqa: E402
