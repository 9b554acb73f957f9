"""Fetches every URL with one session of the library requests, and writes each body to a file whose name is the URL's
number."""
import os, sys

import requests

session = requests.Session()
session.trust_env = False  # otherwise REQUESTS_CA_BUNDLE would override `verify`
session.verify = os.environ.get("SSL_CERT_FILE", True)
for index, url in enumerate(sys.argv[2:]):
    answer = session.get(url, timeout=30)
    answer.raise_for_status()
    assert int(answer.headers["Content-Length"]) == len(answer.content)
    assert not [name for name in answer.headers if name.lower().startswith("shunt")], answer.headers
    with open(f"{sys.argv[1]}/{index}", "wb") as file:
        file.write(answer.content)
