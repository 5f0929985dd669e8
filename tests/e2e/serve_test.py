"""The HTTP API of the real program: replies, streams, errors. One server for all tests of this file."""
import json
import threading
import unittest

from serve_client import Server, model_dir, run

CHAT = {"messages": [{"role": "user", "content": "Say something short."}], "temperature": 0, "max_tokens": 24}
QUIET = dict(CHAT, thinking={"type": "disabled"})


class ServeTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server("--max-body-mib", "1", "--draft", "off")

    @classmethod
    def tearDownClass(cls):
        code = cls.server.stop()
        assert code == 0, "exit code %d after SIGTERM" % code

    def chat(self, body, status=200):
        found, _, reply = self.server.post("/v1/chat/completions", body)
        self.assertEqual(found, status, reply)
        return reply

    def refused(self, path, body, status, code=None, param=None, method="POST"):
        found, headers, reply = self.server.call(method, path, body)
        self.assertEqual(found, status, reply)
        error = reply["error"]
        self.assertEqual(set(error), {"message", "type", "param", "code"})
        self.assertEqual(error["type"], "invalid_request_error")
        if code:
            self.assertEqual(error["code"], code)
        if param:
            self.assertEqual(error["param"], param)
        self.assertIn("x-request-id", headers)
        return error["message"]

    def test_health_models_version(self):
        self.assertEqual(self.server.call("GET", "/health")[2], {"status": "ok"})
        card = self.server.call("GET", "/v1/models")[2]["data"][0]
        self.assertEqual(card["id"], self.server.model)
        self.assertEqual(card["max_model_len"], 1024)
        self.assertEqual(self.server.call("GET", "/v1/models/" + self.server.model)[2], card)
        self.assertEqual(self.server.call("GET", "/v1/models/other")[0], 404)

    def test_chat_reply_shape_and_usage(self):
        reply = self.chat(QUIET)
        self.assertEqual(reply["object"], "chat.completion")
        self.assertEqual(reply["model"], self.server.model)
        choice = reply["choices"][0]
        self.assertEqual(choice["message"]["role"], "assistant")
        self.assertIsInstance(choice["message"]["content"], str)
        self.assertNotIn("reasoning_content", choice["message"])
        self.assertIn(choice["finish_reason"], ("stop", "length"))
        usage = reply["usage"]
        self.assertEqual(usage["total_tokens"], usage["prompt_tokens"] + usage["completion_tokens"])
        self.assertLessEqual(usage["completion_tokens"], 24)
        if choice["finish_reason"] == "length":
            self.assertEqual(usage["completion_tokens"], 24)

    def test_thinking_chats_split_the_reasoning(self):
        message = self.chat(CHAT)["choices"][0]["message"]
        self.assertIn("reasoning_content", message)
        self.assertEqual(message["reasoning"], message["reasoning_content"])
        self.assertNotIn("</think>", message["content"])

    def test_stream_equals_whole_reply_at_temperature_zero(self):
        for body in (CHAT, QUIET, dict(QUIET, stop=["e", "zzz"])):
            whole = self.chat(body)
            events = self.server.stream("/v1/chat/completions", dict(body, stream_options={"include_usage": True}))
            self.assertEqual(events[0]["choices"][0]["delta"], {"role": "assistant", "content": ""})
            self.assertEqual(len({(e["id"], e["created"], e["model"]) for e in events}), 1)
            self.assertEqual(events[-1]["choices"], [])
            self.assertEqual(events[-1]["usage"], whole["usage"])
            self.assertTrue(all(e["usage"] is None for e in events[:-1]))
            deltas = [e["choices"][0]["delta"] for e in events[:-1]]
            joined = {key: "".join(d.get(key, "") for d in deltas) for key in ("content", "reasoning_content")}
            message = whole["choices"][0]["message"]
            self.assertEqual(joined["content"], message["content"])
            self.assertEqual(joined["reasoning_content"], message.get("reasoning_content", ""))
            reasons = [e["choices"][0]["finish_reason"] for e in events[:-1]]
            self.assertEqual(reasons[-1], whole["choices"][0]["finish_reason"])
            self.assertTrue(all(r is None for r in reasons[:-1]))

    def test_text_completions_stream_and_token_prompts(self):
        body = {"prompt": "The", "temperature": 0, "max_tokens": 16}
        whole = self.server.post("/v1/completions", body)[2]
        self.assertEqual(whole["object"], "text_completion")
        events = self.server.stream("/v1/completions", body)
        self.assertEqual("".join(e["choices"][0]["text"] for e in events), whole["choices"][0]["text"])
        tokens = json.loads(run("tokenize", model_dir(), "The", "--json").stdout)["ids"]
        again = self.server.post("/v1/completions", dict(body, prompt=[0] + [t for t in tokens if t != 0]))[2]
        self.assertEqual(again["choices"][0]["text"], whole["choices"][0]["text"])

    def test_a_seed_repeats_a_sampled_reply(self):
        body = dict(QUIET, temperature=1, seed=7)
        first, second = (self.chat(body) for _ in range(2))
        self.assertEqual(first["choices"], second["choices"])
        free = self.chat(dict(QUIET, temperature=1))
        again = self.chat(dict(QUIET, temperature=1, seed=free["x_seed"]))
        self.assertEqual(free["choices"], again["choices"])

    def test_a_stop_string_ends_the_text_before_it(self):
        body = {"prompt": "The", "temperature": 0, "max_tokens": 30}
        text = self.server.post("/v1/completions", body)[2]["choices"][0]["text"]
        stop = text[len(text) // 2:][:3]
        self.assertTrue(stop)
        cut = self.server.post("/v1/completions", dict(body, stop=stop))[2]["choices"][0]
        self.assertEqual(cut["text"], text[:text.index(stop)])
        self.assertEqual((cut["finish_reason"], cut["stop_reason"]), ("stop", stop))

    def test_all_roles_and_part_lists(self):
        reply = self.chat({"messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]},
            {"role": "assistant", "content": "Three.", "reasoning_content": "counting"},
            {"role": "user", "content": "Four?"}], "max_completion_tokens": 4, "temperature": 0})
        self.assertLessEqual(reply["usage"]["completion_tokens"], 4)

    def test_concurrent_requests_are_all_answered(self):
        expected = self.chat(QUIET)["choices"]
        replies = [None] * 6

        def ask(i):
            replies[i] = self.server.post("/v1/chat/completions", QUIET)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(replies))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for status, _, reply in replies:
            self.assertEqual(status, 200)
            self.assertEqual(reply["choices"], expected)

    def test_broken_json_names_the_byte(self):
        for path in ("/v1/chat/completions", "/v1/completions"):
            message = self.refused(path, '{"messages": [', 400)
            self.assertIn("byte", message)
        self.refused("/v1/chat/completions", "", 400)
        self.refused("/v1/chat/completions", b'{"messages":[{"role":"user","content":"\xff"}]}', 400)

    def test_empty_prompts(self):
        self.refused("/v1/chat/completions", {"messages": []}, 400, param="messages")
        self.refused("/v1/completions", {"prompt": ""}, 400, param="prompt")
        self.refused("/v1/completions", {"prompt": []}, 400, param="prompt")

    def test_a_prompt_longer_than_the_context(self):
        message = self.refused("/v1/completions", {"prompt": [5] * 1024}, 400, "context_length_exceeded", "prompt")
        self.assertTrue(message.startswith("This model's maximum context length is 1024 tokens."), message)
        long = {"messages": [{"role": "user", "content": "word " * 5000}]}
        self.refused("/v1/chat/completions", long, 400, "context_length_exceeded", "messages")
        self.refused("/v1/completions", {"prompt": [5], "max_tokens": 1024}, 400, "context_length_exceeded")

    def test_unknown_model_route_and_method(self):
        self.refused("/v1/chat/completions", dict(CHAT, model="gpt-4"), 404, "model_not_found", "model")
        self.refused("/v1/embeddings", {}, 404)
        status, headers, _ = self.server.call("GET", "/v1/chat/completions")
        self.assertEqual((status, headers["Allow"]), (405, "POST, OPTIONS"))

    def test_an_oversized_body(self):
        self.refused("/v1/completions", '{"prompt":"' + "a" * (1 << 20) + '"}', 413, "request_too_large")

    def test_wrong_fields_are_named(self):
        for field, value in (("temperature", 3), ("max_tokens", 0), ("stop", ""), ("n", 2), ("tools", [{"x": 1}]), ("seed", "a")):
            message = self.refused("/v1/chat/completions", dict(CHAT, **{field: value}), 400, param=field)
            self.assertTrue(message.startswith(field), message)

    def test_the_command_line_says_the_same_as_the_server(self):
        made = run("generate", model_dir(), "--prompt", "The", "--max-tokens", "16", "--json")
        self.assertEqual(made.returncode, 0, made.stderr)
        document = json.loads(made.stdout)
        self.assertEqual(len(document["token_ids"]) == 16, document["finish_reason"] == "length")
        reply = self.server.post("/v1/completions", {"prompt": "The", "temperature": 0, "max_tokens": 16})[2]
        self.assertEqual(document["text"], reply["choices"][0]["text"])
        plain = run("generate", model_dir(), "--prompt", "The", "--max-tokens", "16")
        self.assertEqual(plain.stdout, document["text"] + "\n")

    def test_drafting_changes_no_token(self):
        outputs = []
        for draft in ("off", "on"):
            made = run("generate", model_dir(), "--prompt", "The", "--max-tokens", "40", "--json", "--draft", draft)
            self.assertEqual(made.returncode, 0, made.stderr)
            outputs.append(json.loads(made.stdout))
        self.assertEqual(outputs[0]["token_ids"], outputs[1]["token_ids"])
        self.assertEqual(outputs[0]["drafted"], 0)
        self.assertGreater(outputs[1]["drafted"], 0)
        self.assertLessEqual(outputs[1]["accepted"], outputs[1]["drafted"])


if __name__ == "__main__":
    unittest.main(verbosity=2)
