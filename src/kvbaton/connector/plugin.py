"""Plugin: tells vLLM's factory the connector's name, through the `vllm.general_plugins` entry point."""

import logging

CONNECTOR_NAME = "BatonConnector"
CONNECTOR_MODULE = "kvbaton.connector"

_log = logging.getLogger(__name__)


def register() -> None:
    """Register the connector; vLLM calls this in every process, sometimes twice."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, CONNECTOR_MODULE, CONNECTOR_NAME)
    except ValueError as error:  # the factory's only complaint: the name is taken, mostly by ourselves
        _log.debug("%s", error)
