//! nginx as a tier of a chain, as Debian ships it.

use std::fmt::Write as _;
use std::fs;
use std::net::SocketAddr;
use std::process::Stdio;

use crate::bed::{Bed, Program, free_address, wait_until_listening};

const NGINX: &str = "/usr/sbin/nginx";

pub struct Tier {
    pub address: SocketAddr,
    _nginx: Program,
}

/// Starts nginx on the machine that the tier `name` has in a chain of three.
pub fn tier(bed: &Bed, name: &str, http: &str, server: &str, under_shunt: bool) -> Tier {
    let (address, machine) = (free_address(), bed.machine_of(name));
    let prefix = bed.path().join(name);
    fs::create_dir_all(prefix.join("temp")).unwrap();
    let mut text = String::from("worker_processes 1; error_log stderr warn; events { worker_connections 1024; }\n");
    writeln!(text, "http {{ access_log off; keepalive_requests 100000; {http}").unwrap();
    for kind in ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"] {
        writeln!(text, "{kind}_temp_path temp/{kind};").unwrap();
    }
    writeln!(text, "server {{ listen {address}; {server} }} }}").unwrap();
    fs::write(prefix.join("nginx.conf"), text).unwrap();
    let mut command = if under_shunt { machine.under_shunt(NGINX) } else { machine.plain(NGINX) };
    command.arg("-p").arg(&prefix).args(["-c", "nginx.conf", "-e", "stderr", "-g", "daemon off; pid nginx.pid;"]);
    let nginx = Program(command.stdin(Stdio::null()).spawn().unwrap());
    wait_until_listening(address);
    Tier { address, _nginx: nginx }
}

pub fn proxy_to(upstream: SocketAddr, more: &str) -> (String, String) {
    let http = format!("upstream next {{ server {upstream}; keepalive 16; }}");
    let server = format!(
        "location / {{ proxy_pass http://next; proxy_http_version 1.1; proxy_set_header Connection ''; {more} }}"
    );
    (http, server)
}
