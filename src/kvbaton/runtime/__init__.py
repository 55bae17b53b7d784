"""Driver: the courier, one thread per worker rank that owns agent, peers and handoffs, and the engine's directory."""
