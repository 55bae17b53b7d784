"""Put kvbaton beside vLLM's own connectors: boot each contender, load it, report what differs."""
