//! Services behind the proxy that terminates TLS.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::backends::{APPLICATION, Backend, installed, start};
use crate::bed::{Bed, free_address};
use crate::mix::{files, readable};
use crate::tls::certificate;

/// Command that installs these programs.
const CHAINS: &str = "make https-chains";

/// Starts Varnish in front of the server at `next`. Varnish caches responses for `kept` seconds.
pub fn varnish(bed: &Bed, next: SocketAddr, kept: u32) -> Backend {
    let address = free_address();
    let directory = bed.path().join(format!("varnish-{kept}"));
    let mut command = bed.machine(1).under_shunt(&installed("/usr/sbin/varnishd", CHAINS));
    command.args(["-F", "-j", "none", "-a", &address.to_string(), "-b", &next.to_string(), "-n"]).arg(&directory);
    command.args(["-s", "malloc,64m", "-p", &format!("default_ttl={kept}"), "-p", "default_grace=0"]);
    command.args(["-p", "thread_pools=1", "-p", "thread_pool_min=10"]);
    start(command, address)
}

/// PostgreSQL on the backend's machine, with the files in a table.
pub struct Database {
    server: Backend,
    directory: PathBuf,
    /// Directory of psycopg2-binary.
    library: PathBuf,
}

/// Name and ID of the user as which the server runs. Its clients log in by the same name. PostgreSQL does not run as
/// root.
const USER: (&str, u32) = ("nobody", 65534);

const FILLS: &str = "
import os, sys, psycopg2
files = sys.argv[2]
with psycopg2.connect(sys.argv[1]) as connection, connection.cursor() as cursor:
    cursor.execute('create table bodies (name text primary key, body bytea)')
    for name in os.listdir(files):
        if os.path.isfile(os.path.join(files, name)):
            with open(os.path.join(files, name), 'rb') as file:
                cursor.execute('insert into bodies values (%s, %s)', (name, psycopg2.Binary(file.read())))
";

/// Python code that reads a body from the database, in place of the application's own code.
const READS: &str = "
import psycopg2, threading
kept = threading.local()

def body_of(name):
    if not hasattr(kept, 'connection'):
        kept.connection = psycopg2.connect(os.environ['DATABASE'])
        kept.connection.autocommit = True
    with kept.connection.cursor() as cursor:
        cursor.execute('select body from bodies where name = %s', (name,))
        return bytes(cursor.fetchone()[0])
";

impl Database {
    /// Starts the server and fills the table.
    pub fn start(bed: &Bed) -> Self {
        let postgres = installed("/usr/lib/postgresql/15/bin/postgres", CHAINS);
        let library = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/psycopg2");
        installed(library.join("psycopg2").to_str().unwrap(), CHAINS);
        let directory = bed.path().join("database");
        fs::create_dir_all(&directory).unwrap();
        let (address, data) = (free_address(), directory.join("data"));
        fs::create_dir_all(&data).unwrap();
        fs::set_permissions(&data, fs::Permissions::from_mode(0o700)).unwrap();
        let files_of_tls = certificate(bed);
        let (shown, key) = (directory.join("server.crt"), directory.join("server.key"));
        fs::copy(&files_of_tls.certificate, &shown).unwrap();
        fs::copy(&files_of_tls.key, &key).unwrap();
        fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();
        for path in [&directory, &data, &shown, &key] {
            chown(path, Some(USER.1), Some(USER.1)).unwrap();
        }
        let mut made = Command::new("/usr/sbin/runuser");
        made.args(["-u", USER.0, "--", "/usr/lib/postgresql/15/bin/initdb", "--no-sync", "--auth=trust", "-D"]);
        let made = made.arg(&data).args(["-U", USER.0]).current_dir(&directory).output().unwrap();
        assert!(made.status.success(), "initdb: {}", String::from_utf8_lossy(&made.stderr));
        let mut command = bed.machine(2).under_shunt("/usr/sbin/runuser");
        command.args(["-u", USER.0, "--", &postgres, "-D"]).arg(&data).current_dir(&directory);
        command.args(["-h", &address.ip().to_string(), "-p", &address.port().to_string(), "-c", "ssl=on"]);
        for (name, path) in [("unix_socket_directories", &directory), ("ssl_cert_file", &shown), ("ssl_key_file", &key)]
        {
            command.args(["-c", &format!("{name}={}", path.display())]);
        }
        let server = start(command, address);
        let this = Self { server, directory, library };
        this.fill(&files(bed));
        this
    }

    fn address(&self, encrypted: bool) -> String {
        let mode = if encrypted { "require" } else { "disable" };
        let SocketAddr::V4(address) = self.server.address else { unreachable!("IPv4") };
        format!("host={} port={} user={} dbname=postgres sslmode={mode}", address.ip(), address.port(), USER.0)
    }

    fn fill(&self, files: &Path) {
        let mut command = Command::new("/usr/bin/python3");
        command.args(["-B", "-c", FILLS, &self.address(false)]).arg(files).env("PYTHONPATH", &self.library);
        let filled = command.output().unwrap();
        assert!(filled.status.success(), "{}", String::from_utf8_lossy(&filled.stderr));
    }

    /// Starts gunicorn on the intermediate's machine. With `encrypted`, gunicorn speaks TLS with the database.
    pub fn gunicorn(&self, bed: &Bed, encrypted: bool) -> Backend {
        let address = free_address();
        let directory = self.directory.join(format!("application-{encrypted}"));
        fs::create_dir_all(&directory).unwrap();
        readable(&directory);
        let text = APPLICATION.replace("import os\n", &format!("import os\n{READS}"));
        let text =
            text.replace("with open(path, 'rb') as file:\n            body = file.read()", "body = body_of(name)");
        assert!(text.contains("body_of(name)\n"), "the application reads its bodies otherwise");
        fs::write(directory.join("served.py"), text).unwrap();
        let mut command = bed.machine(1).under_shunt("/usr/bin/python3");
        command.args(["-B", "/usr/bin/gunicorn", "--workers", "2", "--threads", "4", "--worker-class", "gthread"]);
        command.args(["--keep-alive", "30", "--log-level", "warning", "--bind", &address.to_string(), "--chdir"]);
        command.arg(&directory).arg("served:application").env("FILES", files(bed));
        command.env("DATABASE", self.address(encrypted)).env("PYTHONPATH", &self.library);
        start(command, address)
    }
}
