#!/usr/bin/env python3
"""The server against PyPI `openai`, the client that most programs use: lists, chats, streams, errors, retries, async.

Command: openai_client_test.py --espalier build/release/espalier [--model FOLDER]
Part of ./test --full; needs the package 'openai' (written against 1.109) in the interpreter that runs it. The model is the
bundled pocket model, else the golden checkpoint: what is checked holds for any weights.
"""

import argparse
import asyncio
import json
import pathlib
import subprocess
import sys

try:
    import openai
except ImportError as missing:
    sys.exit(f"oracle: {missing}; this test needs the PyPI package 'openai' in {sys.executable}")

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROMPT = [{"role": "user", "content": "Say something short."}]


def expect(condition, what):
    if not condition:
        raise AssertionError(what)


def expect_error(kind, call, **fields):
    try:
        call()
    except kind as error:
        for name, value in fields.items():
            expect(getattr(error, name) == value, f"{kind.__name__}.{name}: expected {value}, found {getattr(error, name)}")
        return error
    raise AssertionError(f"expected {kind.__name__}")


def check_models(client, model):
    listed = client.models.list().data
    expect([m.id for m in listed] == [model], "models.list")
    expect(client.models.retrieve(model).id == model, "models.retrieve")
    expect_error(openai.NotFoundError, lambda: client.models.retrieve("gpt-4"), status_code=404, code="model_not_found")


def check_chat(client, model):
    whole = client.chat.completions.create(model=model, messages=PROMPT, temperature=0, max_tokens=24, seed=1)
    message = whole.choices[0].message
    expect(whole.object == "chat.completion" and message.role == "assistant", "chat shape")
    expect(whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens, "usage adds up")
    expect(isinstance(message.reasoning_content, str), "reasoning_content is passed through")

    chunks = list(client.chat.completions.create(model=model, messages=PROMPT, temperature=0, max_tokens=24, stream=True,
                                                 stream_options={"include_usage": True}))
    expect(chunks[-1].choices == [] and chunks[-1].usage == whole.usage, "the last chunk holds the usage")
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    expect("".join(d.content or "" for d in deltas) == message.content, "streamed content")
    reasoning = "".join(getattr(d, "reasoning_content", None) or "" for d in deltas)
    expect(reasoning == message.reasoning_content, "streamed reasoning")
    expect(chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason, "streamed finish_reason")

    with client.chat.completions.stream(model=model, messages=PROMPT, temperature=0, max_tokens=24,
                                        extra_body={"thinking": {"type": "disabled"}}) as stream:
        final = stream.get_final_completion()
    plain = client.chat.completions.create(model=model, messages=PROMPT, temperature=0, max_tokens=24,
                                           extra_body={"thinking": {"type": "disabled"}})
    expect(final.choices[0].message.content == plain.choices[0].message.content, "the stream helper's final message")


def check_completions(client, model):
    whole = client.completions.create(model=model, prompt="The", temperature=0, max_tokens=16)
    text = "".join(c.choices[0].text for c in client.completions.create(model=model, prompt="The", temperature=0, max_tokens=16,
                                                                        stream=True))
    expect(text == whole.choices[0].text and whole.object == "text_completion", "streamed completion")


def check_errors(client, model):
    chat = client.chat.completions.create
    error = expect_error(openai.BadRequestError, lambda: chat(model=model, messages=PROMPT, temperature=9), param="temperature")
    expect("temperature" in error.message, "the message names the field")
    expect_error(openai.BadRequestError, lambda: chat(model=model, messages=[]), param="messages")
    expect_error(openai.NotFoundError, lambda: chat(model="gpt-4", messages=PROMPT), code="model_not_found")
    expect_error(openai.BadRequestError, lambda: client.completions.create(model=model, prompt="a " * 20000),
                 code="context_length_exceeded")
    expect_error(openai.NotFoundError, lambda: client.embeddings.create(model=model, input="x"), status_code=404)
    expect_error(openai.AuthenticationError, lambda: client.with_options(api_key="wrong").models.list(),
                 code="invalid_api_key")


def check_leaving_a_stream(client, model):
    stream = client.chat.completions.create(model=model, messages=PROMPT, max_tokens=900, stream=True,
                                            extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    quick = client.with_options(timeout=60).chat.completions.create(model=model, messages=PROMPT, max_tokens=1)
    expect(quick.usage.completion_tokens <= 1, "the next request is served after a stream was left")


async def check_async_and_retries(url, model):
    # One place in the queue: of many requests at once most are refused with 429, and all succeed by the client's retries.
    async with openai.AsyncOpenAI(base_url=url, api_key="sk-test", max_retries=40) as client:
        replies = await asyncio.gather(*(client.completions.create(model=model, prompt="The", temperature=0, max_tokens=8)
                                         for _ in range(8)))
    expect(len({reply.choices[0].text for reply in replies}) == 1, "concurrent greedy replies are equal")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--espalier", required=True)
    parser.add_argument("--model")
    arguments = parser.parse_args()
    pocket = ROOT / "models/pocket"
    model = arguments.model or str(pocket if (pocket / "config.json").exists() else ROOT / "tests/golden/model/tiny-a")
    keys = ROOT / "build/openai_client_test.keys"
    keys.parent.mkdir(exist_ok=True)
    keys.write_text("sk-test\n")
    server = subprocess.Popen([arguments.espalier, "serve", model, "--port", "0", "--json", "--quiet", "--context", "1024",
                               "--max-queue", "1", "--api-key-file", str(keys)], stdout=subprocess.PIPE, text=True)
    try:
        info = json.loads(server.stdout.readline())
        url, name = info["url"] + "/v1", info["model"]
        client = openai.OpenAI(base_url=url, api_key="sk-test", max_retries=0)
        for check in (check_models, check_chat, check_completions, check_errors, check_leaving_a_stream):
            check(client, name)
            print(check.__name__, "ok")
        asyncio.run(check_async_and_retries(url, name))
        print("check_async_and_retries ok")
    finally:
        server.terminate()
        code = server.wait(60)
        keys.unlink()
    expect(code == 0, f"the server ended with {code}")
    print(f"openai {openai.__version__}: all checks hold")


if __name__ == "__main__":
    main()
