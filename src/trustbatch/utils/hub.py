"""Whether the Hugging Face hub can be reached."""

import os
import socket
from functools import lru_cache
from urllib.parse import urlsplit

PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


@lru_cache(maxsize=1)
def hub_is_reachable() -> bool:
    """Whether the hub's name resolves: without a network, its client would try for minutes."""
    if any(os.environ.get(name) for name in PROXIES):
        return True  # the proxy resolves names
    from huggingface_hub.constants import ENDPOINT

    try:
        socket.getaddrinfo(urlsplit(ENDPOINT).hostname, 443)
    except OSError:
        return False
    return True
