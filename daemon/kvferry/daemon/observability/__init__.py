"""The daemon's output for operators and routers: KV events, metrics, health over HTTP."""
