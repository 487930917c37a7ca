"""What operators and routers see of a daemon: KV events, metrics, health over HTTP."""
