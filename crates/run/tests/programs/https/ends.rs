//! Proxies that terminate TLS on the frontend's machine, in front of a service that speaks plain HTTP.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use shunt_ca::Files;

use crate::backends::{Backend, installed, start};
use crate::bed::{Bed, free_address};
use crate::nginx::{Tier, proxy_to, tier};
use crate::tls::certificate;

/// Command that installs these programs.
const PACKAGES: &str = "make packages";

/// A running proxy that terminates TLS, and the address at which it listens.
pub struct End {
    pub address: SocketAddr,
    _program: Program,
}

/// The program, which ends with the test.
#[expect(dead_code, reason = "kept for its end")]
enum Program {
    Nginx(Tier),
    Other(Backend),
}

fn of(program: Backend) -> End {
    End { address: program.address, _program: Program::Other(program) }
}

/// Makes a directory for one of the proxies.
fn directory(bed: &Bed, name: &str) -> PathBuf {
    let path = bed.path().join(name);
    fs::create_dir_all(&path).unwrap();
    crate::mix::readable(&path);
    path
}

fn text_of(files: &Files) -> String {
    [&files.certificate, &files.key].map(|path| fs::read_to_string(path).unwrap()).concat()
}

pub fn nginx(bed: &Bed, next: SocketAddr) -> End {
    let (files, address) = (certificate(bed), free_address());
    let (http, server) = proxy_to(next, "proxy_buffers 32 64k; proxy_max_temp_file_size 0;");
    let http = format!(
        "{http} ssl_protocols TLSv1.3; ssl_certificate {}; ssl_certificate_key {}; server {{ listen {address} ssl; {server} }}",
        files.certificate.display(),
        files.key.display()
    );
    End { address, _program: Program::Nginx(tier(bed, "frontend", &http, &server, true)) }
}

/// Starts HAProxy as an ordinary user in an empty root directory, as Debian's configuration does.
pub fn haproxy(bed: &Bed, next: SocketAddr) -> End {
    let (address, directory) = (free_address(), directory(bed, "haproxy-tls"));
    fs::write(directory.join("both.pem"), text_of(&certificate(bed))).unwrap();
    let root = directory.join("root");
    fs::create_dir_all(&root).unwrap();
    let text = format!(
        "global\n  nbthread 2\n  maxconn 1000\n  chroot {}\n  user www-data\n  group www-data\n\
         defaults\n  mode http\n  timeout client 60s\n  timeout server 60s\n  timeout connect 5s\n\
         frontend in\n  bind {address} ssl crt {} ssl-min-ver TLSv1.3\n  default_backend out\n\
         backend out\n  http-reuse always\n  server next {next}\n",
        root.display(),
        directory.join("both.pem").display(),
    );
    let path = directory.join("haproxy.cfg");
    fs::write(&path, text).unwrap();
    let mut command = bed.machine(0).under_shunt("/usr/sbin/haproxy");
    command.args(["-db", "-f"]).arg(&path);
    of(start(command, address))
}

pub fn apache(bed: &Bed, next: SocketAddr) -> End {
    let (files, address, directory) = (certificate(bed), free_address(), directory(bed, "apache-tls"));
    let mut text = String::new();
    for module in ["mpm_event", "authz_core", "socache_shmcb", "ssl", "proxy", "proxy_http"] {
        text += &format!("LoadModule {module}_module /usr/lib/apache2/modules/mod_{module}.so\n");
    }
    text += &format!(
        "ServerName frontend\nServerRoot {0}\nDefaultRuntimeDir {0}\nPidFile {0}/pid\nMutex file:{0} default\n\
         ErrorLog /dev/stderr\nLogLevel warn\nUser www-data\nGroup www-data\nListen {address}\nKeepAlive On\n\
         MaxKeepAliveRequests 0\nStartServers 1\nServerLimit 1\nThreadsPerChild 8\nMaxRequestWorkers 8\n\
         MinSpareThreads 1\nMaxSpareThreads 8\nSSLEngine on\nSSLProtocol TLSv1.3\nSSLCertificateFile {1}\n\
         SSLCertificateKeyFile {2}\nProxyPass / http://{next}/\n",
        directory.display(),
        files.certificate.display(),
        files.key.display()
    );
    fs::write(directory.join("apache.conf"), text).unwrap();
    let mut command = bed.machine(0).under_shunt(&installed("/usr/sbin/apache2", PACKAGES));
    command.args(["-D", "FOREGROUND", "-f"]).arg(directory.join("apache.conf"));
    of(start(command, address))
}

const NODE: &str = r"
const [, , host, port, next, nextPort, certificate, key] = process.argv;
const [fs, http, https] = ['fs', 'http', 'https'].map(require);
const agent = new http.Agent({ keepAlive: true, maxSockets: 16 });
const tls = { cert: fs.readFileSync(certificate), key: fs.readFileSync(key), minVersion: 'TLSv1.3' };
https.createServer(tls, (request, response) => {
    const { method, url: path, headers } = request;
    const asked = http.request({ agent, host: next, port: nextPort, method, path, headers }, (answer) => {
        response.writeHead(answer.statusCode, answer.headers);
        answer.pipe(response);
    });
    asked.on('error', (error) => response.destroy(error));
    request.pipe(asked);
}).listen(port, host);
";

/// Starts Node.js, whose OpenSSL is a part of the program.
pub fn node(bed: &Bed, next: SocketAddr) -> End {
    let (files, address, directory) = (certificate(bed), free_address(), directory(bed, "node"));
    let script = directory.join("proxy.js");
    fs::write(&script, NODE).unwrap();
    let mut command = bed.machine(0).under_shunt(&installed("node", PACKAGES));
    command.arg(script).args(ends(address, next)).args([&files.certificate, &files.key]);
    of(start(command, address))
}

fn ends(address: SocketAddr, next: SocketAddr) -> [String; 4] {
    [address.ip().to_string(), address.port().to_string(), next.ip().to_string(), next.port().to_string()]
}

const JAVA: &str = r#"
import com.sun.net.httpserver.*;
import java.io.*;
import java.net.*;
import java.nio.file.*;
import java.security.KeyStore;
import java.util.concurrent.Executors;
import javax.net.ssl.*;

class Proxy {
    public static void main(String[] of) throws Exception {
        char[] word = "frontend".toCharArray();
        KeyStore store = KeyStore.getInstance("PKCS12");
        store.load(Files.newInputStream(Path.of(of[4])), word);
        KeyManagerFactory keys = KeyManagerFactory.getInstance("SunX509");
        keys.init(store, word);
        SSLContext context = SSLContext.getInstance("TLSv1.3");
        context.init(keys.getKeyManagers(), null, null);
        HttpsServer server = HttpsServer.create(new InetSocketAddress(of[0], Integer.parseInt(of[1])), 64);
        server.setHttpsConfigurator(new HttpsConfigurator(context));
        server.setExecutor(Executors.newFixedThreadPool(8));
        server.createContext("/", (exchange) -> {
            try (exchange) {
                URL url = new URL("http://" + of[2] + ":" + of[3] + exchange.getRequestURI());
                HttpURLConnection asked = (HttpURLConnection) url.openConnection();
                asked.setRequestMethod(exchange.getRequestMethod());
                String range = exchange.getRequestHeaders().getFirst("Range");
                if (range != null) {
                    asked.setRequestProperty("Range", range);
                }
                int status = asked.getResponseCode();
                long length = asked.getContentLengthLong();
                boolean isHead = exchange.getRequestMethod().equals("HEAD");
                exchange.sendResponseHeaders(status, isHead || length == 0 ? -1 : Math.max(length, 0));
                if (!isHead) {
                    try (InputStream from = asked.getInputStream(); OutputStream to = exchange.getResponseBody()) {
                        from.transferTo(to);
                    }
                }
            }
        });
        server.start();
    }
}
"#;

/// Starts Java, which has its own TLS.
pub fn java(bed: &Bed, next: SocketAddr) -> End {
    let (files, address, directory) = (certificate(bed), free_address(), directory(bed, "java"));
    let source = directory.join("Proxy.java");
    fs::write(&source, JAVA).unwrap();
    let keys = directory.join("keys.p12");
    together(&files, &keys);
    let mut command = bed.machine(0).under_shunt(&installed("/usr/bin/java", PACKAGES));
    command.arg(source).args(ends(address, next)).arg(keys);
    of(start(command, address))
}

/// Puts certificate and key into one PKCS #12 file, which Java reads.
fn together(files: &Files, to: &Path) {
    let mut command = Command::new("openssl");
    command.args(["pkcs12", "-export", "-passout", "pass:frontend", "-in"]).arg(&files.certificate);
    let made = command.arg("-inkey").arg(&files.key).arg("-out").arg(to).status().unwrap();
    assert!(made.success(), "openssl pkcs12: {made}");
    fs::set_permissions(to, fs::Permissions::from_mode(0o600)).unwrap();
}
