"""nginx's own test suite, at one pinned commit: fetches it, and runs single files of it against the installed nginx."""
import fnmatch, glob, os, re, shutil, subprocess

from confined import Missing, fetch

HERE = os.path.dirname(os.path.abspath(__file__))
REPOSITORY = "nginx/nginx-tests"
COMMIT = "7ecb7ae5b6949d4f8687d72a41a7398cce5778c3"  # 2022-10-26, a week after nginx 1.22.1
CHECKOUT = os.path.join(HERE, "../../target/nginx-tests", COMMIT)


def checkout(copy=None):
    """Returns the suite's directory. The suite is fetched, if no copy of it is given."""
    suite = os.path.abspath(copy or CHECKOUT)
    if not copy and not os.path.exists(suite + "/lib/Test/Nginx.pm"):
        fetch(suite, REPOSITORY, COMMIT)
    if not os.path.exists(suite + "/lib/Test/Nginx.pm"):
        raise Missing(f"{suite} is not a copy of nginx-tests: it has no lib/Test/Nginx.pm")
    return suite


def files(suite, patterns):
    """Returns the names of the suite's test files that match one of these patterns."""
    names = sorted(os.path.basename(f) for f in glob.glob(suite + "/*.t"))
    return [n for n in names if any(fnmatch.fnmatch(n, p) or fnmatch.fnmatch(n, p + ".t") for p in patterns)]


def version(modules=None):
    """Returns the text of nginx -V without dynamic modules that are not installed, and the modules' directory."""
    for program in "nginx", "perl":
        if not shutil.which(program):
            raise Missing(f"{program} is not installed; make packages installs it")
    text = subprocess.run(["nginx", "-V"], stderr=subprocess.PIPE, text=True).stderr
    modules = modules or (re.search(r"--modules-path=(\S+)", text) or ["", "/usr/lib/nginx/modules"])[1]
    def keep(m):
        name = {"http_xslt_module": "http_xslt_filter_module", "mail": "mail_module", "stream": "stream_module",
                "stream_geoip_module": "stream_geoip_module"}.get(m.group(1), m.group(1))
        return m.group(0) if os.path.exists(f"{modules}/ngx_{name}.so") else ""
    return re.sub(r"--with-([a-z_]+)=dynamic", keep, text), os.path.abspath(modules)


def wrapper(path, before, version_text):
    """Writes the program that the suite runs as nginx. It runs the real nginx with the command `before` in front of it.
    For -V it prints a text that does not name modules that are not installed."""
    with open(path + ".version", "w") as f:
        f.write(version_text)
    with open(path, "w") as f:
        f.write(f"#!/bin/sh\n[ \"$1\" = -V ] && exec cat {path}.version >&2\n")
        f.write(f"exec {before} {shutil.which('nginx')} \"$@\"\n")
    os.chmod(path, 0o755)


def environment(directory, modules):
    """Returns the environment of a test file, whose nginx is the wrapper in this directory."""
    made = dict(os.environ, LC_ALL="C", TMPDIR=directory, TEST_NGINX_BINARY=directory + "/nginx",
                TEST_NGINX_MODULES=modules)
    # If root runs the suite, its directories belong to root, and workers of the user nobody could not read them.
    made["TEST_NGINX_GLOBALS"] = "user root;\n" if os.geteuid() == 0 else ""
    return made
