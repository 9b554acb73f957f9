"""nginx-tests: only nginx runs under `shunt run` (variant `server`), or the Perl clients and backends of the suite, too
(variant `all`)."""
import os, shutil, tempfile

import nginx_suite
from confined import finished, started
from tap import Result

NAME = "nginx"
TIMEOUT = 180  # seconds for one file
COPIES = [nginx_suite.CHECKOUT]
EXPECTED = {}  # (file, assertion): reason why a difference is meant
FILES = """proxy*.t upstream*.t fastcgi*.t ssi*.t http_*.t uwsgi*.t scgi*.t grpc*.t h2_proxy*.t stream*.t slice.t
gzip*.t gunzip*.t sub_filter*.t addition*.t mirror*.t auth_request*.t range*.t not_modified*.t image_filter*.t
limit_rate*.t binary_upgrade.t worker_shutdown*.t post_action*.t memcached*.t""".split()
QUICK = ["proxy.t", "proxy_cache.t", "ssi.t", "fastcgi.t", "upstream_keepalive.t"]


def prepare():
    suite = nginx_suite.checkout()
    text, modules = nginx_suite.version()
    return {"suite": suite, "version": text, "modules": modules}


def sessions(prepared, patterns):
    return [[name] for name in nginx_suite.files(prepared["suite"], patterns)]


def run(machine, variant, names, prepared):
    directory = tempfile.mkdtemp(prefix="shunt-nginx-tests-")
    os.chmod(directory, 0o755)
    before = " ".join(machine.under_shunt([])) if variant == "server" else ""
    nginx_suite.wrapper(directory + "/nginx", before, prepared["version"])
    environment = nginx_suite.environment(directory, prepared["modules"])
    results = {}
    for name in names:
        perl = ["perl", "-I", "lib", name]
        command = machine.under_shunt(perl) if variant == "all" else perl
        process = started(command, prepared["suite"], environment)
        results[name] = Result(*finished(process, TIMEOUT, machine.hanging))
    shutil.rmtree(directory, ignore_errors=True)
    return results
