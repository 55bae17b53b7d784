"""The router's settings, checked once at start."""

from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import urlsplit

from kvbaton.base.errors import ConfigError
from kvbaton.policy.view import EngineName, ModePreference


class ConnectorKind(StrEnum):
    """What the engines load; AUTO finds out, if need be by a one-token probe."""

    KVBATON = "kvbaton"
    AUTO = "auto"


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """How one router process behaves.

    Attributes:
        prefill: base URLs of prefill engines.
        decode: base URLs of decode engines.
        host: address to listen on.
        port: port to listen on; 0 takes a free one.
        mode: transfer mode asked for.
        connector: what the engines load.
        api_key: sent to the engines where the client sent no authorization of its own.
        secret: shared secret of the engines' side channel; needed to release what nobody fetches.
        retries: further attempts after a failed one, before any byte went to the client.
        request_timeout_s: from arrival to the first byte of the answer.
        idle_timeout_s: between two pieces of a streamed answer.
        connect_timeout_s: to open a connection to an engine.
        health_interval_s: between two checks of an engine that is up.
        check_timeout_s: for the answer to a check.
        backoff_s: first wait after a failed check; doubles up to `max_backoff_s`.
        max_backoff_s: longest wait between two checks of an engine that is down.
        max_body_bytes: largest request accepted.
        shutdown_grace_s: how long running answers may take to end after a stop signal.
        timing_headers: whether answers carry `Server-Timing`.
        kept_timelines: how many finished requests can be looked up.
    """

    prefill: tuple[EngineName, ...]
    decode: tuple[EngineName, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    mode: ModePreference = ModePreference.PUSH
    connector: ConnectorKind = ConnectorKind.AUTO
    api_key: str | None = field(default=None, repr=False)
    secret: bytes | None = field(default=None, repr=False)
    retries: int = 1
    request_timeout_s: float = 600.0
    idle_timeout_s: float = 300.0
    connect_timeout_s: float = 5.0
    health_interval_s: float = 5.0
    check_timeout_s: float = 10.0
    backoff_s: float = 0.25
    max_backoff_s: float = 5.0
    max_body_bytes: int = 64 * 2**20
    shutdown_grace_s: float = 30.0
    timing_headers: bool = False
    kept_timelines: int = 1000

    def __post_init__(self) -> None:
        """Refuse what could not work.

        Raises:
            ConfigError: a setting is missing or out of range.
        """
        for key, urls in (("--prefill", self.prefill), ("--decode", self.decode)):
            if not urls:
                raise ConfigError(key, None, "at least one engine URL")
            if len(set(urls)) != len(urls):
                raise ConfigError(key, ", ".join(urls), "each engine once")
        both = set(self.prefill) & set(self.decode)
        if both:
            raise ConfigError("--decode", ", ".join(sorted(both)), "an engine other than the prefill engines")
        if not 0 <= self.port <= 65535:
            raise ConfigError("--port", self.port, "0..65535")
        if not 0 <= self.retries <= 10:
            raise ConfigError("--retries", self.retries, "0..10")
        self._check_positive()

    def _check_positive(self) -> None:
        for key, value in (
            ("--request-timeout", self.request_timeout_s),
            ("--idle-timeout", self.idle_timeout_s),
            ("--connect-timeout", self.connect_timeout_s),
            ("--health-interval", self.health_interval_s),
            ("check_timeout_s", self.check_timeout_s),
            ("backoff_s", self.backoff_s),
            ("max_backoff_s", self.max_backoff_s),
            ("--max-body-bytes", self.max_body_bytes),
            ("--shutdown-grace", self.shutdown_grace_s),
        ):
            if not value > 0:
                raise ConfigError(key, value, "more than 0")


def parse_engine_url(flag: str, text: str) -> EngineName:
    """Read an engine's base URL as a user writes it.

    A trailing `/` or `/v1` is dropped, since clients are used to writing it; the scheme may be left out.

    Raises:
        ConfigError: not an http(s) URL with a host, or it carries a query, a fragment or credentials.
    """
    url = text.strip()
    if "://" not in url:
        url = f"http://{url}"
    expected = "an engine URL such as http://10.0.0.1:8100"
    try:
        parts = urlsplit(url)
        has_port = parts.port is None or parts.port > 0
    except ValueError:
        raise ConfigError(flag, text, expected) from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not has_port:
        raise ConfigError(flag, text, expected)
    if parts.query or parts.fragment or parts.username or parts.password:
        raise ConfigError(flag, text, f"{expected}, without query, fragment or credentials")
    path = parts.path.rstrip("/").removesuffix("/v1")
    return EngineName(f"{parts.scheme}://{parts.netloc}{path}")
