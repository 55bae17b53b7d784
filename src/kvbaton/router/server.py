"""The process around the app: uvicorn, its event loop, and how both stop."""

import logging
import signal
from types import FrameType

import uvicorn

from kvbaton.router.app import RouterApp
from kvbaton.router.config import RouterConfig
from kvbaton.router.release import Releaser
from kvbaton.router.side_channel import SideChannelReleaser

_log = logging.getLogger(__name__)


def make_server(app: RouterApp, log_level: str = "info") -> uvicorn.Server:
    """Prepare a server for `app`; SIGTERM and SIGINT stop it gracefully."""
    config = app.config
    return uvicorn.Server(
        uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            lifespan="on",
            log_level=log_level,
            access_log=False,  # a line per request costs more than it tells; see /kvbaton/requests
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=max(1, round(config.shutdown_grace_s)),
            backlog=4096,
            ws="none",
        )
    )


def serve_forever(config: RouterConfig, log_level: str = "info", releaser: Releaser | None = None) -> int:
    """Run a router until a signal stops it; returns the exit status."""
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    server = make_server(RouterApp(config, releaser or SideChannelReleaser(config.secret)), log_level)
    _log.info(
        "kvbaton router on http://%s:%d: %d prefill, %d decode, mode %s, connector %s",
        config.host,
        config.port,
        len(config.prefill),
        len(config.decode),
        config.mode,
        config.connector,
    )
    # uvicorn stops gracefully, then raises the signal again for whoever handled it before: that is an ordinary end.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _exit)
    server.run()
    return 0 if server.started else 1


def _exit(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)
