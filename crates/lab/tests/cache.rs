//! A proxy cache as backend. nginx rewrites the header in a file of its cache when it revalidates a response. Responses
//! that are being sent from this file meanwhile must stay whole: their bodies, behind the header, do not change.

mod service;

use std::os::unix::fs::symlink;

use anyhow::{Result, ensure};
use service::held::Held;
use service::{Running, needs_root, start_on};
use shunt_lab::{Host, Lab, Options, Role, Settings, fetch};
use shunt_testbed::wait_or_fail;

const FILES: &[(&str, u64)] = &[("1m", 1 << 20), ("7m", 7 << 20)];
const CACHE: &[&str] = &["proxy_cache_path temp/cache keys_zone=c:1m use_temp_path=off"];

/// Returns two locations of the backend's nginx: one with a cache, and one with the files, from which the cache gets
/// its responses.
fn cache(lab: &Lab, host: &Host) -> String {
    if host.role() != Role::Backend {
        return String::new();
    }
    let files = lab.dir().join("files");
    format!(
        "        location /cached/ {{
            proxy_pass http://{}/origin/; proxy_http_version 1.1; shunt off; shunt_offer on;
            proxy_cache c; proxy_cache_valid 200 1s; proxy_cache_revalidate on; add_header X-Cache $upstream_cache_status;
        }}
        location /origin/ {{ alias {}/; }}\n",
        host.address(),
        files.display()
    )
}

/// Fetches a path, asserts that the body is whole, and returns its cache status.
fn ask(service: &Running<'_>, path: &'static str) -> Result<String> {
    let fetched = fetch(service.lab.client(), service.service.chain().server(), &[path])?;
    service.whole(&fetched)?;
    Ok(fetched[0].field("x-cache").unwrap_or_default().to_owned())
}

/// Asks for a path again and again, until a request has made the cache revalidate the response.
fn until_revalidated(service: &Running<'_>, path: &'static str) -> Result<()> {
    wait_or_fail(&format!("{path} is revalidated"), || Ok(ask(service, path)? == "REVALIDATED"))
}

#[test]
fn bodies_stay_whole_when_their_cache_revalidates_them() -> Result<()> {
    needs_root();
    let settings = Settings { http: CACHE, locations: Some(cache), ..Settings::default() };
    start_on(Lab::builder(), FILES, Options { settings, ..Options::shunt() }, |service| {
        symlink(".", service.files.join("cached"))?;
        for path in ["/cached/1m", "/cached/7m"] {
            ensure!(ask(service, path)? == "MISS", "{path} was there before");
        }
        for _ in 0..3 {
            let under_way = service.lab.client().run(|| Held::ask(service, "cached/7m", ""))??;
            until_revalidated(service, "/cached/7m")?;
            until_revalidated(service, "/cached/1m")?;
            service.lab.client().run(|| under_way.finish(service))??;
        }
        let stats = service.service.all_stats()?;
        ensure!(stats.count("servers.aborted") == 0, "{:#}", stats.0);
        ensure!(stats.count("servers.shortcuts") >= 9, "{:#}", stats.0["servers"]);
        Ok(())
    })
}
