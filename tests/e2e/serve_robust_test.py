"""The server under bad clients and signals: disconnects, full queues, garbage, keys, shutdown, wrong command lines."""
import json
import os
import random
import signal
import socket
import tempfile
import threading
import time
import unittest

from serve_client import Server, model_dir, run

ENDLESS = {"prompt": [5, 6, 7], "temperature": 0, "max_tokens": 1000, "ignore_eos": True}


def request_bytes(body, headers=""):
    text = json.dumps(body)
    return ("POST /v1/completions HTTP/1.1\r\nHost: x\r\n%sContent-Length: %d\r\n\r\n%s" % (headers, len(text), text)).encode()


class RobustTest(unittest.TestCase):
    def with_server(self, *flags):
        server = Server(*flags)
        self.addCleanup(server.stop)
        return server

    def test_a_client_that_leaves_cancels_its_request(self):
        server = self.with_server()
        for stream in (False, True):
            name = "leaver-%s" % stream
            connection = server.raw()
            connection.sendall(request_bytes(dict(ENDLESS, stream=stream), "x-request-id: %s\r\n" % name))
            time.sleep(0.3)
            connection.close()
            entry = server.logged(name)
            self.assertEqual((entry["status"], entry["finish"]), (499, "client_gone"))
            self.assertLess(entry["completion_tokens"], 1000)
            status, _, _ = server.post("/v1/completions", dict(ENDLESS, max_tokens=2))
            self.assertEqual(status, 200)

    def test_a_full_queue_is_429_with_retry_after(self):
        server = self.with_server("--max-queue", "1")
        holders = []
        for _ in range(2):  # one runs, one waits
            connection = server.raw()
            connection.sendall(request_bytes(ENDLESS))
            holders.append(connection)
            time.sleep(0.3)
        status, headers, reply = server.post("/v1/completions", dict(ENDLESS, max_tokens=1))
        self.assertEqual(status, 429, reply)
        self.assertGreaterEqual(int(headers["Retry-After"]), 1)
        self.assertEqual(reply["error"]["type"], "rate_limit_error")
        for connection in holders:
            connection.close()

    def test_garbage_does_not_hurt(self):
        server = self.with_server()
        rng = random.Random(20)
        valid = request_bytes(dict(ENDLESS, max_tokens=1))
        for i in range(300):
            if i % 2 == 0:
                data = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 400)))
            else:
                spoiled = bytearray(valid)
                for _ in range(rng.randrange(1, 6)):
                    spoiled[rng.randrange(len(spoiled))] = rng.randrange(256)
                data = bytes(spoiled[:rng.randrange(1, len(spoiled) + 1)])
            with server.raw() as connection:
                connection.sendall(data)
                if i % 3 == 0:
                    connection.shutdown(socket.SHUT_WR)
                    try:
                        while connection.recv(4096):
                            pass
                    except ConnectionError:
                        pass
        self.assertEqual(server.call("GET", "/health")[2], {"status": "ok"})
        self.assertEqual(server.post("/v1/completions", dict(ENDLESS, max_tokens=1))[0], 200)

    def test_many_idle_connections_do_not_block_others(self):
        server = self.with_server()
        idle = [server.raw() for _ in range(200)]
        self.assertEqual(server.call("GET", "/health")[0], 200)
        for connection in idle:
            connection.close()

    def test_keys(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "keys")
            with open(path, "w") as out:
                out.write("# two keys\nsk-first\nsk-second\n")
            server = self.with_server("--api-key-file", path)
            self.assertEqual(server.call("GET", "/health")[0], 200)
            status, headers, reply = server.call("GET", "/v1/models")
            self.assertEqual((status, headers["WWW-Authenticate"]), (401, "Bearer"))
            self.assertEqual(reply["error"]["code"], "invalid_api_key")
            self.assertEqual(server.call("GET", "/v1/models", headers={"Authorization": "Bearer sk-second"})[0], 200)
            self.assertEqual(server.call("GET", "/v1/models", headers={"x-api-key": "sk-first"})[0], 200)

    def test_signals_end_the_server_cleanly(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            server = Server()
            self.assertEqual(server.call("GET", "/health")[0], 200)
            self.assertEqual(server.stop(number, timeout=20), 0)

    def test_a_stop_lets_the_running_request_finish(self):
        server = Server("--drain-seconds", "60")
        result = {}

        def ask():
            result["reply"] = server.post("/v1/completions", dict(ENDLESS, max_tokens=60))

        thread = threading.Thread(target=ask)
        thread.start()
        time.sleep(0.2)
        self.assertEqual(server.stop(), 0)
        thread.join()
        status, _, reply = result["reply"]
        self.assertEqual(status, 200, reply)
        self.assertEqual(reply["usage"]["completion_tokens"], 60)

    def test_a_stop_cancels_what_takes_too_long(self):
        server = Server("--drain-seconds", "0.2")
        connection = server.raw()
        connection.sendall(request_bytes(dict(ENDLESS, stream=True)))
        connection.recv(10)
        begin = time.monotonic()
        code = server.stop()
        self.assertEqual(code, 0)
        self.assertLess(time.monotonic() - begin, 30)
        connection.close()

    def test_wrong_command_lines(self):
        def fails(code, text, *arguments):
            done = run(*arguments)
            self.assertEqual(done.returncode, code, done.stderr)
            self.assertEqual(done.stdout, "")
            self.assertIn("espalier: error: ", done.stderr)
            self.assertIn(text, done.stderr)

        fails(3, "nowhere", "serve", "nowhere")
        fails(2, "port", "serve", model_dir(), "--port", "70000")
        fails(2, "context", "serve", model_dir(), "--context", "999999999999")
        fails(3, "API keys", "serve", model_dir(), "--api-key-file", "/nonexistent/keys")
        fails(2, "prompt", "generate", model_dir(), "--prompt", "", "--max-tokens", "1")
        fails(2, "max-tokens", "generate", model_dir(), "--prompt", "a", "--max-tokens", "0")
        server = self.with_server()
        fails(4, "--port", "serve", model_dir(), "--port", str(server.port))


if __name__ == "__main__":
    unittest.main(verbosity=2)
