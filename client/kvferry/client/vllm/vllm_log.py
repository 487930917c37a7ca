"""The logger of kvferry's lines in vLLM's log."""

import logging

# A child of vLLM's logger, which is the only one that vLLM configures: of other loggers, Python
# writes warnings as bare text, and nothing below.
vllm_log = logging.getLogger("vllm.kvferry")
