"""Which headers travel: end-to-end ones on both legs, hop-by-hop ones never."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvbaton.base.ids import RequestId

HeaderList = list[tuple[str, str]]
RawHeaders = Iterable[tuple[bytes, bytes]]

_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_REQUEST_OURS = frozenset({"host", "content-length", "expect", "x-request-id", "x-client-request-id"})
_LEG_OURS = frozenset({"accept-encoding", "content-type"})  # legs are JSON and must stay readable
_RESPONSE_OURS = frozenset({"content-length", "date", "server", "x-request-id", "x-client-request-id"})


@dataclass(frozen=True, slots=True)
class ClientHeaders:
    """A client's request headers, sorted out once.

    Attributes:
        end_to_end: what may travel on.
        client_request_id: the client's own name for the request.
    """

    end_to_end: tuple[tuple[str, str], ...]
    client_request_id: str | None

    def for_leg(self, request_id: RequestId, api_key: str | None) -> HeaderList:
        """Headers of one leg; the client's authorization wins over the router's key."""
        headers = [(name, value) for name, value in self.end_to_end if name not in _LEG_OURS]
        headers += [("content-type", "application/json"), ("accept-encoding", "identity")]
        headers.append(("x-request-id", request_id))
        return self._completed(headers, api_key)

    def for_passing_on(self, api_key: str | None) -> HeaderList:
        """Headers of a request that goes to an engine as it is."""
        headers = list(self.end_to_end)
        if self.client_request_id is not None:
            headers.append(("x-request-id", self.client_request_id))
        return self._completed(headers, api_key)

    def _completed(self, headers: HeaderList, api_key: str | None) -> HeaderList:
        if self.client_request_id is not None:
            headers.append(("x-client-request-id", self.client_request_id))
        if api_key is not None and not any(name == "authorization" for name, _ in headers):
            headers.append(("authorization", f"Bearer {api_key}"))
        return headers


def read_client_headers(raw: RawHeaders) -> ClientHeaders:
    """Sort out the headers of an ASGI scope."""
    pairs = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in raw]
    ids = [value for name, value in pairs if name == "x-request-id"]
    ids = ids or [value for name, value in pairs if name == "x-client-request-id"]
    kept = tuple((name, value) for name, value in _end_to_end(pairs) if name not in _REQUEST_OURS)
    return ClientHeaders(kept, ids[0] if ids else None)


def response_headers(upstream: Iterable[tuple[str, str]]) -> HeaderList:
    """An engine's response headers that may reach the client; lengths and ids are ours to set."""
    pairs = [(name.lower(), value) for name, value in upstream]
    return [(name, value) for name, value in _end_to_end(pairs) if name not in _RESPONSE_OURS]


def encode(headers: HeaderList) -> list[tuple[bytes, bytes]]:
    """Headers as ASGI wants them."""
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]


def _end_to_end(pairs: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    named = {
        token.strip().lower() for name, value in pairs if name == "connection" for token in value.split(",")
    } - {"close", "keep-alive"}
    for name, value in pairs:
        if name not in _HOP_BY_HOP and name not in named:
            yield name, value
