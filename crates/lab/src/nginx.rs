//! Real nginx: a single server, or a chain of servers through all tiers. Each has Shunt's module or, as the baseline,
//! is without it.

use std::fmt;
use std::net::{Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::chain::{Chain, Families, ShuntPart, ShuntParts, directives};
use crate::host::Host;
use crate::lab::Lab;
use crate::process::Process;

/// Debian's nginx.
pub const NGINX: &str = "/usr/sbin/nginx";

/// Allocator of nginx's processes: what becomes of memory that nginx has freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Heap {
    /// glibc's default: free memory at the top of the heap goes back to the kernel if it is more than 128 KiB. In a
    /// proxy with large buffers this may happen after every response, and the next response then has page faults. These
    /// page faults may double the proxy's CPU time for a body of 256 KiB, depending on the heap's layout.
    #[default]
    Usual,
    /// glibc's heap keeps memory that it has once used (mallopt(3)).
    Kept,
    /// Every free page goes back to the kernel at once (jemalloc). So only what a process uses counts as its memory.
    /// glibc gives back only the top of the heap: 300 connections that were open once may cost 20 MiB for good.
    Returned,
}

impl Heap {
    /// Environment variables for this setting.
    fn environment(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Usual => &[],
            Self::Kept => &[("MALLOC_TRIM_THRESHOLD_", "67108864"), ("MALLOC_TOP_PAD_", "67108864")],
            Self::Returned => {
                &[("LD_PRELOAD", "libjemalloc.so.2"), ("MALLOC_CONF", "narenas:1,dirty_decay_ms:0,muzzy_decay_ms:0")]
            }
        }
    }
}

/// Starts nginx on `host` with the configuration `text`, and waits until it listens at `address`. Relative file names
/// in the text are below a new directory. `daemon off`, the `pid` file and the log are set on the command line.
///
/// # Errors
/// When nginx refuses the configuration, ends, or does not listen.
pub fn nginx(host: &Host, text: &str, address: SocketAddr) -> Result<Process> {
    nginx_by(Command::new(NGINX), host, text, address)
}

/// Starts nginx by `command`, which ends with nginx's path. nginx's arguments are appended.
fn nginx_by(mut command: Command, host: &Host, text: &str, address: SocketAddr) -> Result<Process> {
    let prefix = tempfile::Builder::new().prefix("nginx-").tempdir_in(host.dir())?.keep();
    let file = prefix.join("nginx.conf");
    std::fs::create_dir(prefix.join("temp"))
        .and_then(|()| std::fs::write(&file, text))
        .with_context(|| format!("writing nginx's files in {}", prefix.display()))?;
    command.arg("-p").arg(&prefix).arg("-c").arg(&file).args(["-e", "stderr", "-g", "daemon off; pid nginx.pid;"]);
    host.serve(command, address)
}

/// Function that returns the command that starts a tier's nginx; nginx's name and arguments are appended to it. `None`:
/// nginx is started directly.
type Launcher<'a> = Box<dyn Fn(&Host) -> Option<Command> + 'a>;

/// A chain of nginx through all tiers of a lab. It is tuned as an expert would tune it for many responses on few
/// connections: one worker per tier, connections kept, responses buffered in memory and never in files.
pub struct NginxChain<'a> {
    files: PathBuf,
    shunt: ShuntParts<'a>,
    http: Vec<String>,
    locations: Box<dyn Fn(&Host) -> String + 'a>,
    heap: Heap,
    launcher: Launcher<'a>,
    families: Families,
    rewrite: fn(&Host, String) -> String,
}

/// One tier's configuration.
#[derive(Debug, Clone)]
pub struct NginxConf<'a> {
    pub listen: SocketAddr,
    /// Addresses of the next tier. Without any, the tier is a backend, which serves `files`.
    pub upstream: &'a [SocketAddr],
    pub files: &'a Path,
    pub shunt: Option<ShuntPart>,
    /// More directives for `http`, without semicolons. Each takes the place of a default one of the same name.
    pub http: &'a [String],
    /// More locations of the server.
    pub locations: String,
}

impl<'a> NginxChain<'a> {
    /// A chain whose backends serve the files of a directory.
    #[must_use]
    pub fn new(files: impl Into<PathBuf>) -> Self {
        Self {
            files: files.into(),
            shunt: Box::new(|_| None),
            http: Vec::new(),
            locations: Box::new(|_| String::new()),
            heap: Heap::default(),
            launcher: Box::new(|_| None),
            families: Families::default(),
            rewrite: |_, text| text,
        }
    }

    /// Adds Shunt to the tiers for which `part` returns something.
    #[must_use]
    pub fn shunt(mut self, part: impl Fn(&Host) -> Option<ShuntPart> + 'a) -> Self {
        self.shunt = Box::new(part);
        self
    }

    /// Sets the allocator of every tier.
    #[must_use]
    pub fn heap(mut self, heap: Heap) -> Self {
        self.heap = heap;
        self
    }

    /// Starts each tier's nginx by the command that `of` returns. nginx's name and arguments are appended to it.
    #[must_use]
    pub fn launcher(mut self, of: impl Fn(&Host) -> Option<Command> + 'a) -> Self {
        self.launcher = Box::new(of);
        self
    }

    /// Sets the IP versions; the default is IPv4 everywhere.
    #[must_use]
    pub fn families(mut self, families: Families) -> Self {
        self.families = families;
        self
    }

    /// Adds a directive to every tier's `http`, without its semicolon.
    #[must_use]
    pub fn http(mut self, directive: impl Into<String>) -> Self {
        self.http.push(directive.into());
        self
    }

    /// Adds locations to the tiers' servers, besides `location /`.
    #[must_use]
    pub fn locations(mut self, of: impl Fn(&Host) -> String + 'a) -> Self {
        self.locations = Box::new(of);
        self
    }

    /// Sets a function that rewrites the text of each tier's configuration.
    #[must_use]
    pub fn rewrite(mut self, rewrite: fn(&Host, String) -> String) -> Self {
        self.rewrite = rewrite;
        self
    }

    /// The configuration of one tier.
    #[must_use]
    pub fn conf(&self, host: &Host, listen: SocketAddr, upstream: &[SocketAddr]) -> String {
        let (files, http, shunt) = (self.files.as_path(), self.http.as_slice(), (self.shunt)(host));
        let conf = NginxConf { listen, upstream, files, shunt, http, locations: (self.locations)(host) };
        (self.rewrite)(host, conf.to_string())
    }

    /// Starts the chain, backends first.
    ///
    /// # Errors
    /// When a server does not start.
    pub fn start(&self, lab: &Lab) -> Result<Chain> {
        Chain::start(lab, self.families, |host, listen, upstream| {
            let mut command = (self.launcher)(host).map_or_else(
                || Command::new(NGINX),
                |mut launcher| {
                    launcher.arg(NGINX);
                    launcher
                },
            );
            command.envs(self.heap.environment().iter().copied());
            nginx_by(command, host, &self.conf(host, listen, upstream), listen)
        })
    }
}

impl fmt::Display for NginxConf<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(shunt) = &self.shunt {
            writeln!(f, "load_module {};", shunt.module.display())?;
        }
        MAIN.split_inclusive('\n').filter(|line| !self.replaces(line)).try_for_each(|line| f.write_str(line))?;
        f.write_str(&directives("    ", self.http))?;
        let part = |list: fn(&ShuntPart) -> &Vec<String>, indent| {
            self.shunt.as_ref().map(|shunt| directives(indent, list(shunt))).unwrap_or_default()
        };
        f.write_str(&part(|shunt| &shunt.http, "    "))?;
        if !self.upstream.is_empty() {
            writeln!(f, "    upstream next {{")?;
            self.upstream.iter().try_for_each(|address| writeln!(f, "        server {address} max_fails=0;"))?;
            f.write_str(KEEPALIVE)?;
        }
        let both = if self.listen.ip() == Ipv6Addr::UNSPECIFIED { " ipv6only=off" } else { "" };
        writeln!(f, "    server {{\n        listen {}{both} backlog=4096;\n        location / {{", self.listen)?;
        match self.upstream {
            [] => writeln!(f, "            root {};", self.files.display())?,
            _ => write!(f, "            proxy_pass http://next;\n{PROXY_SETTINGS}")?,
        }
        f.write_str(&part(|shunt| &shunt.location, "            "))?;
        write!(f, "        }}\n{}    }}\n}}\n", self.locations)
    }
}

impl NginxConf<'_> {
    /// Whether one of the directives in `http` takes the place of this line of [`MAIN`].
    fn replaces(&self, line: &str) -> bool {
        let name = line.split_whitespace().next();
        self.http.iter().any(|own| own.split_whitespace().next() == name)
    }
}

const MAIN: &str = "\
user root;
worker_processes 1;
worker_rlimit_nofile 16384;
error_log stderr warn;
events {
    worker_connections 8192;
}
http {
    access_log off;
    server_tokens off;
    types {}
    default_type application/octet-stream;
    client_body_temp_path temp/body;
    proxy_temp_path temp/proxy;
    fastcgi_temp_path temp/fastcgi;
    uwsgi_temp_path temp/uwsgi;
    scgi_temp_path temp/scgi;
    keepalive_requests 1000000000;
    keepalive_timeout 3600s;
    sendfile on;
    tcp_nopush on;
    tcp_nodelay on;
    open_file_cache max=10000 inactive=3600s;
    open_file_cache_valid 3600s;
";

const KEEPALIVE: &str = "        keepalive 64;
        keepalive_requests 1000000000;
        keepalive_timeout 3600s;
    }
";

/// Directives of a location that passes requests to the next tier.
pub(crate) const PROXY_SETTINGS: &str = "            proxy_http_version 1.1;
            proxy_set_header Connection \"\";
            proxy_set_header Host $http_host;
            proxy_buffer_size 16k;
            proxy_buffers 32 64k;
            proxy_max_temp_file_size 0;
";

#[cfg(test)]
mod tests {
    use super::*;

    fn conf(upstream: &[SocketAddr], shunt: Option<ShuntPart>) -> String {
        let listen = "10.77.1.1:80".parse().unwrap();
        NginxConf { listen, upstream, files: Path::new("/files"), shunt, http: &[], locations: String::new() }
            .to_string()
    }

    #[test]
    fn a_directive_replaces_the_line_of_its_name() {
        let (listen, http) = ("10.77.1.1:80".parse().unwrap(), ["keepalive_timeout 10s".to_owned()]);
        let files = Path::new("/files");
        let conf = NginxConf { listen, upstream: &[], files, shunt: None, http: &http, locations: String::new() };
        let conf = conf.to_string();
        assert_eq!(conf.matches("keepalive_timeout").count(), 1, "{conf}");
        assert!(conf.contains("    keepalive_timeout 10s;\n"), "{conf}");
    }

    #[test]
    fn ours_and_the_baseline_differ_by_shunts_lines_only() {
        let part = ShuntPart {
            module: "/m.so".into(),
            http: vec!["shunt on".into()],
            location: vec!["shunt_offer on".into()],
        };
        let (plain, ours) = (conf(&[], None), conf(&[], Some(part)));
        let kept: Vec<&str> =
            ours.lines().filter(|line| !line.contains("shunt") && !line.starts_with("load_module")).collect();
        assert_eq!(kept, plain.lines().collect::<Vec<_>>());
        assert_eq!(ours.lines().count(), plain.lines().count() + 3);
    }

    #[test]
    fn a_backend_has_files_and_a_proxy_has_a_next_tier() {
        assert!(conf(&[], None).contains("root /files;") && !conf(&[], None).contains("proxy_pass"));
        let proxy = conf(&["10.77.1.101:80".parse().unwrap()], None);
        assert!(proxy.contains("server 10.77.1.101:80 max_fails=0;") && !proxy.contains("root /files"));
    }
}
