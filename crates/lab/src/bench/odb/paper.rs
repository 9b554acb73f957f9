//! `shunt-lab bench odb --paper`: measures Tables 4.1, 4.2 and 4.3 of the paper on on-demand buffers, and prints them
//! beside the paper's numbers. The paper's chain is nginx, nginx, PHP (its sections 4.4.4 and 4.4.5): the intermediate
//! speaks FastCGI, and the length of a body is a multiple of 4 KiB. A *payload* is a body that stays in the *store* of
//! the machine where it was written. A *reference* names bytes of a payload, and goes into a connection in their place.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use sha2::{Digest, Sha256};
use shunt_odb::reference::PayloadId;
use shunt_sys::output;

use super::frames::{Direction, Frame, directions};
use crate::fetch::fetch;
use crate::host::{Family, Host, Role};
use crate::lab::Lab;
use crate::meter::ByteMeter;
use crate::process::Process;
use crate::report::{Align, Paint, Progress, Table};
use crate::service::{OnDemand, Options, Service, Settings};
use crate::tcpdump::Tcpdump;

const PHP: &str = "/usr/sbin/php-fpm8.2";
const FASTCGI_PORT: u16 = 9000;
/// The paper's Tables 4.2 and 4.3. Each row has the length of a body in pages of 4 KiB, and the percentages of the body
/// that bypassed the intermediate. The first percentage is with aligned buffers (4.2), the second with unaligned ones
/// (4.3).
const BYPASSED: [(usize, f64, f64); 7] = [
    (1, 0.0, 0.0),
    (2, 50.0, 50.30),
    (4, 75.0, 75.0),
    (8, 87.5, 87.5),
    (16, 93.67, 93.75),
    (32, 93.75, 93.75),
    (64, 93.75, 93.75),
];
/// The paper's Table 4.1: length of the body in pages, number of page faults at the intermediate, lengths in bytes of
/// real writes and of virtual ones (by reference).
const WRITES: [(usize, u32, &str, &str); 4] =
    [(1, 1, "", "4184"), (2, 1, "96", "8192"), (3, 2, "", "8192 4200"), (4, 0, "88 16", "16384")];
/// Number of requests for each figure of Tables 4.2 and 4.3.
const REQUESTS: usize = 50;
const PAGE_BYTES: usize = 4096;

/// Measures all three tables and prints them.
pub(super) fn run() -> Result<()> {
    let progress = Progress::to_stderr();
    let mut text = String::new();
    for unaligned in [false, true] {
        progress.step(if unaligned { "unaligned buffers" } else { "aligned buffers" });
        let lab = Lab::builder().intermediates(1).build()?;
        let site = Site::start(&lab, OnDemand { unaligned, checks_locks: false })?;
        if !unaligned {
            writeln!(
                text,
                "Table 4.1: what the backend writes for one page, and which part of it the intermediate reads\n"
            )?;
            text += &site.writes()?.show(Paint::of(&std::io::stdout()));
        }
        let number = if unaligned { "4.3: buffers begin inside a page" } else { "4.2: buffers begin at a page" };
        writeln!(text, "\nTable {number}; what bypasses the intermediate\n")?;
        text += &site.bypassed(unaligned)?.show(Paint::of(&std::io::stdout()));
    }
    progress.clear();
    output::write(&text)?;
    Ok(())
}

/// The running chain of nginx, nginx and PHP.
struct Site<'lab> {
    lab: &'lab Lab,
    service: Service<'lab>,
    _php: Process,
}

impl<'lab> Site<'lab> {
    fn start(lab: &'lab Lab, on_demand: OnDemand) -> Result<Self> {
        let settings = Settings { locations: Some(fastcgi), ..Settings::default() };
        let files = lab.files(&[("0", 0)])?;
        let options = Options { on_demand: Some(on_demand), settings, ..Options::default() };
        let service = Service::start(lab, &files, options)?;
        let php = php(lab.backend(), on_demand)?;
        Ok(Self { lab, service, _php: php })
    }

    /// Fetches a body of `pages` pages `times` times, and checks every byte.
    fn fetch(&self, pages: usize, times: usize) -> Result<()> {
        let paths = vec![format!("/php/{pages}"); times];
        let expected = b"0123456789abcdef".repeat(pages * PAGE_BYTES / 16);
        let expected: String = Sha256::digest(expected).iter().map(|byte| format!("{byte:02x}")).collect();
        for fetched in fetch(self.lab.client(), self.service.chain().server(), &paths)? {
            ensure!(fetched.status == 200, "{pages} pages were answered with {}", fetched.status);
            ensure!(fetched.sha256 == expected, "{pages} pages came with other bytes");
        }
        Ok(())
    }

    fn intermediate(&self) -> Result<&'lab Host> {
        self.lab.intermediates().first().copied().context("the lab has no intermediate")
    }

    /// Measures Table 4.1.
    fn writes(&self) -> Result<Table> {
        let intermediate = self.intermediate()?;
        let device = &intermediate.ports().first().context("the intermediate has no port")?.device;
        let tcpdump = Tcpdump::start_whole(intermediate, device, "tcp")?;
        for (pages, ..) in WRITES {
            self.fetch(pages, 1)?;
        }
        let directions = directions(&tcpdump.stop()?)?;
        let backend = fastcgi_address(self.lab)?;
        let written: Vec<&Direction> = directions.iter().filter(|one| one.source == backend).collect();
        ensure!(written.len() == WRITES.len(), "{} connections to PHP for {} pages", written.len(), WRITES.len());
        let forwarded = forwarded(&directions, backend);
        let mut table = Table::new(&[
            ("pages", Align::Left),
            ("real", Align::Right),
            ("virtual", Align::Right),
            ("looked at", Align::Right),
            ("paper: real", Align::Right),
            ("virtual", Align::Right),
            ("faults", Align::Right),
        ]);
        for ((pages, faults, real, by_reference), direction) in WRITES.into_iter().zip(written) {
            let touched = touched(direction, &forwarded);
            let of = |wanted: fn(&Frame) -> Option<u64>| {
                let lengths: Vec<String> =
                    direction.frames.iter().filter_map(wanted).map(|length| length.to_string()).collect();
                lengths.join(" ")
            };
            let ours = [
                of(|frame| if let Frame::Real(length) = frame { Some(*length) } else { None }),
                of(|frame| if let Frame::Reference(_, length) = frame { Some(*length) } else { None }),
            ];
            let paper = [real.to_owned(), by_reference.to_owned(), faults.to_string()];
            let first = [format!("{pages}x4k")];
            table.row(first.into_iter().chain(ours).chain([touched.to_string()]).chain(paper));
        }
        Ok(table)
    }

    /// Measures Table 4.2 or 4.3. All bytes that reach the intermediate count as not bypassed: real bytes and
    /// references in connections, acknowledgements, and bytes that the intermediate fetches from a store. The bytes
    /// that the intermediate receives for empty bodies are subtracted.
    fn bypassed(&self, unaligned: bool) -> Result<Table> {
        let received = |pages: usize| -> Result<u64> {
            let meter = ByteMeter::start(self.intermediate()?)?;
            self.fetch(pages, REQUESTS)?;
            Ok(meter.total()?.rx_bytes)
        };
        received(16)?;
        let without = received(0)?;
        let mut table = Table::new(&[
            ("pages", Align::Left),
            ("bytes", Align::Right),
            ("bypassed", Align::Right),
            ("percent", Align::Right),
            ("paper", Align::Right),
        ]);
        for (pages, aligned, elsewhere) in BYPASSED {
            let bytes = (pages * PAGE_BYTES * REQUESTS) as u64;
            let came = received(pages)?.saturating_sub(without);
            let passed = bytes.saturating_sub(came);
            table.row([
                format!("{pages}x4k"),
                bytes.to_string(),
                passed.to_string(),
                format!("{:.2}", 100.0 * passed as f64 / bytes as f64),
                format!("{:.2}", if unaligned { elsewhere } else { aligned }),
            ]);
        }
        Ok(table)
    }
}

/// For each payload, the number of the payload's bytes in the references that programs other than `writer` have sent.
fn forwarded(directions: &[Direction], writer: SocketAddr) -> HashMap<PayloadId, u64> {
    let mut bytes = HashMap::new();
    for frame in directions.iter().filter(|one| one.source != writer).flat_map(|one| &one.frames) {
        if let Frame::Reference(payload, length) = frame {
            *bytes.entry(*payload).or_default() += length;
        }
    }
    bytes
}

/// Number of bytes that the writer sent by reference in this direction, less those that the intermediate passed on by
/// reference. The rest are bytes whose pages the intermediate has read.
fn touched(direction: &Direction, forwarded: &HashMap<PayloadId, u64>) -> u64 {
    let of = |frame: &Frame| match frame {
        Frame::Reference(payload, length) => length.saturating_sub(forwarded.get(payload).copied().unwrap_or(0)),
        Frame::Real(_) => 0,
    };
    direction.frames.iter().map(of).sum()
}

fn fastcgi_address(lab: &Lab) -> Result<SocketAddr> {
    Ok(SocketAddr::new(lab.backend().service_address_of(Family::V4)?, FASTCGI_PORT))
}

/// nginx location that passes requests to PHP; empty for every host but the intermediate.
fn fastcgi(lab: &Lab, host: &Host) -> String {
    let Ok(address) = fastcgi_address(lab) else { return String::new() };
    if host.role() != Role::Intermediate {
        return String::new();
    }
    format!(
        "        location /php/ {{\n            fastcgi_pass {address};\n            fastcgi_param SCRIPT_FILENAME {};\n            \
         fastcgi_param REQUEST_METHOD $request_method;\n            fastcgi_param REQUEST_URI $request_uri;\n            \
         fastcgi_buffer_size 16k;\n            fastcgi_buffers 32 64k;\n            fastcgi_max_temp_file_size 0;\n        }}\n",
        script(lab.backend()).display()
    )
}

fn script(backend: &Host) -> std::path::PathBuf {
    backend.dir().join("page.php")
}

/// Starts PHP-FPM with one worker process.
fn php(backend: &Host, on_demand: OnDemand) -> Result<Process> {
    let address = SocketAddr::new(backend.service_address_of(Family::V4)?, FASTCGI_PORT);
    let page = "<?php\n$pages = (int)substr(strrchr($_SERVER['REQUEST_URI'], '/'), 1);\n\
                header('Content-Type: application/octet-stream');\necho str_repeat('0123456789abcdef', 256 * $pages);\n";
    std::fs::write(script(backend), page)?;
    let file = backend.dir().join("fpm.conf");
    let text = format!(
        "[global]\nerror_log = /proc/self/fd/2\nlog_level = warning\ndaemonize = no\n\
         [www]\nuser = root\ngroup = root\nlisten = {address}\npm = static\npm.max_children = 1\n"
    );
    std::fs::write(&file, text)?;
    let mut command: Command = on_demand.command(backend)?;
    command.arg(PHP).args(["-F", "-O", "-R", "-y"]).arg(&file);
    backend.serve(command, address).context("PHP-FPM (Debian: php-fpm)")
}

#[cfg(test)]
mod tests {
    use super::*;
    use shunt_odb::reference::Holder;

    #[test]
    fn bytes_that_are_not_passed_on_count_as_read() {
        let payload = |slot| PayloadId { holder: Holder::named("be"), segment: 0, slot, secret: 1 };
        let [backend, intermediate]: [SocketAddr; 2] = ["10.0.0.2:9000", "10.0.0.1:80"].map(|at| at.parse().unwrap());
        let written = Direction { source: backend, frames: vec![Frame::Reference(payload(1), 8192), Frame::Real(96)] };
        let sent = Direction { source: intermediate, frames: vec![Frame::Reference(payload(1), 4096)] };
        let all = [written, sent];
        assert_eq!(touched(&all[0], &forwarded(&all, backend)), 4096);
        assert_eq!(touched(&all[0], &HashMap::new()), 8192);
    }
}
