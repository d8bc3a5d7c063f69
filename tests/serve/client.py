"""A client of few lines, on the standard library."""

import http.client
import json


class Client:
    def __init__(self, port, timeout=600):
        self.port, self.timeout = port, timeout

    def send(self, method, path, body=None, raw=None):
        """(connection, response); the body is not read yet."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self.timeout)
        data = raw if raw is not None else None if body is None else json.dumps(body)
        connection.request(method, path, data, {"content-type": "application/json"})
        return connection, connection.getresponse()

    def __call__(self, method, path, body=None, raw=None):
        """(status, JSON or text)."""
        connection, response = self.send(method, path, body, raw)
        text = response.read().decode()
        connection.close()
        is_json = (response.getheader("content-type") or "").startswith("application/json")
        return response.status, json.loads(text) if is_json else text

    def complete(self, prompt, **fields):
        status, answer = self("POST", "/v1/completions", {"prompt": prompt, **fields})
        assert status == 200, answer
        return answer

    def stream(self, path, body):
        """The events of a stream, as JSON; checks that it ends as it should."""
        connection, response = self.send("POST", path, {**body, "stream": True})
        assert response.status == 200, response.read()
        lines = [line for line in response.read().decode().split("\n\n") if line]
        connection.close()
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
