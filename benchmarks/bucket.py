"""A folder served as an S3 bucket, to be read only, with a chosen latency: fast enough that the reader is measured.

    python -m benchmarks.bucket FOLDER LATENCY_MS      # prints its port, and ends with its standard input

Every request is answered LATENCY_MS after it came, whatever others wait. Objects are held in memory.
"""

import asyncio
import os
import sys
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

_STATUS = {200: "OK", 206: "Partial Content", 404: "Not Found", 416: "Range Not Satisfiable"}


def _answer(objects: dict[str, bytes], method: str, target: str, span: str) -> tuple[int, list[str], bytes]:
    """(status, headers, body) of GET and HEAD of an object, of the bucket, and of a listing."""
    url = urlsplit(target)
    query, key = parse_qs(url.query), unquote(url.path).lstrip("/").partition("/")[2]
    if "list-type" in query:
        prefix = query.get("prefix", [""])[0]
        keys = "".join(f"<Contents><Key>{name}</Key></Contents>" for name in objects if name.startswith(prefix))
        return 200, [], f"<ListBucketResult><IsTruncated>false</IsTruncated>{keys}</ListBucketResult>".encode()
    if not key:
        return 200, [], b""
    if key not in objects:
        return 404, [], b"<Error><Code>NoSuchKey</Code></Error>"
    raw, tag = objects[key], f'ETag: "{hash(key):x}"'
    if not span or method == "HEAD":
        return 200, [tag], raw
    low, _, high = span.removeprefix("bytes=").partition("-")
    first = int(low) if low else max(0, len(raw) - int(high))
    last = min(len(raw) - 1, int(high)) if low and high else len(raw) - 1
    if first >= len(raw):
        return 416, [], b"<Error><Code>InvalidRange</Code></Error>"
    return 206, [tag, f"Content-Range: bytes {first}-{last}/{len(raw)}"], raw[first : last + 1]


async def _serve(objects: dict[str, bytes], latency: float) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            lines = head.decode().split("\r\n")
            method, target, _ = lines[0].split(" ")
            span = next((line[6:].strip() for line in lines if line.lower().startswith("range:")), "")
            await asyncio.sleep(latency)
            status, headers, body = _answer(objects, method, target, span)
            top = "\r\n".join([f"HTTP/1.1 {status} {_STATUS[status]}", *headers, f"Content-Length: {len(body)}"])
            writer.write(top.encode() + b"\r\n\r\n" + (b"" if method == "HEAD" else body))
            await writer.drain()

    async def quietly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handle(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()  # the client has left

    server = await asyncio.start_server(quietly, "127.0.0.1", 0, backlog=256)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    os._exit(0)


def main() -> None:
    folder, latency = Path(sys.argv[1]), float(sys.argv[2]) / 1000
    files = [path for path in folder.rglob("*") if path.is_file()]
    asyncio.run(_serve({path.relative_to(folder).as_posix(): path.read_bytes() for path in files}, latency))


if __name__ == "__main__":
    main()
