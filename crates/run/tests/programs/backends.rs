//! Servers other than nginx, as Debian ships them. The tests start them. None runs as a system service.

use std::fs;
use std::net::SocketAddr;
use std::process::Stdio;

use crate::bed::{Bed, Program, free_address, wait_until_listening};
use crate::mix::{files, readable};

pub struct Backend {
    pub address: SocketAddr,
    _program: Program,
}

/// Returns the path of a program, which has to be installed. `by` is the command that installs it.
pub fn installed(program: &str, by: &str) -> String {
    let paths = std::env::var_os("PATH").unwrap_or_default();
    // If `program` is an absolute path, joining it to a directory gives the path itself.
    let mut found = std::env::split_paths(&paths).map(|directory| directory.join(program));
    let path = found.find(|path| path.exists()).unwrap_or_else(|| panic!("there is no {program}: `{by}` installs it"));
    path.into_os_string().into_string().unwrap()
}

pub fn start(mut command: std::process::Command, address: SocketAddr) -> Backend {
    let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn();
    let program = Program(child.unwrap_or_else(|error| {
        panic!("{}: {error}; `make packages` installs what the tests run", command.get_program().display())
    }));
    wait_until_listening(address);
    Backend { address, _program: program }
}

const PHP: &str = r"<?php
[, $how, $name] = array_pad(explode('/', $_SERVER['REQUEST_URI']), 3, '');
$body = $how == 'echo' ? file_get_contents('php://input') : file_get_contents($_SERVER['FILES'] . '/' . (int)$name);
header('Content-Type: application/octet-stream');
if ($how == 'whole') {
    header('Content-Length: ' . strlen($body));
}
if ($how == 'file') {
    readfile($_SERVER['FILES'] . '/' . (int)$name);
} elseif ($how == 'pieces') {
    for ($at = 0, $bytes = 1; $at < strlen($body); $at += $bytes, $bytes = $bytes * 3 % 100003) {
        echo substr($body, $at, $bytes);
        flush();
    }
} else {
    echo $body;
}
";

/// PHP-FPM, and the addresses of its pools.
pub struct Pools {
    pub addresses: Vec<SocketAddr>,
    _program: Backend,
}

/// Starts PHP-FPM over TCP, with a pool for each of these users. Also returns the directives for an nginx in front of
/// it. The first part of a request's path says how the script sends a file: /whole (with Content-Length), /plain
/// (without), /file (by readfile) or /pieces (with a flush after each piece). /echo answers with the request's body.
pub fn php(bed: &Bed, users: &[&str]) -> (Pools, String) {
    let (addresses, files) = (users.iter().map(|_| free_address()).collect::<Vec<_>>(), files(bed));
    let directory = bed.path().join("php");
    fs::create_dir_all(&directory).unwrap();
    readable(&directory);
    let script = directory.join("site.php");
    fs::write(&script, PHP).unwrap();
    let mut text = format!(
        "[global]\nerror_log = /proc/self/fd/2\nlog_level = warning\ndaemonize = no\npid = {0}/pid\n",
        directory.display()
    );
    for (user, address) in users.iter().zip(&addresses) {
        text += &format!(
            "[{user}]\nuser = {user}\nlisten = {address}\npm = static\npm.max_children = 2\npm.max_requests = 1000\n"
        );
    }
    fs::write(directory.join("fpm.conf"), text).unwrap();
    let mut command = bed.machine(2).under_shunt("/usr/sbin/php-fpm8.2");
    command.args(["-F", "-O", "-y"]).arg(directory.join("fpm.conf"));
    let fields = format!(
        "fastcgi_keep_conn on; fastcgi_param SCRIPT_FILENAME {}; fastcgi_param FILES {}; fastcgi_param REQUEST_METHOD \
         $request_method; fastcgi_param REQUEST_URI $request_uri; fastcgi_param CONTENT_LENGTH $content_length; \
         fastcgi_param CONTENT_TYPE $content_type; fastcgi_pass php;",
        script.display(),
        files.display()
    );
    let last = addresses[addresses.len() - 1];
    (Pools { addresses, _program: start(command, last) }, fields)
}

/// Starts Apache, with threads. It serves the files.
pub fn apache(bed: &Bed, more: &str) -> Backend {
    let (address, files) = (free_address(), files(bed));
    let directory = bed.path().join("apache");
    fs::create_dir_all(&directory).unwrap();
    let mut text = String::new();
    for module in ["mpm_event", "authz_core", "mime", "dir"] {
        text += &format!("LoadModule {module}_module /usr/lib/apache2/modules/mod_{module}.so\n");
    }
    text += &format!(
        "ServerName test\nServerRoot {0}\nPidFile {0}/pid\nMutex file:{0} default\nErrorLog /dev/stderr\nLogLevel warn\n\
         User www-data\nGroup www-data\nListen {address}\nTypesConfig /dev/null\nDocumentRoot {1}\n\
         KeepAlive On\nMaxKeepAliveRequests 0\nStartServers 1\nServerLimit 1\nThreadsPerChild 8\nMaxRequestWorkers 8\n\
         MinSpareThreads 1\nMaxSpareThreads 8\n\
         <Directory {1}>\nRequire all granted\n</Directory>\n{more}\n",
        directory.display(),
        files.display()
    );
    fs::write(directory.join("apache.conf"), text).unwrap();
    let mut command = bed.machine(2).under_shunt("/usr/sbin/apache2");
    command.args(["-D", "FOREGROUND", "-f"]).arg(directory.join("apache.conf"));
    start(command, address)
}

pub const APPLICATION: &str = r"
import os

def pieces(body):
    at, count = 0, 1
    while at < len(body):
        yield body[at:at + count]
        at, count = at + count, count * 3 % 100003 or 1

def application(environ, start_response):
    _, how, name = (environ['PATH_INFO'] + '//').split('/')[:3]
    if how == 'echo':
        body = environ['wsgi.input'].read()
    else:
        path = os.path.join(os.environ['FILES'], name)
        size = os.path.getsize(path)
        if environ['REQUEST_METHOD'] == 'HEAD':
            start_response('200 OK', [('Content-Length', str(size))])
            return []
        # gunicorn fails to send a file of no bytes.
        if how == 'file' and size:
            start_response('200 OK', [('Content-Length', str(size))])
            return environ['wsgi.file_wrapper'](open(path, 'rb'))
        with open(path, 'rb') as file:
            body = file.read()
    if how == 'pieces':
        start_response('200 OK', [])
        return pieces(body)
    start_response('200 OK', [('Content-Length', str(len(body)))])
    return [body]
";

/// Starts gunicorn (Python) with workers of the kind `worker`. The first part of a request's path says how gunicorn
/// sends a file: /whole, /file (sendfile) or /pieces (chunked). /echo answers with the request's body.
pub fn gunicorn(bed: &Bed, worker: &str) -> Backend {
    let (address, files) = (free_address(), files(bed));
    let directory = bed.path().join("gunicorn");
    fs::create_dir_all(&directory).unwrap();
    fs::write(directory.join("served.py"), APPLICATION).unwrap();
    let mut command = bed.machine(2).under_shunt("/usr/bin/python3");
    command.args(["-B", "/usr/bin/gunicorn", "--workers", "2", "--threads", "4", "--worker-class", worker]);
    command.args(["--keep-alive", "30", "--log-level", "warning", "--bind", &address.to_string(), "--chdir"]);
    command.arg(&directory).arg("served:application").env("FILES", &files);
    start(command, address)
}

/// Starts HAProxy in front of the server at `next`.
pub fn haproxy(bed: &Bed, next: SocketAddr, more: &str) -> Backend {
    let address = free_address();
    let path = bed.path().join("haproxy.cfg");
    let text = format!(
        "global\n  nbthread 2\n  maxconn 1000\n\
         defaults\n  mode http\n  timeout client 60s\n  timeout server 60s\n  timeout connect 5s\n  {more}\n\
         frontend in\n  bind {address}\n  default_backend out\n\
         backend out\n  http-reuse always\n  server next {next}\n"
    );
    fs::write(&path, text).unwrap();
    let mut command = bed.machine(1).under_shunt("/usr/sbin/haproxy");
    command.args(["-db", "-f"]).arg(&path);
    start(command, address)
}
