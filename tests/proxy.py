"""A small HTTP proxy between boto3 and the real S3 server that behaves like networks and stores one meets: answers get lost,
headers are refused, TLS comes with a CA of one's own."""

import http.client
import ssl
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CHECKSUMS = ("x-amz-checksum-", "x-amz-sdk-checksum", "x-amz-trailer"), 400, "InvalidArgument"
CONDITIONS = ("if-none-match", "if-match"), 501, "NotImplemented"
"""Headers of a write that a store may not know, and how it says so."""


class Proxy:
    """Listens on `endpoint` and forwards to another. `lose` tells, by method, key and number of the write, whether its answer
    is cut off after the server has done the work; `seen` counts writes."""

    def __init__(self, target, *, lose=lambda method, path, number: False, refuses=((), 0, ""), tls=None):
        self.target = urllib.parse.urlsplit(target).netloc
        self.lose, self.refuses = lose, refuses
        self.seen, self.lock = 0, threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments):
                pass

            def handle(self):
                try:
                    super().handle()
                except (ConnectionError, ssl.SSLError):
                    self.close_connection = True

            def forward(self):
                proxy.forward(self)

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = forward

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.endpoint = f"{'https' if tls else 'http'}://127.0.0.1:{self.server.server_port}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def forward(self, handler):
        body = _body(handler)
        headers = {k: v for k, v in handler.headers.items() if k.lower() not in {"expect", "connection"}}
        names, status, code = self.refuses
        if [k for k in headers if k.lower().startswith(names) and k.lower() != "x-amz-checksum-mode"]:
            return _answer(handler, status, f"<Error><Code>{code}</Code><Message>Unsupported header</Message></Error>".encode())
        with self.lock:
            self.seen += handler.command in ("PUT", "POST")
            number = self.seen
        connection = http.client.HTTPConnection(self.target, timeout=60)
        try:
            chunked = handler.headers.get("Transfer-Encoding", "") == "chunked"
            sent = iter([body]) if chunked and body else body
            connection.request(handler.command, handler.path, sent, headers, encode_chunked=chunked)
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        if handler.command in ("PUT", "POST") and self.lose(handler.command, handler.path, number):
            handler.close_connection = True
            return None
        return _answer(handler, answer.status, data, answer.getheaders())


def _body(handler):
    if handler.headers.get("Transfer-Encoding", "") != "chunked":
        return handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
    parts = []
    while size := int(handler.rfile.readline(), 16):
        parts.append(handler.rfile.read(size))
        handler.rfile.readline()
    handler.rfile.readline()
    return b"".join(parts)


def _answer(handler, status, data, headers=()):
    handler.send_response_only(status)
    for name, value in headers:
        if name.lower() not in {"transfer-encoding", "connection", "content-length"}:
            handler.send_header(name, value)
    length = dict(headers).get("Content-Length") if handler.command == "HEAD" else None
    handler.send_header("Content-Length", length or str(len(data)))
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(data)
