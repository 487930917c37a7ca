"""How long tests wait, in seconds, before they fail. They end sooner if what they wait for happens.

The limits must not depend on the speed of the machine: with all cores busy, starting a daemon takes
ten seconds. TIMEOUT is for what must happen at some time.
"""

from kvferry.testing.engine import TIMEOUT

__all__ = ["PROMPTLY", "TIMEOUT"]

# For what must not wait until a TIMEOUT has passed.
PROMPTLY = 40.0
