"""What the serve tests share: starting the real program, plain HTTP calls, and reading event streams. Standard library only."""
import http.client
import json
import os
import signal
import socket
import subprocess
import threading

BIN = os.environ["ESPALIER_BIN"]
SOURCE = os.environ["ESPALIER_SOURCE_DIR"]
POCKET = os.path.join(SOURCE, "models", "pocket")
GOLDEN = os.path.join(SOURCE, "tests", "golden", "model", "tiny-a")


def model_dir():
    """The bundled pocket model when it is there, else the golden checkpoint (random weights, real format)."""
    return POCKET if os.path.exists(os.path.join(POCKET, "config.json")) else GOLDEN


def run(*arguments, timeout=300):
    return subprocess.run([BIN, *arguments], capture_output=True, text=True, timeout=timeout)


class Server:
    """`espalier serve` on a free port. Log lines (one JSON document per request) are collected in `log`."""

    def __init__(self, *flags, model=None):
        self.process = subprocess.Popen(
            [BIN, "serve", model or model_dir(), "--port", "0", "--json", "--context", "1024", *flags],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        first = self.process.stdout.readline()
        if not first:
            raise AssertionError("serve did not start: " + self.process.stderr.read())
        self.info = json.loads(first)
        self.port = int(self.info["url"].rsplit(":", 1)[1])
        self.model = self.info["model"]
        self.log = []
        self.changed = threading.Condition()
        self.collector = threading.Thread(target=self._collect, daemon=True)
        self.collector.start()

    def _collect(self):
        for line in self.process.stderr:
            with self.changed:
                if line.startswith("{"):
                    self.log.append(json.loads(line))
                self.changed.notify_all()

    def logged(self, request_id, timeout=60):
        """The log line of a request, waiting for it."""
        def find():
            return next((entry for entry in self.log if entry["id"] == request_id), None)
        with self.changed:
            self.changed.wait_for(find, timeout)
            entry = find()
        assert entry, "no log line for " + request_id
        return entry

    def stop(self, with_signal=signal.SIGTERM, timeout=60):
        """Ends the server; returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(with_signal)
        code = self.process.wait(timeout)
        self.collector.join(timeout)
        self.process.stdout.close()
        self.process.stderr.close()
        return code

    def connect(self, timeout=120):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def raw(self, timeout=20):
        return socket.create_connection(("127.0.0.1", self.port), timeout)

    def call(self, method, path, body=None, headers=None):
        """(status, headers, parsed body)"""
        connection = self.connect()
        if isinstance(body, (dict, list)):
            body = json.dumps(body)
        connection.request(method, path, body, headers or {})
        reply = connection.getresponse()
        text = reply.read()
        connection.close()
        return reply.status, reply.headers, json.loads(text) if text else None

    def post(self, path, body, **headers):
        return self.call("POST", path, body, {name.replace("_", "-"): value for name, value in headers.items()})

    def stream(self, path, body):
        """The events of a stream: parsed data, without the final [DONE] that must be there."""
        connection = self.connect()
        connection.request("POST", path, json.dumps(dict(body, stream=True)))
        reply = connection.getresponse()
        assert reply.status == 200, reply.read()
        assert reply.headers["Content-Type"].startswith("text/event-stream"), reply.headers
        text = reply.read().decode("utf-8")
        connection.close()
        assert text.endswith("data: [DONE]\n\n"), text[-200:]
        events = []
        for event in text.split("\n\n")[:-1]:
            if event.startswith(":"):
                continue
            assert event.startswith("data: ") and "\n" not in event, event
            if event != "data: [DONE]":
                events.append(json.loads(event[6:]))
        return events
