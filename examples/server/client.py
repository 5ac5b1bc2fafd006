"""Asks heddle_server for tokens, with Python's standard library alone.

python examples/server/client.py --port 8080 --tokens 20 --temperature 1 "Once upon a time"
"""

import argparse
import http.client
import json
import sys


class Refused(Exception):
    """An answer that is no stream: its status, its sentence, and in how many seconds to try again (None: do not)."""

    def __init__(self, status, sentence, retry_after):
        super().__init__(f"{status}: {sentence}")
        self.status, self.sentence, self.retry_after = status, sentence, retry_after


class Generation:
    """A running request: iterates over its events as they come, {"token", "logprob"} and at last {"end", "tokens"}. Leaving the
    `with` block closes the connection, which cancels what is left."""

    def __init__(self, port, *, timeout=60, **fields):
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
        self._connection.request("POST", "/generate", json.dumps(fields), {"Content-Type": "application/json"})
        self._response = self._connection.getresponse()
        if self._response.status != 200:
            body, retry = self._response.read(), self._response.headers.get("Retry-After")
            self._connection.close()
            raise Refused(self._response.status, json.loads(body)["error"], retry and int(retry))

    def __iter__(self):
        for line in self._response:
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._response.close()
        self._connection.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--temperature", type=float, default=0)
    parser.add_argument("--seed", type=int, default=0)
    fields = vars(parser.parse_args())
    try:
        with Generation(**fields) as generation:
            for event in generation:
                print(event, flush=True)
    except Refused as refused:
        later = "" if refused.retry_after is None else f" (again in {refused.retry_after} s)"
        sys.exit(f"client.py: {refused}{later}")


if __name__ == "__main__":
    main()
