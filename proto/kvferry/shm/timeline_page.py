"""Layout of the timeline page, a sealed memfd of one page that the engine writes.

The client (client/timeline.py) creates it, the device worker of the daemon reads it. It holds two
unsigned 64-bit numbers, at these offsets in bytes.
"""

from __future__ import annotations

# The value that the engine's stream has reached. It only grows.
TIMELINE_VALUE_AT = 0
# Not 0 once the engine has revoked the timeline and with it all of its jobs.
TIMELINE_REVOKED_AT = 8
