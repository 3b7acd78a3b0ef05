"""Proxies that the environment names: they are used for all addresses but busrl's own.

Talks to environment variables. Knows nothing of clients and requests.

- Libraries read `no_proxy`, or `NO_PROXY`, or either where the other is missing. Both are set: to what they held, and
  busrl's own addresses.
- A client of busrl uses the proxy for its address, and names the proxy in the error when it fails.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from urllib.parse import urlsplit

OWN = ("127.0.0.1", "localhost")
NAMES = ("no_proxy", "NO_PROXY")
EVERYTHING = "*"


def environment(variables: Mapping[str, str] = os.environ, *hosts: str) -> dict[str, str]:
    """The variables of a process in which user code may run; `hosts`: more addresses of busrl's own."""
    changed = dict(variables)
    for name, other in (NAMES, NAMES[::-1]):
        listed = (variables.get(name) or variables.get(other) or "").split(",")
        addresses = [address.strip() for address in listed if address.strip()]
        if EVERYTHING not in addresses:
            addresses += [host for host in (*OWN, *hosts) if host not in addresses]
        changed[name] = ",".join(addresses)
    return changed


def proxy_of(url: str) -> str | None:
    """The proxy through which a client reaches that address; None: none."""
    from urllib.request import getproxies, proxy_bypass  # only here: most processes never need it, and it is slow

    parts = urlsplit(url)
    if parts.hostname is None or _is_here(parts.hostname) or proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    return getproxies().get(parts.scheme) or None


def named(proxy: str | None) -> str:
    """Words on the proxy for the error of a client, without the proxy's password; empty without a proxy."""
    return f" (by the proxy {urlsplit(proxy).hostname}; no_proxy names addresses without one)" if proxy else ""


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"
