"""What became cached and what went, as vLLM's KV events over ZMQ (extra `events`), for routers."""
