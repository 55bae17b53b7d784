"""State machines of one handoff: consumer, producer, lease and peer. Pure: events in, effects out, time is an argument."""
