"""examples/server: what a request gets does not depend on what runs beside it, nothing is lost, and nothing brings it down.
HEDDLE_SERVER names the binary."""

import concurrent.futures
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples" / "server"))

from client import Generation, Refused  # noqa: E402

SERVER = os.environ.get("HEDDLE_SERVER")
pytestmark = pytest.mark.skipif(not SERVER, reason="HEDDLE_SERVER does not name the built binary")

PAGES = 96


def get(port, path):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text


def metrics(port):
    lines = get(port, "/metrics")[1].splitlines()
    return {
        name.removeprefix("heddle_server_"): float(value) for name, value in (x.split() for x in lines if x[0] != "#")
    }


def wait_for(port, **wanted):
    """The metrics, once they have these values."""
    deadline = time.monotonic() + 20
    while True:
        found = metrics(port)
        if all(found[name] == value for name, value in wanted.items()):
            return found
        assert time.monotonic() < deadline, (wanted, found)
        time.sleep(0.01)


class Server:
    def __init__(self, *arguments, pages=PAGES):
        self.pages = pages
        command = [SERVER, "--port", "0", "--context", "1024", "--pages", str(pages), *arguments]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "HEDDLE_NUM_THREADS": "2"},
        )
        line = self.process.stdout.readline()
        self.port = int(re.fullmatch(r"listening on http://127\.0\.0\.1:(\d+)\n", line)[1])

    def stop(self):
        """What it says at the end; it must end well, with all pages back."""
        self.process.send_signal(signal.SIGTERM)
        out, err = self.process.communicate(timeout=30)
        assert (self.process.returncode, err) == (0, ""), (out, err)
        assert out.endswith(f"; {self.pages} of {self.pages} pages are free\n")
        return out


@contextlib.contextmanager
def serving(*arguments, pages=PAGES):
    server = Server(*arguments, pages=pages)
    try:
        yield server
        if server.process.returncode is None:
            server.stop()
    finally:
        if server.process.poll() is None:
            server.process.kill()


@pytest.fixture(scope="module")
def port():
    with serving("--sequences", "6", "--queue", "16") as server:
        yield server.port


def generated(port, **fields):
    with Generation(port, **fields) as generation:
        *tokens, end = generation
    assert end == {"end": "length", "tokens": fields["tokens"]} and len(tokens) == fields["tokens"]
    return tokens


def requests():
    """Prompts of one page and of several, of one piece and of several; likeliest tokens and drawn ones."""
    lengths = [1, 3, 15, 16, 17, 63, 64, 65, 100, 128, 200, 300]
    return [
        dict(prompt="the warp and the weft " * 20, tokens=20 + 3 * i, temperature=0.5 * (i % 3), seed=i)
        | {"prompt": ("the warp and the weft " * 20)[i : i + length]}
        for i, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("format", ["int8_row", "nvfp4"])
def test_tokens_do_not_depend_on_what_runs_beside_them(format):
    with serving("--sequences", "6", "--queue", "16", "--format", format) as server:
        alone = [generated(server.port, **request) for request in requests()]
        assert metrics(server.port)["pages_free"] == PAGES
        most = 0
        with concurrent.futures.ThreadPoolExecutor(len(alone)) as pool:
            running = [pool.submit(generated, server.port, **request) for request in reversed(requests())]
            while not all(future.done() for future in running):
                most = max(most, metrics(server.port)["active_sequences"])
        assert most > 1, "they did not run side by side"
        together = [future.result() for future in running][::-1]
        assert together == alone  # tokens, and log-probabilities to the bit
        assert len({json.dumps(tokens) for tokens in alone}) == len(alone)
        found = metrics(server.port)
        assert found["pages_free"] == PAGES and found["requests_finished_total"] == 2 * len(alone)
        assert found["tokens_total"] == 2 * sum(request["tokens"] for request in requests())
        assert 0 < found["tokens_per_second"] <= found["tokens_total"]


def test_what_was_decoded_goes_on_as_a_prompt_does(port):
    """Over a page's end and a piece's, the cache holds what a prompt of the same bytes would have put there."""
    prompt = list(b"shuttle")
    whole = generated(port, prompt=prompt, tokens=150)
    assert len({event["token"] for event in whole}) > 5
    for made in (1, 9, 10, 57, 58, 90, 149):
        so_far = prompt + [event["token"] for event in whole[:made]]
        rest = generated(port, prompt=so_far, tokens=150 - made)
        assert [event["token"] for event in rest] == [event["token"] for event in whole[made:]]
        assert [event["logprob"] for event in rest] == pytest.approx([x["logprob"] for x in whole[made:]], abs=1e-4)


def test_a_seed_draws_and_temperature_0_does_not(port):
    fields = dict(prompt="loom", tokens=12)
    drawn = [generated(port, **fields, temperature=1, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert generated(port, **fields) == generated(port, **fields, seed=5)


LONG = dict(prompt="selvedge", tokens=1016)  # 64 of the 96 pages


def test_readers_that_go_free_their_pages():
    with serving("--sequences", "2", "--layers", "64") as server:
        with Generation(server.port, **LONG) as running:
            events = iter(running)
            assert "token" in next(events) and "token" in next(events)
            assert metrics(server.port)["pages_free"] == PAGES - 64
            # Its pages are not there yet: it waits in the queue, and its reader goes.
            waiting = socket.create_connection(("127.0.0.1", server.port))
            body = json.dumps(LONG).encode()
            waiting.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            wait_for(server.port, queue_length=1)
            waiting.close()
            wait_for(server.port, queue_length=0, requests_cancelled_total=1, active_sequences=1)
            # What fits beside the long one does not wait for it.
            assert generated(server.port, prompt="ab", tokens=3)
        wait_for(server.port, pages_free=PAGES, active_sequences=0, requests_cancelled_total=2)
        assert generated(server.port, prompt="ab", tokens=3)
        assert server.stop().startswith("stopped: 2 requests finished, 2 cancelled, 0 cut short;")


def test_a_full_queue_says_so():
    with serving("--sequences", "1", "--queue", "2", "--layers", "64") as server, contextlib.ExitStack() as stack:
        for active, queued in ((1, 0), (1, 1), (1, 2)):
            # Headers of one that waits come at once.
            stack.enter_context(Generation(server.port, **LONG))
            wait_for(server.port, active_sequences=active, queue_length=queued)
        for _ in range(60):
            with pytest.raises(Refused) as refused:
                Generation(server.port, prompt="a", tokens=1)
            assert (refused.value.status, refused.value.retry_after) == (503, 1)
            assert refused.value.sentence == "the queue is full: try again later"
        assert get(server.port, "/health") == (200, '{"status":"ok"}\n')
        assert metrics(server.port)["requests_refused_total"] == 60
        stack.close()
        wait_for(server.port, pages_free=PAGES, queue_length=0, requests_cancelled_total=3)
        assert generated(server.port, prompt="a", tokens=1)


BAD = {
    b"": "the body must be a JSON object in UTF-8",
    b"[]": "the body must be a JSON object in UTF-8",
    b'{"prompt": "a", "tokens": 1': "the body must be a JSON object in UTF-8",
    b'{"prompt": "\xff", "tokens": 1}': "the body must be a JSON object in UTF-8",
    b"[" * 60000: "the body must be a JSON object in UTF-8",
    b'{"x": '
    + b"[" * 10000
    + b"]" * 10000
    + b"}": "there is no field 'x': there are prompt, tokens, temperature and seed",
    b'{"tokens": 1}': "prompt is missing or empty: it must have at least one byte",
    b'{"prompt": 5, "tokens": 1}': "prompt is 5: it must be a string or an array of bytes",
    b'{"prompt": [1, 256], "tokens": 1}': "prompt[1] is 256: it must be an integer from 0 to 255",
    b'{"prompt": [-1], "tokens": 1}': "prompt[0] is -1: it must be an integer from 0 to 255",
    b'{"prompt": "a"}': "tokens is missing: it says how many to make, at least 1",
    b'{"prompt": "a", "tokens": -3}': "tokens is -3: it must be an integer of at least 1",
    b'{"prompt": "a", "tokens": 0}': "tokens is 0: it must be an integer of at least 1",
    b'{"prompt": "a", "tokens": 1.5}': "tokens is 1.5: it must be an integer of at least 1",
    b'{"prompt": "a", "tokens": 18446744073709551615}': "tokens is 18446744073709551615: it must be an integer of at least 1",
    b'{"prompt": "a", "tokens": 9223372036854775807}': "prompt has 1 bytes and tokens is 9223372036854775807: together they "
    "must be at most the context, 1024",
    b'{"prompt": "a", "tokens": 1, "temperature": -1}': "temperature is -1: it must be a number from 0 to 100",
    b'{"prompt": "a", "tokens": 1, "temperature": "hot"}': 'temperature is "hot": it must be a number from 0 to 100',
    b'{"prompt": "a", "tokens": 1, "seed": -1}': "seed is -1: it must be an integer of at least 0",
    b'{"tokens": 1, "prompt": '
    + b"[" * 30000
    + b"]" * 30000
    + b"}": "prompt[0] is an array: it must be an integer from 0 to 255",
    json.dumps(
        {"prompt": "a" * 2000, "tokens": 1}
    ).encode(): "prompt has 2000 bytes and tokens is 1: together they must be at most the context, 1024",
}


@pytest.mark.parametrize("body", BAD, ids=lambda body: body[:30].decode(errors="replace"))
def test_bad_requests_get_a_sentence(port, body):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("POST", "/generate", body)
    response = connection.getresponse()
    assert (response.status, json.loads(response.read())) == (400, {"error": BAD[body]})
    connection.close()


def test_what_cannot_fit_in_the_cache_or_in_a_body_is_refused(port):
    with serving(pages=4) as server:
        with pytest.raises(Refused, match="400: prompt has 60 bytes and tokens is 6: .* fit in the cache, 64 keys"):
            Generation(server.port, prompt="a" * 60, tokens=6)
        assert generated(server.port, prompt="a" * 60, tokens=5)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.suppress(ConnectionError):  # it need not read to the end
        connection.request("POST", "/generate", b" " * 100000)
    response = connection.getresponse()
    assert response.status == 413
    assert json.loads(response.read()) == {"error": "the body must have at most 65536 bytes"}
    connection.close()
    status, text = get(port, "/nowhere")
    assert status == 404
    assert json.loads(text)["error"].startswith("there are POST /generate, ")
    assert get(port, "/health")[0] == 200


def test_sigterm_lets_requests_end_within_the_grace():
    with serving("--grace", "20") as server, Generation(server.port, prompt="a", tokens=200) as generation:
        events = iter(generation)
        next(events)
        server.process.send_signal(signal.SIGTERM)
        assert list(events)[-1] == {"end": "length", "tokens": 200}
        out, err = server.process.communicate(timeout=10)
        assert (server.process.returncode, err) == (0, "")
        assert out == f"stopped: 1 requests finished, 0 cancelled, 0 cut short; {PAGES} of {PAGES} pages are free\n"


def test_sigterm_cuts_short_what_takes_longer():
    with serving("--grace", "0.5", "--sequences", "1", "--layers", "64") as server, contextlib.ExitStack() as stack:
        running = stack.enter_context(Generation(server.port, **LONG))
        events = iter(running)
        next(events)
        waiting = stack.enter_context(Generation(server.port, **LONG))
        wait_for(server.port, queue_length=1)
        server.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 10
        while get(server.port, "/health") != (503, '{"status":"stopping"}\n'):
            assert time.monotonic() < deadline
        with pytest.raises(Refused, match="503: the server is stopping"):
            Generation(server.port, prompt="a", tokens=1)
        *tokens, end = events
        assert end == {"end": "stopped", "tokens": len(tokens) + 1} and end["tokens"] < 1016
        assert list(waiting) == [{"end": "stopped", "tokens": 0}]
        out, err = server.process.communicate(timeout=10)
        assert (server.process.returncode, err) == (0, "")
        assert out == f"stopped: 0 requests finished, 0 cancelled, 2 cut short; {PAGES} of {PAGES} pages are free\n"


def test_what_cannot_start_says_why(port):
    def said(*arguments):
        done = subprocess.run([SERVER, *arguments], capture_output=True, text=True, timeout=30)
        assert done.returncode != 0
        return done.stderr

    assert said("--port", str(port)) == f"heddle_server: port {port} of 127.0.0.1 cannot be had\n"
    assert "int3" in said("--format", "int3") and "nvfp4" in said("--format", "int3")
    assert "--pages" in said("--pages", "0")
