"""Consents as a frontend writes them, made by a test. A consent is a header field of a request, by which each tier
(server on the request's path) says that it may be bypassed. A consent also names the server that it is meant for
(ngx_http_shunt_hop.c)."""
import ipaddress, struct

import agent as agents

NONCE = "a" * 32


def to(host="127.0.0.2", port=8083, nonce=NONCE):
    """Returns the parameter `to` for a server: a hash of its address and port, or of its Unix socket's path, keyed with
    a nonce."""
    if host.startswith("/"):
        named = b"u" + host.encode()
    else:
        address = ipaddress.ip_address(host)
        mapped = b"\0" * 10 + b"\xff\xff" if address.version == 4 else b""
        named = b"i" + mapped + address.packed + struct.pack("!H", port)
    return agents.siphash128(bytes.fromhex(nonce), named)[:8].hex()


def consent(host="127.0.0.2", port=8083, more="; tiers=1", nonce=NONCE):
    """Returns a consent of the frontend "self" (agent.py) that is meant for this server."""
    return f"1; frontend=self; nonce={nonce}; to={to(host, port, nonce)}{more}"


CONSENT = f"Shunt-Consent: {consent()}\r\n"
