"""Stores in buckets: what tensorstore is told beside the URL, and what its errors mean for the user.

tensorstore reads keys, profiles and roles from the standard AWS environment by itself. It does not read the endpoint
and the region, it retries for a quarter of an hour, and it waits without end for a server that never answers.
"""

import os
import re
from typing import Any

from saejax.core.errors import ConfigError

# Waits of 1, 2, 4, 8 and 16 seconds between six attempts, for gs:// and s3:// alike.
_RETRIES = {"max_retries": 5, "initial_delay": "1s", "max_delay": "16s"}
_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
# A request that moves not one byte for so long is given up and tried again. tensorstore reads these once a process.
_HTTP_LIMITS = {
    "TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS": "10",
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "30",
    "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
}
_DETAIL = re.compile(
    r" \[(?:http_response_code|http_response_body|x-[\w-]+|curl_code|source locations?)=?.*", re.DOTALL
)


def spec_of(url: str) -> Any:
    """The tensorstore spec of a folder given as a URL, completed from the environment.

    s3:// takes the endpoint of AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL, and for such an endpoint the region of
    AWS_REGION or AWS_DEFAULT_REGION (tensorstore finds the region of a bucket at AWS itself).
    """
    scheme, _, rest = url.partition("://")
    if scheme != "s3":
        return url + "/"
    bucket, _, path = rest.partition("/")
    spec = {"driver": "s3", "bucket": bucket, "path": f"{path}/" if path else ""}
    if endpoint := _first_set("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        spec["endpoint"] = endpoint.rstrip("/")
        if region := _first_set("AWS_REGION", "AWS_DEFAULT_REGION"):
            spec["aws_region"] = region
    return spec


def context_of(url: str) -> dict[str, Any]:
    """tensorstore's context for the server of a URL: bounded retries, and the keys of the environment if it has any.

    Raises:
        ConfigError: one of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY without the other.
    """
    for name, value in _HTTP_LIMITS.items():
        os.environ.setdefault(name, value)
    settings: dict[str, Any] = {"s3_request_retries": _RETRIES, "gcs_request_retries": _RETRIES}
    keys = [name for name in _KEYS if os.environ.get(name)]
    if url.startswith("s3://") and len(keys) == 1:
        raise ConfigError(f"{url} needs {' and '.join(_KEYS)}, and only {keys[0]} is set.")
    # Keys at hand are all that is wanted: without this, files and the network are searched for others too.
    return settings | ({"aws_credentials": {"type": "environment"}} if keys else {})


def cause_of(error: Exception) -> tuple[str, str] | None:
    """(cause, remedy) of an error of the server or of the way to it, one sentence each; None for any other error."""
    text = str(error)
    code = re.search(r"http_response_code='(\d+)'", text)
    status = int(code[1]) if code else 0
    message = plain(text)
    if status == 416 or not (status or "curl_code" in text or "aws_region for bucket" in text or "redential" in text):
        return None
    if status == 404:
        return message, "Make the bucket, or correct its name in the URL."
    if status in (401, 403) or (not status and "redential" in text):
        return message, (
            "Check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (gs://: GOOGLE_APPLICATION_CREDENTIALS), and that this "
            "key may list, read, write and delete there."
        )
    if status in (301, 307, 400) or "aws_region" in text:
        return message, "Check the bucket's name, AWS_REGION and AWS_ENDPOINT_URL."
    return message, "Check the network and AWS_ENDPOINT_URL, and run the same command again."


def plain(text: str) -> str:
    """tensorstore's message, in one line and without the answer's headers and body."""
    return re.sub(r"\s+", " ", _DETAIL.sub("", text)).strip()[:400].rstrip(".")


def _first_set(*names: str) -> str | None:
    return next((value for name in names if (value := os.environ.get(name))), None)
