//! HTTP/2 on TLS. The frontend has to put bodies into HTTP/2 frames, so it relays the responses (sends them itself),
//! and counts them.

use std::process::Command;

use anyhow::{Result, ensure};
use shunt_lab::{Host, Lab, Options, Role, Settings};

use crate::bed::{FILES, authority, compare};
use crate::service::{needs_root, start_on};

const PORT: u16 = 8443;

fn http2_listener(_: &Lab, host: &Host) -> String {
    match host.role() {
        Role::Frontend => format!("        listen {}:{PORT} ssl http2;\n", host.address()),
        _ => String::new(),
    }
}

#[test]
fn http2_is_relayed_and_counted() -> Result<()> {
    needs_root();
    let settings = Settings { tls: Some(""), locations: Some(http2_listener), ..Settings::default() };
    let options = Options { offer_min: Some(1 << 10), settings, ..Options::steady() };
    start_on(Lab::builder().intermediates(1), FILES, options, |service| {
        let (address, authority) = (service.lab.frontend().address(), authority(service));
        let url = |name: &str| format!("https://{address}:{PORT}/{name}");
        let urls: Vec<_> = FILES.iter().map(|(name, _)| ((*name).to_owned(), url(name))).collect();
        let counted = compare(service, &urls, |client, directory| {
            let mut curl = Command::new("curl");
            curl.args(["--silent", "--show-error", "--fail", "--max-time", "60", "--http2", "--parallel", "--cacert"]);
            curl.arg(&authority).args(["--write-out", "%{http_version}\n"]);
            for (index, (_, url)) in urls.iter().enumerate() {
                curl.args(["--output", &format!("{directory}/{index}"), url]);
            }
            let versions = client.check(curl)?;
            ensure!(versions.lines().all(|version| version == "2"), "not HTTP/2: {versions}");
            Ok(())
        })?;
        counted.ensure("shortcuts", 0)?;
        counted.ensure("relayed_protocol", urls.len())?;
        let mut h2load = Command::new("h2load");
        h2load.args(["--requests=300", "--clients=5", "--max-concurrent-streams=10", &url("64k")]);
        let text = service.lab.client().check(h2load)?;
        ensure!(text.contains("300 succeeded, 0 failed, 0 errored, 0 timeout"), "{text}");
        // Over HTTP/1.1 the same bodies still take the shortcut.
        let urls: Vec<_> =
            FILES.iter().map(|(name, _)| ((*name).to_owned(), format!("https://{address}/{name}"))).collect();
        let counted = compare(service, &urls, |client, directory| {
            let mut curl = Command::new("curl");
            curl.args(["--silent", "--show-error", "--fail", "--max-time", "60", "--http2", "--cacert"])
                .arg(&authority);
            for (index, (_, url)) in urls.iter().enumerate() {
                curl.args(["--output", &format!("{directory}/{index}"), url]);
            }
            client.check(curl).map(drop)
        })?;
        counted.ensure("shortcuts", urls.len())
    })
}
