"""Geometry: where the KV of which tokens lies, and which byte ranges must move."""
