"""The connector needs vLLM; without it only what reads settings and parameters can be tested."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]
