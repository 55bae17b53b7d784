"""kvbaton: hand a request's KV cache from a prefill engine to a decode engine while prefill still runs."""

__version__ = "0.1.0"

__all__ = ["__version__"]
