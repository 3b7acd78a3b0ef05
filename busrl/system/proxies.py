"""Proxies that the environment names: busrl's own addresses are never asked through one, all others as it says.

Talks to environment variables. Knows nothing of who asks and what.

- Libraries read `no_proxy`, or `NO_PROXY`, or one where the other is missing: both are set, and say the same as before
  and busrl's own addresses besides.
- A client of busrl's own takes the proxy of the address that it was given, and names it where it fails.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from urllib.parse import urlsplit

OWN = ("127.0.0.1", "localhost")
NAMES = ("no_proxy", "NO_PROXY")
EVERYTHING = "*"


def environment(known: Mapping[str, str] = os.environ, *hosts: str) -> dict[str, str]:
    """Variables of proxies for a process in which user code may run; `hosts`: more addresses of busrl's own."""
    made = dict(known)
    for name, other in (NAMES, NAMES[::-1]):
        given = [one.strip() for one in (known.get(name) or known.get(other) or "").split(",") if one.strip()]
        if EVERYTHING not in given:
            given += [host for host in (*OWN, *hosts) if host not in given]
        made[name] = ",".join(given)
    return made


def proxy_of(url: str) -> str | None:
    """The proxy by which a client asks that address; None: directly."""
    from urllib.request import getproxies, proxy_bypass  # only here: most processes never need it, and it is slow

    parts = urlsplit(url)
    if parts.hostname is None or _is_here(parts.hostname) or proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    return getproxies().get(parts.scheme) or None


def named(proxy: str | None) -> str:
    """Words for the message of a client that failed; a proxy's password is not in them."""
    return f" (by the proxy {urlsplit(proxy).hostname}; no_proxy names addresses without one)" if proxy else ""


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"
