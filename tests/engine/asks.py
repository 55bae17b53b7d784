"""Requests and answers: what is asked of an engine, and what must be equal whoever answers."""

import asyncio
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import aiohttp

BLOCK_TOKENS = 128
CHUNK_TOKENS = 1024
FIRST_PLAIN_ID = 300  # below are special tokens and single bytes
VOCABULARY = 4096
EDGES = (
    1, 2, 3, 17, 31, 32, 33, 127, 128, 129, 130, 255, 256, 257, 384, 512, 640, 1023, 1024, 1025, 1151, 1152, 1153,
    2047, 2048, 2049, 2176, 3071, 3072, 3073, 4096, 5000, 5999, 6000,
)  # fmt: skip
WORDS = (
    "relay", "baton", "runner", "lane", "track", "coach", "start", "finish", "sprint", "curve", "hand", "over", "quick",
    "slow", "token", "cache", "engine", "prefill", "decode", "def", "class", "return", "import", "value", "async", "await",
)  # fmt: skip
REQUEST_LIMIT_S = 240.0
CONCURRENCY = 16
FLOAT32_NOISE = 2e-3


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `about` says what is special about it."""

    about: str
    path: str
    body: Mapping[str, object]

    @property
    def seeded(self) -> bool:
        return "seed" in self.body

    def but(self, **changes: object) -> "Ask":
        return replace(self, body={**self.body, **changes})


@dataclass(slots=True)
class Choice:
    """One choice of an answer."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(slots=True)
class Answer:
    """What a server said, streamed or not."""

    status: int
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, object] | None = None
    error: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.status == 200 and self.error is None

    @property
    def tokens(self) -> list[list[int]]:
        return [self.choices[index].tokens for index in sorted(self.choices)]

    def usage_number(self, name: str) -> int | None:
        value = None if self.usage is None else self.usage.get(name)
        return value if isinstance(value, int) else None


# --- making requests --------------------------------------------------------------------------------------------------


def make_asks(seed: int, count: int) -> list[Ask]:
    """Return varied requests, the same ones for the same seed: every edge length, shared prefixes, repeats, all shapes."""
    rng = random.Random(seed)
    stems = [random_tokens(rng, 4000) for _ in range(3)]
    asks: list[Ask] = []
    for number in range(count):
        match number % 6:
            case 0 | 3:
                length = EDGES[number // 3 % len(EDGES)]
                asks.append(completion(rng, f"{length} tokens", random_tokens(rng, length)))
            case 1:
                length = min(6000, int(math.exp(rng.uniform(0, math.log(6000)))) + 1)
                asks.append(completion(rng, f"{length} random tokens", random_tokens(rng, length)))
            case 2:
                stem, shared = rng.choice(stems), rng.choice((64, 128, 200, 1024, 2000, 2048, 4000))
                tail = random_tokens(rng, rng.choice((1, 30, 128, 700)))
                asks.append(completion(rng, f"{shared} shared tokens", stem[:shared] + tail))
            case 4:
                asks.append(chat(rng))
            case _:
                earlier = rng.choice([ask for ask in asks if ask.path == "/v1/completions"])
                asks.append(completion(rng, f"again: {earlier.about}", list(earlier.body["prompt"])))  # type: ignore[call-overload]
    return asks


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(FIRST_PLAIN_ID, VOCABULARY) for _ in range(count)]


def shape(rng: random.Random, *, may_seed: bool) -> dict[str, object]:
    """Return sampling and output options.

    A plain vLLM 0.32 on CPU dies of a seeded request whose prefill takes several chunks, so long ones are greedy here.
    """
    body: dict[str, object] = {
        "max_tokens": rng.choice((1, 2, 8, 12, 24)),
        "ignore_eos": True,
        "return_token_ids": True,
    }
    if not may_seed or rng.random() < 0.4:
        body["temperature"] = 0
    else:
        body |= {
            "temperature": rng.choice((0.7, 1.0)),
            "top_p": rng.choice((1.0, 0.9)),
            "seed": rng.randrange(1 << 30),
        }
    if rng.random() < 0.5:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


def completion(rng: random.Random, about: str, prompt: Sequence[int]) -> Ask:
    body = shape(rng, may_seed=len(prompt) <= CHUNK_TOKENS) | {"prompt": list(prompt)}
    if rng.random() < 0.4:
        body["logprobs"] = 3
    return Ask(about, "/v1/completions", body)


def chat(rng: random.Random) -> Ask:
    num_words = rng.choice((1, 5, 40, 300, 1500))
    words = " ".join(rng.choice(WORDS) for _ in range(num_words))
    body = shape(rng, may_seed=num_words <= 300) | {"messages": [{"role": "user", "content": words}]}
    if rng.random() < 0.4:
        body |= {"logprobs": True, "top_logprobs": 3}
    return Ask(f"chat of {num_words} words", "/v1/chat/completions", body)


# --- asking -----------------------------------------------------------------------------------------------------------


def session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=REQUEST_LIMIT_S), connector=aiohttp.TCPConnector(limit=0)
    )


async def ask(
    http: aiohttp.ClientSession,
    url: str,
    model: str,
    request: Ask,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """Send a request and read the whole answer; a connection that breaks is an answer with status 0."""
    started_s = asyncio.get_running_loop().time()
    body = {"model": model, **request.body}
    try:
        async with http.post(f"{url}{request.path}", json=body, headers=headers) as response:
            answer = Answer(response.status, headers=dict(response.headers))
            if response.status != 200:
                answer.error = (await response.read()).decode(errors="replace")
            elif response.content_type == "text/event-stream":
                await read_stream(response, answer)
            else:
                read_object(answer, json.loads(await response.read()))
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        answer = Answer(0, error=f"{type(error).__name__}: {error}")
    answer.seconds = asyncio.get_running_loop().time() - started_s
    return answer


async def ask_all(url: str, model: str, asks: Sequence[Ask], concurrency: int) -> list[Answer]:
    """Send requests with at most so many at once; answers come in the order of the requests."""
    gate = asyncio.Semaphore(concurrency)
    async with session() as http:

        async def one(request: Ask) -> Answer:
            async with gate:
                return await ask(http, url, model, request)

        return list(await asyncio.gather(*(one(request) for request in asks)))


async def ask_alone(url: str, model: str, asks: Sequence[Ask]) -> list[Answer]:
    """Ask one plain engine: seeded requests one by one, so that none is cut into chunks, the others four at once."""
    greedy = iter(await ask_all(url, model, [each for each in asks if not each.seeded], 4))
    seeded = iter(await ask_all(url, model, [each for each in asks if each.seeded], 1))
    return [next(seeded if each.seeded else greedy) for each in asks]


async def read_stream(response: aiohttp.ClientResponse, answer: Answer) -> None:
    done = False
    async for raw in response.content:
        line = raw.strip()
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            done = True
            continue
        event = json.loads(data)
        if "error" in event:
            answer.error = json.dumps(event["error"])
            return
        read_object(answer, event)
    if not done:
        answer.error = "the stream ended before [DONE]"


def read_object(answer: Answer, body: Mapping[str, object]) -> None:
    """Add a whole answer, or one event of a streamed one."""
    if isinstance(body.get("usage"), dict):
        answer.usage = body["usage"]  # type: ignore[assignment]
    for raw in body.get("choices", ()):  # type: ignore[attr-defined]
        choice = answer.choices.setdefault(raw["index"], Choice())
        choice.tokens += raw.get("token_ids") or []
        part = raw.get("delta") or raw.get("message") or raw
        choice.text += part.get("text") or part.get("content") or ""
        choice.logprobs += read_logprobs(raw.get("logprobs"))
        choice.finish_reason = raw.get("finish_reason") or choice.finish_reason


def read_logprobs(raw: Mapping[str, object] | None) -> list[float]:
    if not raw:
        return []
    if raw.get("content"):
        return [entry["logprob"] for entry in raw["content"]]  # type: ignore[attr-defined]
    return list(raw.get("token_logprobs") or ())  # type: ignore[call-overload]


# --- comparing --------------------------------------------------------------------------------------------------------


def differences(request: Ask, expected: Answer, found: Answer, logprob_noise: float) -> list[str]:
    """Return in words how an answer differs from the expected one."""
    if not found.ok:
        return [f"failed with {found.status}: {(found.error or '')[:300]}"]
    wrong: list[str] = []
    if expected.tokens != found.tokens:
        wrong.append(f"tokens {found.tokens} instead of {expected.tokens}")
    for index, choice in expected.choices.items():
        other = found.choices.get(index)
        if other is None:
            wrong.append(f"choice {index} is missing")
            continue
        if (choice.text, choice.finish_reason) != (other.text, other.finish_reason):
            wrong.append(f"text or finish reason of choice {index}")
        if len(choice.logprobs) != len(other.logprobs):
            wrong.append(f"{len(other.logprobs)} logprobs instead of {len(choice.logprobs)}")
    worst = logprob_distance(expected, found)
    if worst > logprob_noise:
        wrong.append(f"a logprob is off by {worst:.4g}")
    wrong += [
        f"usage {name} {found.usage_number(name)} instead of {expected.usage_number(name)}"
        for name in ("prompt_tokens", "completion_tokens", "total_tokens")
        if expected.usage_number(name) != found.usage_number(name)
    ]
    return wrong


def logprob_distance(expected: Answer, found: Answer) -> float:
    """Return the largest difference between two answers' logprobs."""
    return max((abs(one - other) for one, other in logprob_pairs(expected, found)), default=0.0)


def logprob_pairs(expected: Answer, found: Answer) -> list[tuple[float, float]]:
    """Return the logprobs of tokens that both chose after the same tokens; after that, nothing can be compared."""
    pairs: list[tuple[float, float]] = []
    for index, choice in expected.choices.items():
        other = found.choices.get(index)
        if other is None:
            continue
        for ours, theirs, *both in zip(
            choice.tokens, other.tokens, choice.logprobs, other.logprobs, strict=False
        ):
            if ours != theirs:
                break
            pairs.append((both[0], both[1]))
    return pairs


def compare(expected: Sequence[tuple[Ask, Answer]], answers: Sequence[Answer]) -> list[str]:
    """Return in words what differs, for all requests."""
    return [
        f"{request.about} {dict(request.body, prompt='...')}: {difference}"
        for (request, alone), found in zip(expected, answers, strict=True)
        for difference in differences(request, alone, found, FLOAT32_NOISE)
    ]
