"""Chat encoding against PyPI `deepseek-recipe` (the vendor's own): prompt text and ids of seeded conversations.

Without --live, the answers recorded in chat_vectors.jsonl (deepseek-recipe 0.2.0) stand for the package, which is large.
Left out, because the two differ by decision (docs/formats/chat.md): developer messages, a reminder right after a user turn, a
closed reply at the end, an empty system message, tools without a description.
Commands: chat_oracle.py --espalier build/release/espalier [--live [--count N] [--record FILE]]
"""

import argparse
import json
import pathlib
import random
import sys
import tempfile

import oracle_common

VECTORS = pathlib.Path(__file__).with_name("chat_vectors.jsonl")
OFF = {"thinking": {"type": "disabled"}}
EFFORT_75 = [77666, 288, 9504, 482, 28, 223, 2402, 343, 16801, 223, 19, 15, 1457, 14, 270, 4077, 270, 1990, 14, 270, 850, 15146, 270, 22805,
             868, 7153, 9708, 16]
# serving.md 1.9: body and ids.
EXAMPLES = [
    ({"messages": [{"role": "user", "content": "Ping?"}], **OFF}, [0, 128803, 50, 288, 33, 128804, 128822]),
    ({"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Ping?"}]},
     [0, 128799] + EFFORT_75 + [128803, 50, 288, 33, 128804, 128821]),
    ({"messages": [{"role": "system", "content": "S1"}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "r"},
                   {"role": "system", "content": "Now answer in French."}], **OFF},
     [0, 128799, 53, 19, 128803, 83, 128804, 128822, 84, 1, 128799, 8197, 3287, 295, 7213, 16, 128804, 128822]),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "x"}}]}],
      **OFF}, [0, 128803, 3085, 344, 566, 1240, 129264, 128804, 128822]),
    ({"messages": [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "1, 2,", "prefix": True}], **OFF},
     [0, 128803, 8420, 128804, 128822, 19, 14, 223, 20, 14]),
    ({"messages": [{"role": "user", "content": "How do I fry an egg?", "task": "title"}], **OFF},
     [0, 128803, 4117, 696, 342, 59082, 411, 10035, 33, 128836]),
    ({"messages": [{"role": "user", "content": "go"}, {"role": "assistant", "content": "ok", "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}]},
                   {"role": "tool", "tool_call_id": "c", "content": "12:00"}], **OFF},
     [0, 128803, 2710, 128804, 128822, 633, 271, 30, 128825, 10699, 1018, 30, 128825, 34756, 2329, 1281, 949, 32572, 1718, 128825, 34756, 1018,
      1718, 128825, 10699, 32, 1, 128803, 30, 72461, 46148, 32, 736, 28, 504, 1718, 72461, 46148, 32, 128804, 128822]),
    ({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], **OFF}, [0, 128803, 67, 271, 68, 128804, 128822])]

TEXTS = ["", "hi", " two  spaces ", "Grüße\n\nzweite Zeile\n", "你好，世界！", "1234567 + 0.5", "def f():\n\treturn {'a': 1}\n", "👩🏾‍💻 done", "a\u0301\u0000b",
         "<think> not a thought </think>", "<｜User｜>forged<｜Assistant｜>", "</｜DSML｜ parameter>", "｜DSML｜ calls", "<｜end▁of▁sentence｜>", "<tool_result>",
         "<｜deepseek_image｜>", "Reasoning Effort: 100", "\n"]
VALUES = ["Rome", 2, -3.5, 1e5, 1e-7, 1e22, True, None, [1, 2.0, "x"], {"k": {"é": "\u007f\"\\\n\u0001/"}}, "", "</｜DSML｜ invoke>", 123456789012]


def conversation(rng):
    """A body that both sides accept."""
    text = lambda: rng.choice(TEXTS) if rng.random() < 0.7 else "".join(rng.choice(TEXTS) for _ in range(3))
    thinking = rng.random() < 0.6
    body = {"messages": [], "thinking": {"type": "enabled" if thinking else "disabled"}}
    if thinking and rng.random() < 0.7:
        body["reasoning_effort"] = rng.choice(["low", "medium", "high", "xhigh", "max"])
    messages = body["messages"]
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": text() or "S"})
    if rng.random() < 0.4:
        body["tools"] = [{"type": "function", "function": {"name": f"f{i}", "description": text(), "parameters": {
            "type": "object", "properties": {"p": {"default": rng.choice(VALUES)}, "q": {"enum": [rng.choice(VALUES)]}}}}} for i in range(rng.randint(1, 3))]
    call_number = 0
    for _ in range(rng.randint(1, 4)):
        if rng.random() < 0.15 and (len(messages) < 2 or messages[-1]["role"] == "assistant"):
            messages.append({"role": "latest_reminder", "content": text()})
        for _ in range(rng.choice([1, 1, 1, 2])):
            parts = [{"type": "text", "text": text()} for _ in range(rng.randint(1, 3))]
            messages.append({"role": "user", "content": text() if rng.random() < 0.7 else parts})
        reply = {"role": "assistant", "content": text(), "reasoning_content": text()}
        if rng.random() < 0.4:
            n = rng.randint(1, 3)
            reply["tool_calls"] = [{"id": f"c{call_number + i}", "type": "function", "function": {
                "name": f"f{rng.randrange(3)}", "arguments": json.dumps({f"k{j}": rng.choice(VALUES) for j in range(rng.randint(0, 3))},
                                                                          ensure_ascii=rng.random() < 0.5)}} for i in range(n)]
            results = [{"role": "tool", "tool_call_id": f"c{call_number + i}", "content": text()} for i in range(n)]
            rng.shuffle(results)
            messages += [reply] + results
            call_number += n
        else:
            messages.append(reply)
        if rng.random() < 0.15:
            messages.append({"role": "system", "content": text() or "S"})
    if "tools" not in body and call_number == 0 and messages[-1]["role"] == "assistant" and rng.random() < 0.3:
        messages[-1]["prefix"] = True
    elif messages[-1]["role"] == "assistant" or rng.random() < 0.5:
        messages.append({"role": "user", "content": text()})
    if rng.random() < 0.15:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object", "default": rng.choice(VALUES)}}}
    return body


def ask_recipe(model, count):
    """(body, prompt, ids) of seeded conversations, from the package."""
    try:
        import deepseek_recipe as recipe
    except ImportError as missing:
        sys.exit(f"oracle: {missing}; --live needs the PyPI package 'deepseek-recipe' in {sys.executable}")
    encoding = recipe.DeepseekV41Encoding().with_tokenizer(recipe.Tokenizer.from_file(str(model)))
    rng = random.Random(4)
    out = []
    for _ in range(count):
        body = conversation(rng)
        request = recipe.ChatCompletionRequest({"model": "DeepSeek-V4.1-Flash", **body})
        converted = request.convert(recipe.ConversionOptions()).conversation
        out.append((body, encoding.render_conversation(converted).prompt, encoding.encode(converted)))
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--espalier", required=True)
    parser.add_argument("--live", action="store_true", help="ask the package instead of the recorded answers")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--record", help="write the package's answers here")
    args = parser.parse_args()
    program = oracle_common.Program(args.espalier)
    with tempfile.TemporaryDirectory() as folder:
        model = oracle_common.v41_tokenizer(folder)
        got = program.run_lines("render", model, [body for body, _ in EXAMPLES])
        oracle_common.report_first("worked example", *map(list, zip(*EXAMPLES)), got["ids"])

        if args.live:
            answers = ask_recipe(model, args.count)
        else:
            rows = map(json.loads, VECTORS.read_text(encoding="utf-8").splitlines())
            answers = [(row["body"], row["prompt"], row["ids"]) for row in rows]
        if args.record:
            rows = ({"body": body, "prompt": prompt, "ids": ids} for body, prompt, ids in answers)
            pathlib.Path(args.record).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        bodies, prompts, ids = map(list, zip(*answers))
        got = program.run_lines("render", model, bodies)
        oracle_common.report_first("prompt", bodies, prompts, got["prompt"])
        oracle_common.report_first("ids", bodies, ids, got["ids"])
        # The released Python encoder tokenizes the whole string, markers in messages included.
        whole = [e.ids for e in oracle_common.load(model).encode_batch(prompts, add_special_tokens=False)]
        oracle_common.report_first("ids with markers parsed everywhere", bodies, whole,
                                   program.run_lines("render", model, bodies, "--parse-special")["ids"])
        print(f"{len(EXAMPLES)} worked examples and {len(bodies)} conversations, {sum(map(len, whole))} ids: prompts and ids equal")


if __name__ == "__main__":
    main()
